"""The shape of the package: public names, which way imports point, what `import longweave.plan` loads."""

import ast
import subprocess
import sys
from pathlib import Path

import longweave as lw

ROOT = Path(lw.__file__).parent

# A module may import from its own part and from the parts named here.
ALLOWED = {
    "errors": set(),
    "plan": {"errors"},
    "comm": {"errors"},
    "kernels": {"errors"},
    "tokens": {"errors", "plan", "comm", "kernels"},
    "softmax": {"errors", "plan", "comm", "kernels", "tokens"},
    "linear": {"errors", "plan", "comm", "kernels", "tokens"},
    "models": {"errors", "plan", "comm", "kernels", "tokens", "softmax", "linear"},
    "testing": set(),
}
TOP = {"tools", "cli", "__init__"}  # may import everything


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "longweave"}
    return found


def sources() -> list[tuple[str, Path]]:
    return [(path.relative_to(ROOT).parts[0].removesuffix(".py"), path) for path in ROOT.rglob("*.py")]


def test_imports_point_one_way() -> None:
    for part, path in sources():
        if part in TOP:
            continue
        used = {part_of(name) for name in imports(path) if name.startswith("longweave.")}
        assert used <= ALLOWED[part] | {part}, f"{path} imports {used - ALLOWED[part] - {part}}"


def test_only_comm_talks_to_other_ranks() -> None:
    for part, path in sources():
        if part in {"comm", "testing"} | TOP:
            continue
        assert not any(name.startswith("torch.distributed") for name in imports(path)), path


def test_the_plan_needs_no_torch() -> None:
    code = "import longweave.plan, sys; assert 'torch' not in sys.modules; longweave.Layout.zigzag([0, 9], 2)"
    subprocess.run([sys.executable, "-c", code], check=True)
    for part, path in sources():
        if part == "plan":
            assert not any(name.split(".")[0] == "torch" for name in imports(path)), path


def test_public_names() -> None:
    assert sorted(lw.__all__) == [
        "BackendError",
        "Batch",
        "GroupError",
        "InputError",
        "Layout",
        "LongweaveError",
        "Mask",
        "Plan",
        "Slice",
        "Span",
        "attention",
        "causal_conv1d",
        "gated_delta_rule",
        "gather_recompute",
        "loss_scale",
        "make_plan",
        "parallelize",
        "plan",
        "reduce_gradients",
        "reduce_sum",
        "reshard",
        "restore",
        "shard",
        "shard_batch",
        "unchecked",
        "unshard",
    ]
    for name in lw.__all__:
        assert getattr(lw, name) is not None
        assert name in dir(lw)
    assert not hasattr(lw, "no_such_name")


def test_every_error_is_ours() -> None:
    for name in ("InputError", "GroupError", "BackendError"):
        assert issubclass(getattr(lw, name), lw.LongweaveError)
