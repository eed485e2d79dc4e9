"""Ranks that differ: every rank is told, before anything is sent, and nobody hangs.

On the first pack of a group calls are compared before they send. Later packs only note their calls: one
that differs is named when the next pack is made.
"""

import re
from collections.abc import Callable, Collection

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import longweave as lw
from longweave.comm.exchange import resolve
from longweave.launch import Ranks

CU = [0, 10, 24]
ODD = 1  # the rank that differs


def catch(call: Callable[[], object]) -> str:
    try:
        call()
    except lw.LongweaveError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def sequence(group: dist.ProcessGroup) -> int:
    """Collectives so far."""
    return resolve(group).ledger.exchanges


# -- a pack is made ----------------------------------------------------------------------------------

# What rank ODD gives otherwise, and whether all ranks can still make a pack of their own.
DIFFERENT = {
    "documents": {"cu_seqlens": [0, 11, 24]},
    "an empty document": {"cu_seqlens": [0, 10, 10, 24]},
    "layout": {"layout": "zigzag"},
    "mask": {"mask": "full"},
    "window": {"window": 4},
    "strategy": {"strategy": "ring"},
    "option": {"stages": 3},
    "method": {"method": "gather"},
    "backend": {"backend": "reference"},
}
REFUSED = {
    "layout size": ({"layout": lw.Layout.contiguous(24, 2)}, "GroupError: the group has 3 ranks but the layout is for"),
    "layout total": ({"layout": lw.Layout.contiguous(25, 3)}, "InputError: the layout is for 25 tokens"),
    "mask total": ({"mask": lw.Mask.causal([0, 25])}, "InputError: the mask has 25 tokens"),
    "layout name": ({"layout": "spiral"}, "InputError: layout is 'spiral'"),
    "mask name": ({"mask": "diagonal"}, "InputError: mask is 'diagonal'"),
    "strategy name": ({"strategy": "teleport"}, "InputError: strategy is 'teleport'"),
    "option name": ({"flavour": 2}, "InputError: there is no option 'flavour'"),
    "option of another": ({"strategy": "ring", "stages": 2}, "InputError: stages goes with groupcast"),
    "method name": ({"method": "magic"}, "InputError: method is 'magic'"),
    "bad window": ({"window": 0}, "InputError: window is 0"),
    "bad documents": ({"cu_seqlens": [1, 2]}, "InputError: .*cu_seqlens"),
    "no integers": ({"cu_seqlens": "abc"}, "InputError: .*cu_seqlens"),
}


def packs_that_differ() -> dict[str, tuple[str, int]]:
    """For each case what was said, and how many collectives it took."""
    found = {}
    for name, bad in {**DIFFERENT, **{name: bad for name, (bad, _) in REFUSED.items()}}.items():
        given = {"cu_seqlens": CU, "layout": "contiguous", **(bad if dist.get_rank() == ODD else {})}
        before = sequence(dist.group.WORLD)
        said = catch(lambda: lw.Pack(**given))  # noqa: B023
        found[name] = said, sequence(dist.group.WORLD) - before
    pack = lw.Pack(CU)
    x = torch.arange(24.0)
    assert torch.equal(pack.unshard(pack.shard(x)), x), "the next pack works"
    return found


def test_packs_that_differ_are_named_on_every_rank(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(packs_that_differ, size=3, timeout=60)):
        for name in DIFFERENT:
            said, collectives = found[name]
            start = f"GroupError: rank 1 of the group holds another pack than the rest (I am rank {rank})"
            assert said.startswith(start), (name, said)
            assert collectives == 1
        for name, (_, message) in REFUSED.items():
            said, collectives = found[name]
            told = "GroupError: rank 1 of the group refused this call; see the error there"
            assert re.match(message if rank == ODD else told, said), (name, said)
            assert collectives == 1


# -- calls -------------------------------------------------------------------------------------------


def attend(pack: lw.Pack, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32, **options) -> Tensor:
    q = torch.ones(pack.tokens, heads, 8, dtype=dtype, requires_grad=True)
    k = torch.ones(pack.tokens, kv_heads, 8, dtype=dtype)
    out = lw.attention(q, k, k, pack, **{"strategy": "ring", **options})
    return out[0] if isinstance(out, tuple) else out


def delta(pack: lw.Pack, heads: int = 2, dtype: torch.dtype = torch.float32, **options) -> Tensor:
    q = torch.ones(pack.tokens, 1, 4, dtype=dtype, requires_grad=True)
    v, g = torch.ones(pack.tokens, heads, 4, dtype=dtype), torch.zeros(pack.tokens, heads, dtype=dtype)
    return lw.gated_delta_rule(q, q, v, g, g.sigmoid(), pack, **{"method": "affine", **options})


def convolve(pack: lw.Pack, width: int = 4, channels: int = 6, bias: bool = False, **options) -> Tensor:
    x = torch.ones(pack.tokens, channels, requires_grad=True)
    return lw.causal_conv1d(x, torch.ones(channels, width), torch.ones(channels) if bias else None, pack, **options)


def shift(pack: lw.Pack, dtype: torch.dtype = torch.float32, **options) -> Tensor:
    return lw.shift(torch.ones(pack.tokens, 2, dtype=dtype), pack, **options)


def sums(pack: lw.Pack, features: int = 2) -> Tensor:
    return lw.document_sum(torch.ones(pack.tokens, features), pack)


def whole(pack: lw.Pack, dtype: torch.dtype = torch.float32, dim: int = 0) -> Tensor:
    return pack.unshard(torch.ones(pack.tokens, pack.tokens, dtype=dtype), dim)


def gathered(pack: lw.Pack, **options) -> Tensor:
    return lw.gather_recompute(nn.Linear(2, 2), torch.ones(pack.tokens, 2), pack, **options)


CALLS = {
    "scale": (attend, {"scale": 0.5}),
    "softcap": (attend, {"softcap": 5.0}),
    "window": (attend, {"window": 3}),
    "mask": (attend, {"mask": "full"}),
    "strategy": (attend, {"strategy": "allgather"}),
    "dtype": (attend, {"dtype": torch.bfloat16}),
    "heads": (attend, {"heads": 8}),
    "K/V heads": (attend, {"kv_heads": 4}),
    "lse": (attend, {"return_lse": True}),
    "backend": (attend, {"backend": "reference"}),
    "option": (attend, {"ulysses_size": 3}),
    "sinks": (attend, {"sinks": torch.zeros(4)}),
    "l2norm": (delta, {"qk_l2norm": True}),
    "scale of a mixer": (delta, {"scale": 0.5}),
    "method": (delta, {"method": "gather"}),
    "heads of a mixer": (delta, {"heads": 3}),
    "dtype of a mixer": (delta, {"dtype": torch.float64}),
    "activation": (convolve, {"activation": "silu"}),
    "width": (convolve, {"width": 3}),
    "channels": (convolve, {"channels": 7}),
    "bias": (convolve, {"bias": True}),
    "by": (shift, {"by": 2}),
    "fill": (shift, {"fill": -100}),
    "dtype of a shift": (shift, {"dtype": torch.int64}),
    "features of a sum": (sums, {"features": 3}),
    "dim": (whole, {"dim": 1}),
    "dtype of tokens": (whole, {"dtype": torch.float64}),
    "param_grads": (gathered, {"param_grads": "full"}),
}


def calls_that_differ(names: Collection[str] = tuple(CALLS)) -> dict[str, tuple[str, int]]:
    """Each on the first pack of a new group: what was said, and how many collectives the call took."""
    found = {}
    for name in names:
        call, bad = CALLS[name]
        group = dist.new_group()
        pack = lw.Pack(CU, group, "contiguous")
        before = sequence(group)
        said = catch(lambda: call(pack, **(bad if dist.get_rank() == ODD else {})))  # noqa: B023
        found[name] = said, sequence(group) - before
        call(pack)  # the same pack goes on,
        call(lw.Pack(CU, group, "zigzag"), **bad)  # and so does the next one
    return found


def test_on_the_first_pack_a_call_that_differs_is_named_before_it_sends(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(calls_that_differ, size=3, timeout=90)):
        for name, (said, collectives) in found.items():
            start = f"GroupError: rank 1 of the group makes another call than the rest (I am rank {rank})"
            assert said.startswith(start), (name, said)
            assert "this rank calls" in said
            assert said.endswith("Nothing was sent."), (name, said)
            assert collectives == 1, name


def test_the_first_pack_asks_again_in_every_run(ranks: Ranks) -> None:
    """A process that has made packs on other groups knows nothing of a new one."""
    for _ in range(2):
        said, _ = ranks.run(calls_that_differ, ["scale"], size=3)[0]["scale"]
        assert "rank 1 of the group makes another call" in said


def refused_on_one_rank() -> dict[str, tuple[str, int]]:
    """A tensor, an option or a kernel that one rank refuses: on the first pack of a group, all do."""
    from longweave.kernels.attention import cpu_flash

    odd = dist.get_rank() == ODD
    found = {}

    def note(name: str, call: Callable[[lw.Pack], object]) -> None:
        group = dist.new_group()
        pack = lw.Pack(CU, group, "contiguous")
        before = sequence(group)
        found[name] = catch(lambda: call(pack)), sequence(group) - before
        attend(pack).sum().backward()

    x, short = torch.ones(8, 4, 8), torch.ones(7 if odd else 8, 4, 8)
    note("tokens", lambda pack: lw.attention(short, x, x, pack))
    note("tokens of a mixer", lambda pack: lw.gated_delta_rule(short, x, x, x[..., 0], x[..., 0], pack))
    note("tokens of a convolution", lambda pack: lw.causal_conv1d(short[:, :, 0], torch.ones(4, 3), None, pack))
    note("tokens to unshard", lambda pack: pack.unshard(short))
    note("tokens to shift", lambda pack: lw.shift(short, pack))
    note("tokens to sum", lambda pack: lw.document_sum(short, pack))
    note("tokens to gather", lambda pack: lw.gather_recompute(torch.relu, short, pack))
    note("backend", lambda pack: attend(pack, backend="flash_attn" if odd else "cpu_flash"))
    note("option", lambda pack: attend(pack, **({"ulysses_size": 2} if odd else {})))
    note("window", lambda pack: attend(pack, window=0 if odd else 2))
    note("softcap", lambda pack: attend(pack, softcap=-1.0 if odd else 1.0))
    note("scale", lambda pack: attend(pack, scale="a" if odd else 1.0))
    note("no tensor", lambda pack: lw.attention([1] if odd else x, x, x, pack))
    why_not = cpu_flash.why_not
    if odd:
        cpu_flash.why_not = lambda *args: "it is broken here"
    try:
        note("kernel", lambda pack: attend(pack, backend="cpu_flash"))
    finally:
        cpu_flash.why_not = why_not
    return found


REFUSALS = {
    "tokens": "InputError: .*rank 1 has 8 tokens",
    "tokens of a mixer": "InputError: .*rank 1 has 8 tokens",
    "tokens of a convolution": "InputError: .*rank 1 has 8 tokens",
    "tokens to unshard": "InputError: the tensor has 7 tokens",
    "tokens to shift": "InputError: .*rank 1 has 8 tokens",
    "tokens to sum": "InputError: .*rank 1 has 8 tokens",
    "tokens to gather": "InputError: .*rank 1 has 8 tokens",
    "backend": "BackendError: backend 'flash_attn' cannot serve",
    "option": "InputError: ulysses_size is 2; give a divisor of the 3 ranks",
    "window": "InputError: window is 0",
    "softcap": "InputError: softcap is -1.0",
    "scale": "InputError: scale is 'a'",
    "no tensor": "InputError: q, k and v must be tensors",
    "kernel": "BackendError: backend 'cpu_flash' cannot serve this call: it is broken here",
}


def test_what_one_rank_refuses_all_refuse(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(refused_on_one_rank, size=3, timeout=60)):
        assert found.keys() == REFUSALS.keys()
        for name, (said, collectives) in found.items():
            told = "GroupError: rank 1 of the group refused this call"
            assert re.match(REFUSALS[name] if rank == ODD else told, said), (name, said)
            assert collectives == 1, name


# Calls that exchange the same sizes whatever is said: nobody would notice.
SILENT = {name: CALLS[name] for name in ("scale", "softcap", "l2norm", "scale of a mixer", "activation", "fill")}
ORDERS = {"up": (1.0, 2.0), "down": (2.0, 1.0)}
SILENT["order"] = (lambda pack, order="up": [attend(pack, scale=s) for s in ORDERS[order]], {"order": "down"})
SILENT["one more"] = (lambda pack, calls=1: [shift(pack, by=0) for _ in range(calls)], {"calls": 2})


def later_calls() -> dict[str, tuple[str, str, list[int]]]:
    """On the second pack of a group: the call itself, the next pack, and the collectives of both."""
    found = {}
    for name, (call, bad) in SILENT.items():
        group = dist.new_group()
        lw.Pack(CU, group, "contiguous")
        pack = lw.Pack(CU, group, "contiguous")
        expected = sequence(group)
        call(pack)
        expected = sequence(group) - expected
        before = sequence(group)
        said = catch(lambda: call(pack, **(bad if dist.get_rank() == ODD else {})))  # noqa: B023
        middle = sequence(group)
        named = catch(lambda: lw.Pack(CU, group, "contiguous"))  # noqa: B023
        found[name] = said, named, [expected, middle - before, sequence(group) - middle]
        call(lw.Pack(CU, group, "contiguous"))
        lw.Pack(CU, group, "contiguous")  # all is well again
    return found


def test_on_later_packs_a_call_that_differs_is_named_by_the_next_pack(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(later_calls, size=3, timeout=90)):
        for name, (said, named, (expected, own, of_pack)) in found.items():
            assert said == "nothing raised", name
            start = f"GroupError: rank 1 of the group made other calls on the packs before this one (I am rank {rank})"
            assert named.startswith(start.replace(" (I", " than the rest (I")), (name, named)
            assert re.search(r"since the pack before, this rank made \d × ", named), named
            assert own == expected, "a call sends its own messages and no others"
            assert of_pack == 1, "and a pack one"
        times = 1 if rank == ODD else 2  # once with all ranks, once with another activation on one of them
        assert f"this rank made {times} × causal_conv1d of" in found["activation"][1]
        assert ("; 1 × causal_conv1d of" in found["activation"][1]) == (rank == ODD)
        assert ("qk_l2norm=True" in found["l2norm"][1]) == (rank == ODD)


def messages(strategy: str) -> dict[str, tuple[int, int]]:
    """The messages of forward and backward on the first and on the second pack: comparing, and all others."""
    from longweave.comm import agreement

    compared = [0]
    gather = agreement.all_gather_v

    def counting(*args):
        compared[0] += 1
        return gather(*args)

    ledger = resolve(None).ledger
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "all_gather_v", counting)
        for name in ("first", "second"):
            stages = {"stages": 1} if strategy == "groupcast" else {}
            pack = lw.Pack(CU, layout="zigzag", strategy=strategy, **stages)
            compared[0], before = 0, ledger.exchanges
            attend(pack, strategy="auto").sum().backward()
            attend(pack, strategy="auto").sum().backward()
            # A comparison is itself an exchange.
            found[name] = compared[0], ledger.exchanges - before - compared[0]
    return found


# Of one layer, forward and backward. Two ranks: a ring has one hop, and two back (K/V, then their gradient); all-gather
# goes over two K/V heads one by one, and Ulysses exchanges heads on the way in and out.
MESSAGES = {"ring": 3, "ulysses": 4, "groupcast": 2, "allgather": 6}


@pytest.mark.parametrize("strategy", MESSAGES)
def test_only_the_first_pack_asks(ranks: Ranks, strategy: str) -> None:
    own = 2 * MESSAGES[strategy]
    for found in ranks.run(messages, strategy, size=2):
        assert found == {"first": (2, own), "second": (0, own)}


# -- unchecked ---------------------------------------------------------------------------------------


def unchecked() -> dict[str, object]:
    group = dist.group.WORLD
    odd = dist.get_rank() == ODD
    before = sequence(group)
    with lw.unchecked():
        pack = lw.Pack(CU, layout="contiguous")
        made = sequence(group) - before
        refused = catch(lambda: lw.Pack(CU, layout="spiral"))
        said = catch(lambda: attend(pack, strategy="ring", scale=0.5 if odd else 1.0))
        local = pack.shard(torch.arange(24.0))
        before = sequence(group)
        pack.unshard(local)
        shared = sequence(group) - before
    before = sequence(group)
    after = catch(lambda: lw.Pack(CU, layout="contiguous"))
    return {
        "made": made,
        "said": said,
        "refused": refused,
        "unshard": shared,
        "after": after,
        "next": sequence(group) - before,
    }


def test_unchecked_compares_nothing(ranks: Ranks) -> None:
    for found in ranks.run(unchecked, size=3, timeout=30):
        assert found["made"] == 0
        assert found["said"] == "nothing raised"
        assert str(found["refused"]).startswith("InputError: layout is 'spiral'"), "this rank's own checks stay"
        assert found["unshard"] == 1
        assert found["after"] == "nothing raised", "what was called inside is not held against anyone later"
        assert found["next"] == 1, "outside, packs are compared again"


def known_here_new_there() -> dict[str, str]:
    """The second call on a group's first pack: rank ODD makes one of a new kind, the others repeat the first."""
    odd, found = dist.get_rank() == ODD, {}
    for name, other in {
        "scale": {"scale": 0.3},
        "window": {"window": 0},
        "mask": {"mask": torch.ones(2, 2)},
        "sinks": {"sinks": torch.zeros(1)},
    }.items():
        pack = lw.Pack(CU, dist.new_group([0, 1, 2]), "zigzag")
        usual = {"sinks": torch.zeros(4)} if name == "sinks" else {}
        attend(pack, strategy="ring", **usual)
        found[name] = catch(lambda: attend(pack, strategy="ring", **(other if odd else usual)))  # noqa: B023
    pack = lw.Pack(CU, dist.new_group([0, 1, 2]), "zigzag")
    x = torch.zeros(pack.tokens, 4, 8)
    pack.unshard(x)
    found["tokens"] = catch(lambda: pack.unshard(x[:-1] if odd else x))
    return found


def test_a_known_call_beside_a_new_one_is_compared_too(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(known_here_new_there, size=3, timeout=60)):
        assert "rank 1 of the group makes another call than the rest" in found.pop("scale")
        for name, said in found.items():
            assert re.match("InputError" if rank == ODD else "GroupError: rank 1 of the group refused", said), (
                name,
                said,
            )


def on_a_subgroup(members: list[int]) -> str:
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return ""
    odd = dist.get_rank() == members[1]
    said = catch(lambda: lw.Pack([0, 11, 24] if odd else CU, group))
    pack = lw.Pack(CU, group)
    return f"{said}\n{catch(lambda: attend(pack, scale=0.5 if odd else 1.0))}"


def test_ranks_are_named_as_the_group_counts_them(ranks: Ranks) -> None:
    found = ranks.run(on_a_subgroup, [0, 2, 3], size=4, timeout=30)
    for rank in (0, 2, 3):
        first, second = found[rank].splitlines()
        assert first.startswith("GroupError: rank 1 of the group holds another pack"), first
        assert second.startswith("GroupError: rank 1 of the group makes another call"), second
