"""Bad input to packs and to the operators that take one."""

from typing import Any

import pytest
import torch
from bad_values import INTS, SCALARS, Question, Row, ask_all, tensors
from torch._subclasses.fake_tensor import FakeTensorMode

import longweave as lw
from longweave.kernels.recurrence import check_mixer
from longweave.tensors import on_one_device

CU = [0, 3, 8]
T = CU[-1]
PACK = lw.Pack(CU)
ONE, TURNED = lw.Layout.zigzag(CU, 1), lw.Layout.from_spans(T, [[(4, 8), (0, 4)]])

ANY_DTYPE = (
    "int64 | int8 | uint16 | bool | complex | float64 | float16 | bfloat16 | float8 | one dim less | no channels"
)
OTHER_FLOATS = "float64 | float16 | bfloat16"
NUMBERS = "None | -1 | 0 | 2**40 | 2**70 | -2**70 | 1.5 | 1e30 | float64"
GROUPS = ({name: value for name, value in SCALARS.items() if not isinstance(value, torch.Tensor)}, "None")
NAMES = (SCALARS, "")
FLAGS = (SCALARS, "0 | True")  # 0 is equal to False, and so the same kind of call
OPTION = (SCALARS, "None | int64")
IN_A_CALL = (SCALARS, "None | int64 | tensor(2)")


def some(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def moving(name: str, call: Any, argument: str, **layouts: lw.Layout) -> Row:
    bad = dict.fromkeys(layouts, (SCALARS, ""))
    return Row(
        name,
        call,
        {argument: some(T, 2), **layouts},
        **{argument: (tensors(T, 2), ANY_DTYPE)},
        dim=(SCALARS, "0"),
        **bad,
        **({"group": GROUPS} if layouts else {}),
    )


def linear(
    name: str, tokens: dict[str, torch.Tensor], gates: dict[str, torch.Tensor], *, no: str = "", **bad: Any
) -> Row:
    """q, k and v have one dtype, gates may have others; `no` is a gate that may be left out."""
    tables: dict[str, Any] = {key: (tensors(*x.shape), "") for key, x in tokens.items()}
    tables |= {key: (tensors(*x.shape), OTHER_FLOATS + (" | None" if key == no else "")) for key, x in gates.items()}
    tables["v" if "v" in tokens else "x"] = (tensors(T, 2, 4), "no channels")
    good = {**tokens, **gates, "pack": PACK}
    return Row(name, getattr(lw, name), good, **tables, pack=NAMES, method=NAMES, backend=NAMES, **bad)


QKV = {"q": some(T, 2, 4), "k": some(T, 2, 4), "v": some(T, 2, 4)}
G, BETA, G_CHANNELS = -some(T, 2).abs(), some(T, 2).sigmoid(), -some(T, 2, 4).abs()
SCALE = (SCALARS, NUMBERS + " | int64")
SSM = {"x": some(T, 2, 4), "B": some(T, 1, 4), "C": some(T, 1, 4)}
STEP = {"dt": some(T, 2).abs(), "A": -some(2).abs(), "D": some(2)}
CONV = {"x": some(T, 3), "weight": some(3, 4), "bias": some(3), "pack": PACK}
META = torch.empty(T, 3, device="meta")
LISTS = {
    "[]": [],
    "one": [some(T, 3)],
    "two dtypes": [some(T, 3), some(T, 3).double()],
    "two devices": [some(T, 3), META],
    "[None, None]": [None, None],
    "['a', 'b']": ["a", "b"],
    "ints": [torch.ones(T, 3, dtype=torch.int64)] * 2,
    "nested": [[some(T, 3)], [some(T, 3)]],
    "tensor": some(T, 3),
    "{1}": {1},
    "{}": {},
}

FUNCTIONS = {
    **{name: value for name, value in SCALARS.items() if not callable(value)},
    "of few tokens": lambda x: x[:3],
    "of no tokens": torch.sum,
    "of nothing": lambda x: None,
}

ROWS = [
    Row(
        "Pack",
        lw.Pack,
        {"cu_seqlens": CU},
        cu_seqlens=(INTS, ""),
        group=GROUPS,
        layout=({**SCALARS, "of other tokens": lw.Layout.contiguous(9, 1)}, ""),
        mask=({**SCALARS, "of other tokens": lw.Mask.causal([0, 9])}, ""),
        window=(SCALARS, "None | 2**40 | 2**70 | 10**400 | int64"),
        strategy=NAMES,
        method=NAMES,
        backend=NAMES,
        ulysses_size=OPTION,
        stages=OPTION,
        keep_kv=(SCALARS, "None | 0 | True"),
        heads_k_stride=OPTION,
        nonsense=NAMES,
    ),
    Row("pack.report", PACK.report, {"heads": 8, "kv_heads": 2}, heads=(SCALARS, "int64"), kv_heads=(SCALARS, "int64")),
    moving("pack.shard", PACK.shard, "x"),
    moving("pack.unshard", PACK.unshard, "x_local"),
    moving("shard", lw.shard, "x", layout=ONE),
    moving("unshard", lw.unshard, "x_local", layout=ONE),
    moving("reshard", lw.reshard, "x_local", src=ONE, dst=TURNED),
    Row(
        "shift",
        lw.shift,
        {"x_local": some(T, 2), "pack": PACK},
        x_local=(tensors(T, 2), ANY_DTYPE),
        pack=NAMES,
        by=(SCALARS, "-1 | 0 | 2**40 | 2**70 | -2**70 | 10**400"),
        fill=(SCALARS, "-1 | 0 | 2**40 | 2**70 | -2**70 | nan | inf | 1.5 | 1e30 | True | float64"),
    ),
    Row(
        "shift of ints",
        lw.shift,
        {"x_local": torch.ones(T, dtype=torch.int64), "pack": PACK},
        fill=(SCALARS, "-1 | 0 | 2**40 | True | float64"),
    ),
    Row(
        "shift of uint64",
        lw.shift,
        {"x_local": torch.ones(T, dtype=torch.uint64), "pack": PACK},
        fill=(SCALARS, "0 | 2**40 | True"),
    ),
    *(
        Row(
            name,
            getattr(lw, name),
            {"x_local": some(T, 2), "pack": PACK},
            x_local=(tensors(T, 2), f"{OTHER_FLOATS} | float8 | one dim less | no channels"),
            pack=NAMES,
        )
        for name in ("document_sum", "document_mean")
    ),
    Row(
        "attention",
        lw.attention,
        {"q": some(T, 4, 8), "k": some(T, 2, 8), "v": some(T, 2, 8), "pack": PACK},
        q=(tensors(T, 4, 8), ""),
        k=(tensors(T, 2, 8), ""),
        v=(tensors(T, 2, 8), ""),
        sinks=(tensors(4), f"None | {OTHER_FLOATS} | float8"),
        pack=NAMES,
        mask=({**SCALARS, "of other tokens": lw.Mask.causal([0, 9])}, "None"),
        window=(SCALARS, "None | 2**40 | 2**70 | 10**400"),
        strategy=NAMES,
        scale=(SCALARS, NUMBERS),
        softcap=(SCALARS, "None | 2**40 | 2**70 | 1.5 | 1e30 | float64"),
        return_lse=(SCALARS, "True"),
        backend=NAMES,
        ulysses_size=(SCALARS, "None"),
        stages=({**SCALARS, "'2'": "2", "two options": "2,keep_kv=1"}, IN_A_CALL[1]),
        keep_kv=(SCALARS, "None | 0 | True"),
        heads_k_stride=IN_A_CALL,
        dropout_p=(SCALARS, "None | 0"),
        nonsense=NAMES,
    ),
    Row(
        "attention of one tensor",
        lambda x: lw.attention(x, x, x, PACK),
        {"x": some(T, 2, 8)},
        x=(tensors(T, 2, 8), OTHER_FLOATS),
    ),
    linear("gated_delta_rule", QKV, {"g": G, "beta": BETA}, no="g", scale=SCALE, qk_l2norm=FLAGS, check_finite=FLAGS),
    linear(
        "kimi_delta_attention", QKV, {"g": G_CHANNELS, "beta": BETA}, scale=SCALE, qk_l2norm=FLAGS, check_finite=FLAGS
    ),
    linear("gated_linear_attention", QKV, {"g": G_CHANNELS}, scale=SCALE, check_finite=FLAGS),
    linear(
        "lightning_attention",
        QKV,
        {"log_decay": -some(2).abs()},
        no="log_decay",
        scale=(SCALARS, SCALE[1].removeprefix("None | ") + " | True"),  # True is equal to 1.0
    ),
    linear("ssd", SSM, STEP, no="D"),
    Row(
        "causal_conv1d",
        lw.causal_conv1d,
        CONV,
        x=(tensors(T, 3), OTHER_FLOATS),
        weight=({**tensors(3, 4), "width 1": some(3, 1), "width 9": some(3, 9)}, OTHER_FLOATS),
        bias=(tensors(3), f"None | {OTHER_FLOATS}"),
        pack=NAMES,
        activation=(SCALARS, "None"),
    ),
    Row(
        "causal_conv1d of lists",
        lw.causal_conv1d,
        {"x": [some(T, 3)] * 2, "weight": [some(3, 4)] * 2, "bias": None, "pack": PACK},
        x=(LISTS, ""),
        weight=(LISTS, ""),
        bias=({**LISTS, "meta": [torch.empty(3, device="meta"), some(3)]}, "[None, None]"),
    ),
    Row(
        "gather_recompute",
        lw.gather_recompute,
        {"fn": torch.clone, "x_local": some(T, 3), "pack": PACK},
        fn=(FUNCTIONS, ""),
        x_local=({**tensors(T, 3), "()": (), "two devices": [some(T, 3), META]}, ANY_DTYPE),
        pack=NAMES,
        params=(SCALARS, "[]"),
        param_grads=NAMES,
    ),
]


@ask_all(ROWS)
def test_bad_values_are_refused(question: Question) -> None:
    question.ask()


NOT_CALLED = {
    "BackendError",
    "GroupError",
    "InputError",
    "LongweaveError",
    "Plan",
    "models",
    "Slice",
    "Span",
    "plan",
    "unchecked",
    # In tests of their own
    "audit",
    "set_wait",
}


def test_every_public_name_is_asked() -> None:
    from test_bad_batches import ROWS as BATCHES
    from test_bad_plans import ROWS as PLANS

    asked = {row.name.split(".")[0].split(" ")[0] for row in [*PLANS, *ROWS, *BATCHES]}
    assert set(lw.__all__) - NOT_CALLED <= asked, set(lw.__all__) - NOT_CALLED - asked


# -- a call like one that was checked before ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["attention", "gated_delta_rule", "causal_conv1d"])
def test_a_checked_call_is_checked_again_on_another_device(name: str) -> None:
    """Shapes and dtypes are those of the call before."""
    pack = lw.Pack(CU)
    calls = {
        "attention": lambda k: lw.attention(some(T, 2, 4), k, some(T, 2, 4), pack),
        "gated_delta_rule": lambda k: lw.gated_delta_rule(some(T, 2, 4), k, some(T, 2, 4), G, BETA, pack),
        "causal_conv1d": lambda k: lw.causal_conv1d(k.flatten(1), some(8, 4), None, pack),
    }
    calls[name](some(T, 2, 4))
    with pytest.raises(lw.InputError, match="meta device, without values"):
        calls[name](torch.empty(T, 2, 4, device="meta"))


def test_tensors_on_two_devices_are_another_kind_of_call() -> None:
    """A GPU that is only imagined: it has devices and shapes."""
    with FakeTensorMode():
        here, there, further = (
            torch.empty(T, 2, 4),
            torch.empty(T, 2, 4, device="cuda:0"),
            torch.empty(2, device="cuda:1"),
        )
        assert on_one_device(there, None, there)
        assert not on_one_device(here, there)
        assert not on_one_device(there, further)
        with pytest.raises(lw.InputError, match="k is on cuda:0 and q on cpu; move them"):
            check_mixer(here, there, here)
