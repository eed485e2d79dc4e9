"""The README: its two commands, and its three ways in, which run as written and come to what one process does."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_docs import VALID, batches, config, logprobs, train
from trainer_runs import Log, Record, arguments, as_launched, examples

import longweave as lw
from longweave.launch import Ranks

PAGE = Path(__file__).parents[2] / "README.md"
WAYS = dict(re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", PAGE.read_text(), re.S))


def run(way: str, **names: Any) -> dict[str, Any]:
    given = {"__name__": "readme", **names}
    exec(compile(WAYS[way], str(PAGE), "exec"), given)
    return given


def test_what_the_readme_has() -> None:
    text = PAGE.read_text()
    assert list(WAYS) == ["trainer", "loop", "operators"]
    assert len(re.findall(r"```python\n", text)) == len(WAYS), "every snippet is here"
    for target in ("demo", "test"):
        assert re.search(rf"^make {target} ", text, re.M)
    assert "pip install 'longweave[hf,cli,plot]'" in text
    for name in re.findall(r"\]\(([\w./]+)[#)]", text):
        assert (PAGE.parent / name).exists(), name


def trained(with_pool: bool) -> list[float]:
    """The losses that it logs; rows of one length, as `Trainer` wants them without a collator."""
    from transformers import TrainingArguments

    rows = [{name: (ids * 12)[:12] for name, ids in row.items()} for row in examples(8)]
    record = Record()
    with as_launched() as folder, pytest.MonkeyPatch.context() as patch:
        import transformers

        args = TrainingArguments(**arguments(folder, max_steps=3, per_device_train_batch_size=1))
        made = transformers.Trainer
        patch.setattr(transformers, "Trainer", lambda *given, **more: made(*given, callbacks=[Log(record)], **more))
        if not with_pool:
            patch.setattr(lw, "pool", lambda model: model, raising=False)
        torch.manual_seed(0)
        run("trainer", config=config(), args=args, rows=rows)
    return record.losses


def both() -> tuple[list[float], list[float]]:
    return trained(True), trained(False)


def test_a_trainer(ranks: Ranks) -> None:
    for pooled, plain in ranks.run(both, size=2):
        assert len(set(pooled)) == 3, "something was learned"
        assert pooled == pytest.approx(plain, rel=1e-4)


def loop() -> list[float]:
    """What it prints. SGD: with AdamW a gradient that is wrong by a factor would not be seen."""
    said: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        run("loop", config=config(), loader=batches(), print=said.append)
    return said


def test_a_loop(ranks: Ranks) -> None:
    steps = [lambda model, ids=ids: -sum(x.sum() for x in logprobs(model, ids)) / VALID for ids, _ in batches()]
    want, _ = train(steps)
    for said in ranks.run(loop, size=2):
        assert said == pytest.approx(want, rel=1e-5)
        assert len(set(said)) == 3


def operators() -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(40, 64)
    return run("operators", cu_seqlens=[0, 13, 14, 31, 40], group=None, embeddings=x)["whole"].detach()


def test_operators(ranks: Ranks) -> None:
    alone = operators()
    for whole in ranks.run(operators, size=3):
        torch.testing.assert_close(whole, alone)
