"""Every planted fault is named, with its place; none is reported on a right step."""

import os
from pathlib import Path

import planted
import pytest
import torch

from longweave.launch import Ranks
from longweave.tools.audit import AuditReport
from longweave.tools.audit.report import FOLLOWS, OK, SKIPPED

ATTENTION = "model.layers.0.self_attn"

# step: its faults, and what the place of the first must name
FAULTS = {
    planted.gradients_times_ranks: (["gradient scale"], "every parameter"),
    planted.gradients_times_ranks_in_bf16: (["gradient scale"], "every parameter"),
    planted.embedding_summed_twice: (["gradient scale"], "model.embed_tokens.weight"),
    planted.gradients_not_reduced: (["gradients not reduced"], "model.embed_tokens.weight"),
    planted.one_forgotten_in_the_reduction: (["gradients not reduced"], "input_layernorm.weight"),
    planted.labels_shifted_in_the_shard: (["labels at shard borders"], "labels of tokens"),
    planted.labels_across_documents: (["labels across documents"], "first tokens"),
    planted.local_positions: (["positions"], "model.rotary_emb"),
    planted.local_positions_in_zigzag: (["positions"], "model.rotary_emb"),
    planted.one_document_of_all: (["documents", "labels across documents"], "token"),
    planted.no_causal_mask: (["causality"], "token"),
    planted.means_of_ranks: (["normalisation"], "losses of the ranks"),
    planted.loss_of_all_on_every_rank: (["loss scale"], "losses of the ranks"),
    planted.softcap_dropped: (["softcap"], ATTENTION),
    planted.sinks_dropped: (["sinks"], ATTENTION),
    planted.scale_dropped: (["scale of attention"], ATTENTION),
    planted.window_dropped: (["window"], "token"),
    planted.window_too_short: (["exchange"], "token"),
    planted.sinks_without_gradient: (["gradients missing"], f"{ATTENTION}.sinks"),
    planted.halo_gradients_lost: (["gradients"], "linear_attn"),
    planted.states_lost: (["outputs"], "model.layers.0.linear_attn"),
    planted.other_weights: (["weights"], "model.layers.1.mlp.up_proj.weight"),
    planted.other_batch: (["batch"], "rank"),
    planted.dropout: (["randomness"], ""),
    planted.nan_of_a_module: (
        ["not finite"],
        "the first module is model.layers.1.mlp; outputs of token 42 in document 4",
    ),
    planted.mean_of_no_labels: (["not finite"], "the loss of rank 1"),
    planted.raises_on_one_rank: (["error"], ""),
    planted.documents_without_a_reference: (["documents"], "token"),
    planted.pooled_without_documents_apart: (["causality"], "token"),
    planted.means_in_a_trainer: (["normalisation"], "losses of the ranks"),
    planted.shards_alone: (["exchange"], "token"),
    planted.tail_cut_off: (["tokens", "exchange"], "tokens"),
}
# In steps that use nothing of longweave.
NOT_OURS = {
    planted.nan_in_a_weight: (["not finite"], "weights tokens.weight; the first module is tokens; outputs of tokens"),
    planted.nan_in_gradients: (["not finite"], "gradients of tokens.weight"),
    planted.ddp_wrong_scale: (["gradient scale"], "every parameter"),
    planted.ddp_wrong_scale_by_loss_alone: (["gradient scale"], "every parameter"),
    planted.sdpa_without_documents: (["documents"], "token"),
    planted.sdpa_without_documents_by_loss_alone: (["documents"], "token"),
    planted.docs_example: (["documents"], "token 22 changed (on rank 0): 56 outputs"),
}
FAULTS |= NOT_OURS
# Faults that depend on the number of ranks, or on who is odd; the others run on 3 ranks with LONGWEAVE_FULL=1.
ON_THREE = {
    planted.gradients_times_ranks,
    planted.gradients_not_reduced,
    planted.labels_shifted_in_the_shard,
    planted.means_of_ranks,
    planted.other_weights,
    planted.other_batch,
    planted.ddp_wrong_scale,
    planted.shards_alone,
}
CASES = [(fault, size) for fault in FAULTS for size in (2, 3)]
CASES = [case for case in CASES if case[1] == 2 or case[0] in ON_THREE or os.environ.get("LONGWEAVE_FULL")]
CASES = [case for case in CASES if case != (planted.docs_example, 3)]  # its place is that of two ranks


def one_report(reports: list[AuditReport]) -> AuditReport:
    """The same on every rank."""
    assert all(report == reports[0] for report in reports)
    return reports[0]


def test_the_docs_count_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    assert f"Tests plant {len(FAULTS)} faults, {len(NOT_OURS)} of them in steps that use nothing of longweave" in text


@pytest.mark.parametrize(("fault", "size"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_fault_is_named(ranks: Ranks, fault, size: int) -> None:
    report = one_report(ranks.run(fault, size=size))
    names, place = FAULTS[fault]
    assert not report.ok
    assert [found.fault for found in report.faults] == names, str(report)
    assert place in report.faults[0].where, str(report)
    assert all(found.cause for found in report.faults)


# -- right steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "size", "options"),
    [
        ("llama", 2, {"layout": "zigzag", "strategy": "ring"}),
        ("llama", 3, {"layout": "contiguous", "strategy": "allgather"}),
        ("mistral", 3, {}),
        ("gemma2", 2, {"strategy": "ulysses"}),
        ("gpt_oss", 3, {}),
        ("qwen3_5", 2, {"layout": "contiguous"}),
        ("qwen3_5", 3, {}),
        ("qwen3_moe", 2, {}),
        ("deepseek_v3", 2, {}),
    ],
)
def test_a_right_step_passes(ranks: Ranks, family: str, size: int, options: dict[str, str]) -> None:
    report = one_report(ranks.run(planted.right, family, **options, size=size))
    assert report.ok, str(report)
    assert [finding.verdict for finding in report.findings] == [OK] * 13


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(ranks: Ranks, dtype: torch.dtype) -> None:
    report = one_report(ranks.run(planted.right, "llama", dtype, size=2))
    assert report.ok, str(report)


@pytest.mark.parametrize("step", [planted.ddp_right, planted.ddp_right_by_loss_alone])
@pytest.mark.parametrize("size", [2, 3])
def test_a_right_step_that_is_not_ours_passes(ranks: Ranks, step, size: int) -> None:
    report = one_report(ranks.run(step, size=size))
    assert report.ok, str(report)


def test_experts_that_have_gradients_on_one_rank_only_pass(ranks: Ranks) -> None:
    report = one_report(ranks.run(planted.one_expert_on_each_rank, size=2))
    assert report.ok, str(report)


def test_masked_logits_are_no_fault(ranks: Ranks) -> None:
    report = one_report(ranks.run(planted.masked_logits, size=2))
    assert report.ok, str(report)


def test_without_a_reference_what_needs_none_is_looked_at(ranks: Ranks) -> None:
    report = one_report(ranks.run(planted.right_without_a_reference, size=2))
    assert report.ok
    verdicts = {finding.check: finding.verdict for finding in report.findings}
    assert verdicts["documents"] == verdicts["causality"] == verdicts["weights"] == verdicts["same twice"] == OK
    assert verdicts["loss"] == verdicts["gradients"] == verdicts["window"] == SKIPPED


@pytest.mark.parametrize(
    ("wrapper", "options", "size"), [("plain", {}, 2), ("ddp", {}, 3), ("plain", {"head": "pooled"}, 2)]
)
def test_a_pooled_model_passes(ranks: Ranks, wrapper: str, options: dict[str, str], size: int) -> None:
    report = one_report(ranks.run(planted.right_pooled, wrapper, **options, size=size))
    assert report.ok, str(report)


@pytest.mark.parametrize(("pool", "collated"), [(True, False), (False, False), (True, True)])
def test_a_trainer_passes(ranks: Ranks, pool: bool, collated: bool) -> None:
    report = one_report(ranks.run(planted.with_trainer, pool, collated, size=2))
    assert report.ok, str(report)
    assert FOLLOWS not in {finding.verdict for finding in report.findings}
