"""A plan as one page to explore: integers as JSON inside one HTML file that needs nothing else.

    documents, mask, spans of every layout     once
    for each layout × strategy                 report, stages, messages

The page only looks up and draws; what it says of a plan is `plan.report()`, and its stages are `plan.stages`. The chain
of a linear mixer has no plan: it is counted here.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from longweave.errors import InputError
from longweave.plan import Layout, Machine, Plan, Shape
from longweave.plan.fragments import Role, fragments
from longweave.plan.ranges import Ints
from longweave.plan.schedule import STRATEGIES, Report
from longweave.plan.stages import PlanStage, chain_stages, exchange_matrix, plan_stages
from longweave.plan.tasks import GroupCast
from longweave.tools.planning import NAMED_LAYOUTS, PlanRequest

AFFINE = "affine"  # the chain of a linear mixer, beside the strategies of softmax attention
SCRIPTS = ("model.js", "map.js", "charts.js", "lanes.js", "page.js")
MOST_PAGE_RANKS = 256
MOST_PAGE_SPANS = 400_000  # of a layout: some megabytes
MOST_EXACT = 1 << 53  # integers beyond are not exact in a browser
STATE_ITEMSIZE = 4  # states travel in float32

Tell = Callable[[str], None]


def make_page(request: PlanRequest, tell: Tell = lambda _: None) -> str:
    """The page as text. `tell` hears what is being planned: with many documents and ranks it takes a minute."""
    data = page_data(request, tell)
    assets = files("longweave.tools.planning") / "assets"
    text = (assets / "page.html").read_text(encoding="utf-8")
    parts = {
        "TITLE": html.escape(f"{data['documents']} documents on {request.ranks} ranks"),
        "STYLE": (assets / "page.css").read_text(encoding="utf-8"),
        "DATA": as_script_data(data),
        "SCRIPT": "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    before, *others = text.split("@@")  # text, NAME, text, NAME, text: nothing that is put in is looked at again
    return before + "".join(parts[other] if i % 2 == 0 else other for i, other in enumerate(others))


def check_page_ranks(ranks: int) -> None:
    if ranks > MOST_PAGE_RANKS:
        raise InputError(f"a page shows at most {MOST_PAGE_RANKS} ranks, not {ranks}; leave out --html")


def as_script_data(data: object) -> str:
    """JSON that cannot end the script element that it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def page_data(request: PlanRequest, tell: Tell = lambda _: None) -> dict[str, Any]:
    check_page_ranks(request.ranks)
    mask, shape, plan = request.mask, request.shape, request.plan
    if mask.area >= MOST_EXACT:
        raise InputError(f"the mask has {mask.area} pairs, more than a browser counts exactly; leave out --html")
    layouts: dict[str, Layout] = {}
    left_out = []
    for name in NAMED_LAYOUTS:
        layout = plan.layout if name == request.layout_name else request.make_layout(name)
        if len(layout.starts) <= MOST_PAGE_SPANS:
            layouts[name] = layout
        elif name == request.layout_name:
            raise InputError(
                f"layout {name} has {len(layout.starts)} spans; a page shows at most {MOST_PAGE_SPANS}: give fewer "
                "documents or ranks, or leave out --html"
            )
        else:
            left_out.append(f"{name} ({len(layout.starts)} spans)")
    views = {}
    for name, layout in layouts.items():
        for strategy in STRATEGIES:
            tell(f"{name}, {strategy}")
            mine = name == request.layout_name and strategy == plan.strategy
            views[f"{name}/{strategy}"] = _view(plan if mine else request.make_plan(layout, strategy))
        if request.mask_name != "shared-prefix":  # linear mixers refuse masks that join documents
            tell(f"{name}, {AFFINE} chain")
            views[f"{name}/{AFFINE}"] = _chain_view(layout, mask.cu_seqlens, shape)
    chosen = f"{request.layout_name}/{plan.strategy}"
    return {
        "documents": len(request.lengths),
        "lengths": list(request.lengths),
        "total": mask.total,
        "ranks": request.ranks,
        "nodeSize": request.node_size,
        "mask": {"name": request.mask_name, "window": request.window, "rows": mask.rows.tolist()},
        "shape": {"heads": shape.heads, "kvHeads": shape.kv_heads, "headDim": shape.head_dim},
        "rates": _rates(shape, plan.machine),
        "layouts": {name: _spans(layout) for name, layout in layouts.items()},
        "leftOut": left_out,
        "views": views,
        "chosen": chosen,
        "examples": _examples(views, chosen),
    }


def _examples(views: dict[str, Any], chosen: str) -> list[dict[str, str]]:
    found = [
        ("Naive ring beside zigzag", "contiguous/ring", "zigzag/ring"),
        (f"Your plan ({chosen.replace('/', ', ')}) beside the naive ring", "contiguous/ring", chosen),
        ("All-gather beside group-cast", f"{chosen.split('/')[0]}/allgather", f"{chosen.split('/')[0]}/groupcast"),
        ("Ring beside Ulysses", "zigzag/ring", "zigzag/ulysses"),
        ("Affine chain: in a row beside zigzag", f"contiguous/{AFFINE}", f"zigzag/{AFFINE}"),
    ]
    return [
        {"name": name, "left": left, "right": right} for name, left, right in found if left in views and right in views
    ]


def _rates(shape: Shape, machine: Machine) -> dict[str, float]:
    """Seconds of the cost model. A token of a linear mixer reads, decays and writes its state: 6 flops an element."""
    state = shape.heads * shape.head_dim * shape.value_dim
    return {
        "pairs": machine.seconds_per_pair(shape),
        "tokens": 6 * state / machine.flops,
        "byte": 1 / machine.bytes_per_second,
        "latency": machine.latency,
    }


def _spans(layout: Layout) -> dict[str, list[int]]:
    starts, stops, ranks = layout.sorted
    return {"lengths": (stops - starts).tolist(), "owners": ranks.tolist()}


def _view(plan: Plan) -> dict[str, Any]:
    report, stages = plan.report(), plan_stages(plan)
    view = {**_reported(report), "unit": "pairs", **_staged(stages)}
    if plan.strategy == "groupcast":
        cast = GroupCast(plan.mask, plan.layout, plan.stages)
        view["turn"] = {"kind": "cast", "starts": [cast.stage_starts(rank) for rank in range(plan.world_size)]}
    elif plan.strategy == "ring":
        view["turn"] = {"kind": "ring"}
    return view


def _reported(report: Report) -> dict[str, Any]:
    return {
        "why": report.why,
        "details": report.details,
        "work": report.total_area,
        "imbalance": report.imbalance,
        "loadBound": report.load_bound,
        "receiveBound": report.receive_bound,
        "bytesReceived": report.bytes_received,
        "bytesIfGathered": report.bytes_if_gathered,
        "perRank": {
            "tokens": [rank.tokens for rank in report.ranks],
            "work": [rank.area for rank in report.ranks],
            "tokensReceived": [rank.tokens_received for rank in report.ranks],
            "tokensSent": [rank.tokens_sent for rank in report.ranks],
            "bytesReceived": [rank.bytes_received for rank in report.ranks],
            "bytesSent": [rank.bytes_sent for rank in report.ranks],
            "tasks": [rank.kernel_tasks for rank in report.ranks],
        },
    }


def _chain_view(layout: Layout, cu_seqlens: Ints, shape: Shape) -> dict[str, Any]:
    cut = fragments(layout, cu_seqlens)
    state = shape.heads * shape.head_dim * shape.value_dim * STATE_ITEMSIZE
    transition = shape.heads * shape.head_dim * shape.head_dim * STATE_ITEMSIZE
    stages = chain_stages(cut, state, transition)
    work: Ints = np.asarray(sum(stage.work for stage in stages), dtype=np.int64)
    matrix = exchange_matrix(stages)
    mean = float(work.mean())
    cut_documents = int((cut.roles == Role.HEAD).sum())
    return {
        "why": f"a delta rule with {shape.heads} heads of {shape.head_dim}; M and U of a fragment have "
        f"{(state + transition) / 1e6:.2f} MB however long it is",
        "details": f"{cut_documents} documents are cut, into {int((cut.roles != Role.WHOLE).sum())} fragments",
        "unit": "tokens",
        "work": int(work.sum()),
        "imbalance": int(work.max()) / mean if mean else 1.0,
        "bytesReceived": int(matrix.sum()),
        "perRank": {
            "tokens": list(layout.counts),
            "work": work.tolist(),
            "bytesReceived": matrix.sum(axis=0).tolist(),
            "bytesSent": matrix.sum(axis=1).tolist(),
        },
        **_staged(stages),
    }


def _staged(stages: Sequence[PlanStage]) -> dict[str, Any]:
    return {
        "stages": [
            {"name": stage.name, "work": stage.work.tolist(), "messages": _messages(stage.messages)} for stage in stages
        ],
        "matrix": _messages(exchange_matrix(stages)),
    }


def _messages(matrix: Ints) -> dict[str, list[int]] | None:
    """Bytes from rank to rank, in the shortest of three forms; None if there are none."""
    if not matrix.any():
        return None
    world = len(matrix)
    each = matrix.max(axis=1)
    if np.array_equal(matrix, np.where(np.eye(world, dtype=bool), 0, each[:, None])):
        return {"each": each.tolist()}  # the same to everybody else
    source, target = np.nonzero(matrix)
    if 3 * len(source) < matrix.size:
        return {"some": np.stack([source, target, matrix[source, target]], axis=1).reshape(-1).tolist()}
    return {"all": matrix.reshape(-1).tolist()}
