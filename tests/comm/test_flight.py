"""A call that not all ranks make: every rank raises, soon, and says who is where."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import longweave as lw
from longweave.comm.exchange import resolve
from longweave.comm.ledger import RecordedCall
from longweave.comm.watch import wait_for, wait_limit
from longweave.launch import Ranks

FULL = bool(os.environ.get("LONGWEAVE_FULL"))
CU = [0, 7, 24]
ODD = 1  # the rank that does something else
WAIT = 2.0  # seconds; ranks that wait in different calls are found out sooner


def tensors(pack: lw.Pack, heads: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(pack.tokens, heads, 8, dtype=dtype, requires_grad=True) for _ in range(3)]


def attend(pack: lw.Pack, **how: Any) -> Tensor:
    return lw.attention(*tensors(pack), pack, **how)


def mix(pack: lw.Pack, **how: Any) -> Tensor:
    g = -torch.rand(pack.tokens, 2)
    return lw.gated_delta_rule(*tensors(pack), g, torch.rand(pack.tokens, 2), pack, **how)


def conv(pack: lw.Pack, width: int = 3) -> Tensor:
    x, weight = torch.randn(pack.tokens, 4, requires_grad=True), torch.randn(4, width, requires_grad=True)
    return lw.causal_conv1d(x, weight, None, pack)


def skips_a_layer(pack: lw.Pack, odd: bool) -> None:
    outs = [attend(pack)] + ([] if odd else [attend(pack)])
    torch.stack(outs).sum().backward()


def skips_the_backward(pack: lw.Pack, odd: bool) -> None:
    out = attend(pack)
    if not odd:
        out.sum().backward()
    lw.Pack(CU, layout="zigzag")


def runs_backward_twice(pack: lw.Pack, odd: bool) -> None:
    out = attend(pack)
    out.sum().backward(retain_graph=odd)
    if odd:
        out.sum().backward()
    lw.Pack(CU, layout="zigzag")


def is_in_no_grad(pack: lw.Pack, odd: bool) -> None:
    with torch.no_grad() if odd else torch.enable_grad():
        out = attend(pack)
    if not odd:
        out.sum().backward()
    lw.Pack(CU, layout="zigzag")


def skips_a_step_on_its_own_loss(pack: lw.Pack, odd: bool) -> None:
    for step in range(2):
        out = mix(lw.Pack(CU, layout="zigzag"))
        if odd and step == 0:
            continue
        out.sum().backward()


def makes_a_pack_alone(pack: lw.Pack, odd: bool) -> None:
    attend(lw.Pack(CU, layout="zigzag") if odd else pack)


def has_another_dtype(pack: lw.Pack, odd: bool) -> None:
    lw.attention(*tensors(pack, dtype=torch.float64 if odd else torch.float32), pack)


def has_other_heads(pack: lw.Pack, odd: bool) -> None:
    lw.attention(*tensors(pack, heads=4 if odd else 2), pack)


def uses_other_stages(pack: lw.Pack, odd: bool) -> None:
    attend(pack, strategy="groupcast", stages=2 if odd else 1)


def uses_another_method(pack: lw.Pack, odd: bool) -> None:
    mix(pack, method="gather" if odd else "affine")


def has_another_conv_width(pack: lw.Pack, odd: bool) -> None:
    conv(pack, 4 if odd else 3)


def swaps_two_layers(pack: lw.Pack, odd: bool) -> None:
    for layer in (mix, conv) if odd else (conv, mix):
        layer(pack)


def reduces_alone(pack: lw.Pack, odd: bool) -> None:
    if odd:
        lw.reduce_gradients(nn.Linear(3, 3))
    else:
        attend(pack)


def sleeps(pack: lw.Pack, odd: bool) -> None:
    if odd:
        time.sleep(WAIT + 4)
    attend(pack)


WAYS: dict[str, tuple[Callable[[lw.Pack, bool], None], str]] = {
    "skips a layer": (skips_a_layer, "attention, forward"),
    "skips the backward": (skips_the_backward, "attention, backward"),
    "runs backward twice": (runs_backward_twice, "attention, backward"),
    "is in no_grad": (is_in_no_grad, "attention, backward"),
    "skips a step on its own loss": (skips_a_step_on_its_own_loss, "gated_delta_rule, backward"),
    "makes a pack alone": (makes_a_pack_alone, "agreement on a pack"),
    "has another dtype": (has_another_dtype, "other dtypes, shapes or options"),
    "has other heads": (has_other_heads, "other dtypes, shapes or options"),
    "uses other stages": (uses_other_stages, "other dtypes, shapes or options"),
    "uses another method": (uses_another_method, "other dtypes, shapes or options"),
    "has another conv width": (has_another_conv_width, "other dtypes, shapes or options"),
    "swaps two layers": (swaps_two_layers, "causal_conv1d, forward"),
    "reduces alone": (reduces_alone, "reduce_gradients"),
    "sleeps": (sleeps, "rank 1 did not come to attention, forward"),
}


def differ(way: str) -> tuple[str, float, str]:
    """What is raised on a later pack, after how long, and what a call after that says."""
    lw.set_wait(WAIT)
    try:
        lw.Pack(CU, layout="zigzag")
        pack = lw.Pack(CU, layout="zigzag")
        attend(pack)
        mix(pack)
        conv(pack)
        begin = time.monotonic()
        said = later = "nothing raised"
        try:
            WAYS[way][0](pack, dist.get_rank() == ODD)
            lw.Pack(CU, layout="zigzag")
        except lw.GroupError as error:
            said = str(error)
        seconds = time.monotonic() - begin
        try:
            lw.Pack(CU, layout="zigzag")
        except lw.GroupError as error:
            later = str(error)
        return said, seconds, later
    finally:
        lw.set_wait(None)


@pytest.mark.parametrize("size", [2, 3] if FULL else [3])
@pytest.mark.parametrize("way", WAYS)
def test_every_rank_is_told_who_is_where(ranks: Ranks, way: str, size: int) -> None:
    for said, seconds, later in ranks.run(differ, way, size=size, timeout=60):
        assert WAYS[way][1] in said, said
        assert re.search(r"rank 1|ranks 1", said), said
        assert seconds < WAIT + 12
        assert later != "nothing raised", "the group cannot be used any more"


# -- one rank raises -----------------------------------------------------------------------------------


def refused_at_the_door(pack: lw.Pack, odd: bool) -> None:
    q, k, v = tensors(pack)
    lw.attention(q[:-1] if odd else q, k, v, pack)


def another_batch_in_the_same_layout(pack: lw.Pack, odd: bool) -> None:
    lw.Pack([0, 9, 24] if odd else CU, layout=pack.layout)


def bad_batch_in_the_same_layout(pack: lw.Pack, odd: bool) -> None:
    lw.Pack([0, 9, 8, 24] if odd else CU, layout=pack.layout)


def raises_in_backward(pack: lw.Pack, odd: bool) -> None:
    out = lw.gather_recompute(Fails(odd), torch.randn(pack.tokens, 4, requires_grad=True), pack)
    out.sum().backward()


class Fails(nn.Module):
    """Raises when it is called for the second time, which is in backward."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails, self.calls = fails, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fails and self.calls == 2:
            raise MemoryError("no memory left")
        return x * 2


RAISING: dict[str, tuple[Callable[[lw.Pack, bool], None], str, str]] = {
    "at the door": (refused_at_the_door, "InputError", "rank 1 left attention, forward, call 3 with InputError"),
    "in backward": (
        raises_in_backward,
        "MemoryError",
        "rank 1 left gather_recompute, backward, call 4 with MemoryError",
    ),
    "another batch": (another_batch_in_the_same_layout, "GroupError", "another pack"),
    "a bad batch": (bad_batch_in_the_same_layout, "InputError", "rank 1 of the group refused this call"),
}


def raise_on_one(way: str) -> tuple[str, float]:
    lw.Pack(CU, layout="zigzag")
    pack = lw.Pack(CU, layout="zigzag")
    begin = time.monotonic()
    said = "nothing raised"
    try:
        RAISING[way][0](pack, dist.get_rank() == ODD)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begin
    if dist.get_rank() == ODD:
        time.sleep(4)  # it lives on, as where an error is caught: its connections stay open
    return said, seconds


@pytest.mark.parametrize("size", [2, 4] if FULL else [2])
@pytest.mark.parametrize("way", RAISING)
def test_a_rank_that_raises_is_named_at_once(ranks: Ranks, way: str, size: int) -> None:
    _, own, others = RAISING[way]
    for rank, (said, seconds) in enumerate(ranks.run(raise_on_one, way, size=size, timeout=60)):
        assert said.startswith(own) if rank == ODD else said.startswith("GroupError"), said
        assert rank == ODD or others in said or "disagree" in said, said
        assert seconds < 8, "long before the wait is over"


def raise_alike(strategy: str) -> list[float]:
    """All ranks raise in the middle of a call, catch it, and go on."""
    lw.Pack(CU, layout="zigzag", strategy=strategy)
    sums = []
    for step in range(4):
        pack = lw.Pack(CU, layout="zigzag", strategy=strategy)
        q, k, v = (torch.ones(pack.tokens, 2, 8) for _ in range(3))
        if step % 2 == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("longweave.kernels.attention.Kernel.forward", fails)
                with pytest.raises(MemoryError):
                    lw.attention(q, k, v, pack)
        sums.append(float(lw.reduce_sum(float(lw.attention(q, k, v, pack).sum()))))
    return sums


def fails(*args: object, **kwargs: object) -> None:
    raise MemoryError("no memory left")


@pytest.mark.parametrize("strategy", ["ring", "groupcast", "allgather"])
def test_where_all_ranks_raise_alike_the_group_stays_good(ranks: Ranks, strategy: str) -> None:
    for sums in ranks.run(raise_alike, strategy, size=3, timeout=60):
        assert sums == [24.0 * 2 * 8] * 4


# -- nobody is at fault ----------------------------------------------------------------------------------


def slow_but_getting_on() -> float:
    """Rank 2 needs longer than the limit for its layers together; the others need nothing of it until the end."""
    lw.Pack(CU)
    lw.set_wait(1.5)
    try:
        pack = lw.Pack([0, 8, 16, 24], layout="contiguous", strategy="groupcast")
        for _ in range(5):
            time.sleep(0.8 if dist.get_rank() == 2 else 0)
            attend(pack)
        return lw.reduce_sum(1.0)
    finally:
        lw.set_wait(None)


def test_a_slow_rank_that_gets_on_is_waited_for(ranks: Ranks) -> None:
    assert ranks.run(slow_but_getting_on, size=3, timeout=60) == [3.0] * 3


def raise_alike_one_late() -> float:
    """All ranks make a good call and the same bad one; rank 0 is late for the good one."""
    lw.Pack(CU)
    pack = lw.Pack(CU, layout="zigzag")
    x = torch.randn(pack.tokens, 3)
    if dist.get_rank() == 0:
        time.sleep(2.5)
    lw.shift(x, pack)
    with pytest.raises(lw.InputError):
        lw.shift(x[:-1], pack)
    return lw.reduce_sum(1.0)


def test_ranks_that_raise_before_others_come_to_it_are_no_trouble(ranks: Ranks) -> None:
    assert ranks.run(raise_alike_one_late, size=4, timeout=60) == [4.0] * 4


# -- a device waits, the process does not ----------------------------------------------------------------


class DeviceWaits:
    """The work of an exchange on a device, as NCCL returns it: the process does not wait."""

    def wait(self) -> None:
        pass


class NeverReached:
    """An event that is recorded behind such an exchange."""

    def __init__(self, device: torch.device) -> None:
        pass

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return False


def device_waits() -> str:
    lw.set_wait(0.2)  # a device is waited for 20 times as long: it may have much to do before
    try:
        ledger = resolve(None).ledger
        lw.Pack(CU)
        if dist.get_rank() != ODD:
            with RecordedCall(ledger, "attention of q").forward(), pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "Event", NeverReached)
                patch.setattr(torch.accelerator, "current_stream", lambda device: None)
                wait_for([DeviceWaits()], ledger, torch.device("cuda"))  # type: ignore[list-item]
            assert ledger.waiting is None, "the process goes on"
        time.sleep(9)
        lw.Pack(CU)
    except lw.GroupError as error:
        return str(error)
    finally:
        lw.set_wait(None)
    return "nothing raised"


def test_a_device_that_waits_too_long_is_noticed(ranks: Ranks) -> None:
    for said in ranks.run(device_waits, size=2, timeout=60):
        assert "rank 1 did not come to attention, forward, call 2, within" in said, said


# -- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, -1.0, "soon", float("nan"), True, [3]])
def test_limits_that_are_none(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(lw.InputError, match="give a positive number of seconds"):
        lw.set_wait(given)
    monkeypatch.setenv("LONGWEAVE_WAIT", str(given) if given is not True else "yes")
    with pytest.raises(lw.InputError, match="LONGWEAVE_WAIT is"):
        wait_limit()


def test_where_the_limit_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait_limit() == 30
    monkeypatch.setenv("LONGWEAVE_WAIT", "12.5")
    assert wait_limit() == 12.5
    lw.set_wait(7)
    assert wait_limit() == 7
    lw.set_wait(None)
    assert wait_limit() == 12.5


# -- what the group leaves behind ----------------------------------------------------------------------


def after_destroy() -> tuple[bool, str]:
    """Does anybody hold the group, while the graphs of all operators live on? What does a late backward say?"""
    import gc
    import weakref

    group = dist.new_group()
    pack = lw.Pack(CU, group, "zigzag")
    outs = [attend(pack, strategy=s) for s in ("ring", "groupcast", "allgather", "ulysses")]
    outs += [mix(pack, method=m) for m in ("affine", "reshard", "gather")] + [conv(pack)]
    x = torch.randn(pack.tokens, 4, requires_grad=True)
    outs += [lw.gather_recompute(nn.Identity(), x, pack), lw.shift(x, pack), pack.unshard(x), lw.document_sum(x, pack)]
    held = weakref.ref(group)
    dist.barrier(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    try:
        outs[0].sum().backward()
        said = "nothing raised"
    except lw.GroupError as error:
        said = str(error)
    return held() is None, said


def test_nothing_holds_a_group_that_was_destroyed(ranks: Ranks) -> None:
    for is_gone, said in ranks.run(after_destroy, size=2, timeout=60):
        assert is_gone
        assert "was destroyed" in said
