"""Who we talk to: one small object for a process group, a mesh dimension, or a single process without any group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longweave.errors import GroupError, InputError

Group = dist.ProcessGroup | DeviceMesh | None


@dataclass(frozen=True)
class Comm:
    """A process group seen from this rank. `rank` counts inside the group; torch calls it the group rank."""

    group: dist.ProcessGroup | None  # None: one process, torch.distributed not initialised
    rank: int
    size: int

    @cached_property
    def control_device(self) -> torch.device:
        """Where small control tensors must live to be sent over this group."""
        kinds = self._device_types
        if "cpu" in kinds:
            return torch.device("cpu")
        return torch.device(min(kinds), torch.accelerator.current_device_index())

    @property
    def is_cpu_only(self) -> bool:
        """Can this group carry nothing but CPU tensors? gloo names CUDA also where there is no device."""
        return self._device_types == {"cpu"} or not torch.accelerator.is_available()

    @cached_property
    def _device_types(self) -> set[str]:
        if self.group is None:
            return {"cpu"}
        return {device.type for device in self.group._device_types}


def resolve(group: Group) -> Comm:
    """A Comm for a ProcessGroup, a 1-D DeviceMesh, or None (the default group; one rank if there is none)."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InputError(
                f"group is a DeviceMesh with dimensions {group.mesh_dim_names or group.ndim}; "
                'give the one that splits the sequence, such as mesh["cp"]'
            )
        group = group.get_group()
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            return Comm(None, 0, 1)
        group = dist.group.WORLD
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise GroupError("this process is not a member of the group; call only on the group's own ranks")
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(f"group is a {type(group).__name__}; give a ProcessGroup, a 1-D DeviceMesh or None")
    rank = dist.get_rank(group)
    if rank < 0:
        raise GroupError("this process is not a member of the group; call only on the group's own ranks")
    return Comm(group, rank, dist.get_world_size(group))


def ranks_of(group: Group) -> int:
    """How many ranks there are, also in a mesh of several dimensions."""
    return int(group.size()) if isinstance(group, DeviceMesh) else resolve(group).size


def name_of(group: Group) -> str:
    """A string that tells groups apart; "" is a single process."""
    comm = resolve(group)
    return "" if comm.group is None else comm.group.group_name
