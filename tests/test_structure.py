"""The shape of the package: public names, which way imports point, what `import longweave.plan` loads."""

import ast
import subprocess
import sys
from pathlib import Path

import longweave as lw

ROOT = Path(lw.__file__).parent

# A module may import from its own part and from the parts named here.
BELOW_PACK = {"errors", "plan", "comm", "tensors", "tokens"}
OPERATORS = BELOW_PACK | {"kernels", "core", "finite", "pack"}
ALLOWED = {
    "errors": set(),
    "extras": set(),
    "tensors": {"errors"},
    "plan": {"errors"},
    "comm": {"errors", "tensors"},
    "kernels": {"errors", "tensors"},
    "tokens": BELOW_PACK - {"tokens"},
    "core": BELOW_PACK | {"kernels"},  # whose names a pack is given
    "finite": BELOW_PACK | {"core"},
    "pack": BELOW_PACK | {"core", "finite"},
    "documents": BELOW_PACK | {"core", "pack"},
    "softmax": OPERATORS,
    "linear": OPERATORS,
    "models": OPERATORS | {"documents", "softmax", "linear"},
    "launch": {"errors", "plan"},
}
TOP = {"tools", "cli", "__init__", "__main__"}  # may import everything


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
        if part in {"comm", "launch"} | TOP:
            continue
        assert not any(name.startswith("torch.distributed") for name in imports(path)), path


def test_the_plan_needs_no_torch() -> None:
    code = "import longweave.plan, sys; assert 'torch' not in sys.modules; longweave.Layout.zigzag([0, 9], 2)"
    subprocess.run([sys.executable, "-c", code], check=True)
    for part, path in sources():
        if part == "plan":
            assert not any(name.split(".")[0] == "torch" for name in imports(path)), path


def test_triton_is_imported_with_the_first_launch() -> None:
    """Only modules `…_kernels` import it, and nobody imports those at the top."""
    for _, path in sources():
        tree = ast.parse(path.read_text())
        inside = {id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
        found = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in found if not path.stem.endswith("_kernels") else []:
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            late = id(node) in inside
            assert late or not any(name.split(".")[0] == "triton" for name in names), path
            assert late or not any("_kernels" in name for name in names), path


# Functions that keep what they return, and why that is no cache of batches: it says at each of them when entries die.
KEPT = {
    "longweave/kernels/attention/cuda_flash.py": {"_flash_attn"},
    "longweave/kernels/attention/flex.py": {"_compiled"},
    "longweave/kernels/recurrence/fla.py": {"load"},
    "longweave/kernels/triton_launch.py": {"_failure"},
}
CONTEXT_VARIABLES = {
    "longweave/comm/ledger.py": ["longweave_checks"],  # are ranks compared?
    "longweave/models/running.py": ["longweave_pack"],  # the pack whose model is running
}
WEAK = {
    "longweave/comm/ledger.py": ["_ledgers"],  # of a process group, as long as it lives
    "longweave/tensors.py": ["_objects"],  # of a ticket, as long as its object lives
}


def trees() -> list[tuple[str, ast.Module]]:
    return [(str(path.relative_to(ROOT.parent)), ast.parse(path.read_text())) for _, path in sources()]


def named(node: ast.AST) -> str:
    """`lru_cache` of `@lru_cache(maxsize=1)`, `@functools.lru_cache`, …"""
    if isinstance(node, ast.Call | ast.Subscript):
        return named(node.func if isinstance(node, ast.Call) else node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_nothing_is_kept_but_by_its_owner() -> None:
    """Plans, tables and index tensors live in the pack. A function with a memory is named here."""
    found: dict[str, set[str]] = {}
    for name, tree in trees():
        if name.startswith("longweave/tools"):
            continue  # programs of their own
        kept = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            and {named(decorator) for decorator in node.decorator_list} & {"cache", "lru_cache"}
        }
        uses = [node for node in ast.walk(tree) if named(node) in ("cache", "lru_cache")]
        decorators = sum(isinstance(node, ast.Call) for node in uses)
        assert decorators <= len(kept), f"{name} uses a cache other than as a decorator"
        if kept:
            found[name] = kept
    assert found == KEPT


def test_context_variables_and_weak_tables_are_few() -> None:
    variables: dict[str, list[str]] = {}
    tables: dict[str, list[str]] = {}
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and named(node) == "ContextVar":
                variables.setdefault(name, []).append(ast.literal_eval(node.args[0]))
            if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Call):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                if named(node.value).startswith("Weak"):
                    tables.setdefault(name, []).append(named(target))
    assert variables == CONTEXT_VARIABLES
    assert tables == WEAK


def test_modules_are_few_and_short() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for _, path in sources()}
    assert not {name: length for name, length in lengths.items() if length > 400}
    commands = [name for name in lengths if name.startswith("tools/")]
    assert len(lengths) - len(commands) <= 105, "the library"
    assert len(commands) <= 55, "what the commands do"


def test_no_two_classes_share_a_name() -> None:
    where: dict[str, list[str]] = {}
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(name)
    assert not {name: places for name, places in where.items() if len(places) > 1}


def test_public_names() -> None:
    assert sorted(lw.__all__) == [
        "BackendError",
        "Batch",
        "GroupError",
        "InputError",
        "Layout",
        "LongweaveError",
        "Mask",
        "Pack",
        "Plan",
        "Slice",
        "Span",
        "attention",
        "audit",
        "causal_conv1d",
        "document_mean",
        "document_sum",
        "gated_delta_rule",
        "gated_linear_attention",
        "gather_recompute",
        "kimi_delta_attention",
        "lightning_attention",
        "loss_scale",
        "make_plan",
        "models",
        "parallelize",
        "plan",
        "pool",
        "reduce_gradients",
        "reduce_sum",
        "reshard",
        "restore",
        "set_wait",
        "shard",
        "shard_batch",
        "shift",
        "ssd",
        "unchecked",
        "unshard",
    ]
    for name in lw.__all__:
        assert getattr(lw, name) is not None
        assert name in dir(lw)
    assert not hasattr(lw, "no_such_name")


def test_models_needs_no_import_of_its_own() -> None:
    asked = "import longweave as lw; print(lw.models.register.__module__)"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, cwd=ROOT.parent)
    assert found.stdout.strip() == "longweave.models.roles", found.stderr


def test_every_error_is_ours() -> None:
    for name in ("InputError", "GroupError", "BackendError"):
        assert issubclass(getattr(lw, name), lw.LongweaveError)
