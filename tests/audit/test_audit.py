"""What `lw.audit` takes, what a report says, and the command."""

import json
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import planted
import pytest
import torch
import torch.distributed as dist
from families import build
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

import longweave as lw
from longweave.cli import app
from longweave.launch import Ranks
from longweave.tools.audit import AuditError, AuditReport, OneProcess, StepResult, command, parallelized, probes
from longweave.tools.audit.consistency import _digest, as_mine, on_cpu
from longweave.tools.audit.report import faulty, follows, right, skipped

BATCH = {"input_ids": torch.arange(9) % 5, "cu_seqlens": [0, 4, 9]}


# -- arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.arange(9), "give a mapping with input_ids"),
        ({"cu_seqlens": [0, 3]}, "give a mapping with input_ids"),
        ({**BATCH, "cu_seqlens": [0, 4]}, "cu_seqlens ends at 4 but input_ids has 9"),
        ({**BATCH, "labels": torch.arange(8)}, "labels has 8 entries"),
        ({**BATCH, "labels": torch.full((9,), -100)}, "0 labels of the batch count"),
        ({**BATCH, "input_ids": torch.rand(9)}, "torch.float32"),
        ({"input_ids": torch.zeros(3, 3, dtype=torch.long)}, "(3, 3)"),
        ({"input_ids": torch.zeros(1, dtype=torch.long)}, "1 tokens"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch, message: str) -> None:
    with pytest.raises(lw.InputError, match=message.replace("(", r"\(").replace(")", r"\)")):
        lw.audit(lambda inputs: 0.0, batch)


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (7, {}, "step is a int"),
        (lambda inputs: 0.0, {"loss": "max"}, "loss is 'max'"),
        (lambda inputs: 0.0, {"gradients": "mine"}, "gradients is 'mine'"),
        (lambda inputs: 0.0, {"tolerance": 2}, "tolerance is 2"),
        (lambda inputs: 0.0, {"tolerance": "x"}, "tolerance is 'x'"),
        (lambda inputs: 0.0, {"model": "x"}, "model is 'x'"),
        (lambda inputs: 0.0, {"suspects": [1]}, "suspects is"),
        (lambda inputs: 0.0, {"suspects": {"a": 1}}, "suspects is"),
        (torch.nn.Linear(2, 2), {}, "neither parallel nor pooled"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(step, options: dict, message: str) -> None:
    with pytest.raises(lw.InputError, match=message):
        lw.audit(step, BATCH, **options)


def audit_with_one_rank_wrong(wrong: dict) -> str:
    given = {"step": lambda inputs: 1.0, "batch": BATCH, **(wrong if dist.get_rank() == 1 else {})}
    try:
        return str(lw.audit(**given))
    except lw.LongweaveError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": {**BATCH, "cu_seqlens": [0, 4]}}, "InputError: cu_seqlens ends at 4 but input_ids has 9 tokens"),
        ({"tolerance": 2}, "InputError: tolerance is 2"),
        ({"loss": "max"}, "InputError: loss is 'max'"),
        ({"step": 7}, "InputError: step is a int"),
    ],
)
def test_arguments_that_do_not_fit_on_one_rank_are_refused_on_all(ranks: Ranks, wrong: dict, message: str) -> None:
    other, own = ranks.run(audit_with_one_rank_wrong, wrong, size=2, timeout=90)
    assert own.startswith(message)
    assert other.startswith(f"GroupError: rank 1 of 2 cannot be audited: {message}")


@pytest.mark.parametrize("wrong", [{"tolerance": 0.5}, {"loss": "sum"}, {"gradients": "sum"}])
def test_options_that_differ_are_named(ranks: Ranks, wrong: dict) -> None:
    ((name, value),) = wrong.items()
    for said in ranks.run(audit_with_one_rank_wrong, wrong, size=2, timeout=90):
        assert said.startswith(f"GroupError: {name} is ")
        assert f"{value!r} on rank 1; give lw.audit the same on all ranks" in said


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (StepResult(0.0, None, torch.zeros(9, 2)), "outputs without tokens"),
        ((0.0, None, torch.zeros(9, 2), [0, 1]), "9 rows of outputs and 2 tokens"),
        (torch.zeros(3), "a loss of shape"),
        ("much", "str as its loss"),
    ],
)
def test_an_answer_that_makes_no_sense_is_a_fault(answer, message: str) -> None:
    (fault,) = lw.audit(lambda inputs: answer, BATCH).faults
    assert fault.fault == "error"
    assert message in fault.figure


def test_one_process_and_a_mapping_as_an_answer() -> None:
    """Also: a step may return NaN where no label counts, and labels may be given."""
    reference = OneProcess(planted.Packed(), lambda m, ids, at: m(ids, at))
    own = OneProcess(planted.Packed(), lambda m, ids, at: m(ids, at))

    def step(inputs: dict) -> dict:
        found = own(inputs)
        loss = found.loss if found.loss else nan
        return {"loss": loss, "gradients": found.gradients, "outputs": found.outputs, "tokens": found.tokens}

    labels = torch.tensor([-100, 1, 2, -100, 3, 3, 2, 1, -100])
    report = lw.audit(step, {**BATCH, "labels": labels}, reference=reference)
    assert report.ok, str(report)
    assert (report.ranks, report.tokens, report.documents) == (1, 9, 2)


def test_suspects_of_ones_own_are_named() -> None:
    """Here: a temperature that one process has and the step has not."""

    def forward(temperature: float):
        return lambda m, ids, at: m(ids, at) / temperature

    hot, cold = (OneProcess(planted.Packed(), forward(t)) for t in (2.0, 1.0))
    for outputs in (True, False):

        def step(inputs: dict, outputs: bool = outputs) -> StepResult:
            found = cold(inputs)
            return found if outputs else replace(found, outputs=None)

        report = lw.audit(step, BATCH, reference=hot, suspects={"temperature": cold})
        assert [fault.fault for fault in report.faults] == ["temperature"], str(report)


def test_a_parallel_model_is_left_as_it_was() -> None:
    model = lw.parallelize(build("llama", torch.float32))
    before = {name: p.clone() for name, p in model.named_parameters()}
    for p in model.parameters():  # gradients are being accumulated
        p.grad = torch.full_like(p, 7.0)
    assert lw.audit(model, planted.batch_of()).ok
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is not None and bool((p.grad == 7).all()) for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    lw.restore(model)


def test_sharded_models_need_a_reference(ranks: Ranks) -> None:
    with pytest.raises(lw.InputError, match=r"give reference=longweave.tools.audit.OneProcess"):
        ranks.run(sharded, False, size=2)
    report = ranks.run(sharded, True, size=2)[0]
    assert report.ok, str(report)


def sharded(reference: bool) -> AuditReport:
    """FSDP2 averages, so the loss is scaled."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(lw.parallelize(build("llama", torch.float32)), mesh=init_device_mesh("cpu", (2,)))

    def step(inputs: dict) -> torch.Tensor:
        batch = lw.shard_batch(inputs["input_ids"], inputs["cu_seqlens"], labels=inputs["labels"])
        loss = batch.loss(model(**batch.inputs).logits)
        (loss * lw.loss_scale()).backward()
        return loss.detach()

    known = {"reference": OneProcess(build("llama", torch.float32))} if reference else {}
    return lw.audit(step, planted.batch_of(), model=model, loss="sum", **known)


# -- batches of the ranks --------------------------------------------------------------------------------


def test_a_digest_is_of_everything() -> None:
    """`repr` of an array leaves out its middle, also within other things."""
    whole = np.arange(5000)
    other = whole.copy()
    other[2500] = 7
    for wrap in (
        lambda x: x,
        torch.from_numpy,
        lambda x: {"a": [1, x]},
        lambda x: (x, "b"),
        lambda x: x.astype(object),
    ):
        assert _digest(wrap(whole)) == _digest(wrap(whole.copy()))
        assert _digest(wrap(whole)) != _digest(wrap(other))
    assert len({_digest(x) for x in (whole, whole.astype(np.int32), whole[None], whole.tolist())}) == 4


def test_a_batch_of_another_rank_comes_to_the_device_of_ones_own() -> None:
    """There are GPUs in name only, here."""
    with FakeTensorMode():
        theirs = {
            "input_ids": torch.ones(4, device="cuda:0"),
            "labels": torch.ones(4),
            "more": [torch.ones(2, device="cuda:0")],
            "n": 3,
        }
        mine = {"input_ids": torch.zeros(4, device="cuda:1"), "labels": torch.zeros(4)}
        sent = on_cpu(theirs)
        assert {sent["input_ids"].device.type, sent["labels"].device.type, sent["more"][0].device.type} == {"cpu"}
        got = as_mine(sent, mine)
        assert got["input_ids"].device == got["more"][0].device == torch.device("cuda:1")
        assert got["labels"].device.type == "cpu"
        assert got["n"] == 3


# -- integers --------------------------------------------------------------------------------------------


def test_labels_at_borders() -> None:
    owners = np.array([0, 0, 1, 1, 0, 0, 1, 1, 1])
    assert np.flatnonzero(probes.labels_at_borders(owners, [0, 4, 9])).tolist() == [2, 6]  # 4 begins a document


def test_wrong_positions() -> None:
    ways = probes.wrong_positions([np.array([0, 1, 6, 7]), np.array([2, 3, 4, 5, 8])], [0, 4, 9])
    found = {name.partition(" ")[2]: way.tolist() for name, way in ways.items()}
    assert found["from the start of each rank's shard"] == [0, 1, 0, 1, 2, 3, 2, 3, 4]
    assert found["from the start of each piece of a document"] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert found["within what a rank holds of a document"] == [0, 1, 0, 1, 0, 1, 0, 1, 2]
    assert probes.wrong_positions([np.arange(4)], [0, 4]).keys() == {"all 0"}


def test_tokens_to_change_and_who_may_notice() -> None:
    assert probes.tokens_to_change([0, 3, 3, 10, 11]) == [3, 6, 2, 10]
    assert np.flatnonzero(probes.may_notice(6, [0, 3, 3, 10, 11])).tolist() == [6, 7, 8, 9]
    ids = torch.tensor([3, 3, 5, 3])
    assert probes.changed({"input_ids": ids}, 2)["input_ids"].tolist() == [3, 3, 3, 3]
    assert probes.changed({"input_ids": ids[:2]}, 0)["input_ids"].tolist() == [2, 3]


# -- reports ---------------------------------------------------------------------------------------------

FINDINGS = (
    right("batch", "the same on 2 ranks"),
    faulty("documents", "documents", "outputs move", "token 3", "no mask"),
    follows("loss", "5 against 4", ["documents"]),
    skipped("gradients", "the step returns none"),
)


def test_a_report_says_what_was_found() -> None:
    report = AuditReport(2, 85, 7, FINDINGS, 1.5)
    assert not report.ok
    assert [fault.fault for fault in report.faults] == ["documents"]
    text = str(report)
    for part in ("85 tokens in 7 documents on 2 ranks", "where: token 3", "cause: no mask", "FAULTY: 1 ok, 1 FAULT"):
        assert part in text
    with pytest.raises(AuditError, match=r"documents: outputs move\. Where: token 3\. Likely cause: no mask"):
        report.raise_if_faulty()
    assert issubclass(AuditError, lw.LongweaveError)
    written = json.loads(report.as_json())
    assert (written["ok"], written["ranks"]) == (False, 2)
    assert [finding["verdict"] for finding in written["findings"]] == ["ok", "FAULT", "follows", "skipped"]


def test_a_report_without_faults_is_right_if_anything_was_looked_at() -> None:
    assert AuditReport(2, 85, 7, FINDINGS[:1], 1.5).ok
    AuditReport(2, 85, 7, FINDINGS[:1], 1.5).raise_if_faulty()
    assert not AuditReport(2, 85, 7, FINDINGS[3:], 1.5).ok
    partly = AuditReport(2, 85, 7, (FINDINGS[0], skipped("gradients", "none returned")), 1.5)
    assert partly.summary() == "right, but gradients not looked at: 1 ok, 1 skipped in 1.5 s"


# -- the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", command.WAYS)
def test_the_built_in_workload_is_right(ranks: Ranks, way: str) -> None:
    workload = command.AuditedWorkload("mistral", way, tokens=300)
    report = ranks.run(command.audit_workload, workload, size=2)[0]
    assert report.ok, str(report)
    assert report.tokens == 300
    assert report.documents > 4


def test_the_command_shows_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def run_local(workload, ranks: int) -> AuditReport:
        seen.append((workload, ranks))
        return AuditReport(ranks, 85, 7, FINDINGS[: 2 if workload.model == "llama" else 1], 1.5)

    monkeypatch.setattr(command, "run_local", run_local)
    file = tmp_path / "new" / "audit.json"
    result = CliRunner().invoke(app, ["audit", "--model", "llama", "--ranks", "3", "--json", str(file)])
    assert result.exit_code == 1, result.output
    assert "cause: no mask" in result.output
    assert json.loads(file.read_text())["ok"] is False
    assert seen[0] == (command.AuditedWorkload("llama"), 3)
    assert CliRunner().invoke(app, ["audit"]).exit_code == 0
    for args, message in ((["--model", "x"], "model is 'x'"), (["--way", "x"], "way is 'x'")):
        result = CliRunner().invoke(app, ["audit", *args])
        assert result.exit_code == 2
        assert message in result.output


def test_adapters_take_options() -> None:
    step = parallelized(lw.parallelize(build("llama", torch.float32)), strategy="teleport")
    (fault,) = lw.audit(step, planted.batch_of()).faults
    assert "teleport" in fault.figure


def test_a_step_that_makes_its_own_labels_is_told_so() -> None:
    torch.manual_seed(0)
    model = lw.parallelize(build("llama"))
    ids = torch.randint(90, (24,))

    def step(batch, **labels):
        mine = lw.shard_batch(batch["input_ids"], batch["cu_seqlens"], **labels)
        loss = mine.loss(model(**mine.inputs).logits)
        loss.backward()
        return loss

    batch = {"input_ids": ids, "cu_seqlens": [0, 9, 24]}
    report = lw.audit(step, batch, model=model, loss="sum")
    assert [fault.fault for fault in report.faults] == ["labels not used"]
    assert lw.audit(lambda b: step(b, labels=b["labels"]), batch, model=model, loss="sum").ok
