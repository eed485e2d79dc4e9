"""Runs of real trainers on one rank: the same run with and without `lw.pool`, and what it left behind."""

import os
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plain_transformers  # noqa: F401 - before models are made
import torch
import torch.distributed as dist
from families import build
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, TrainerCallback

import longweave as lw

STEPS = 10
WORDS = 90


@dataclass
class Record:
    """What a run left behind."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    extra: Any = None


class Log(TrainerCallback):
    """Losses and gradient norms of every step."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.record.losses.append(logs["loss"])
            self.record.norms.append(float(logs["grad_norm"]))


@contextmanager
def as_launched() -> Any:
    """The environment that a launcher gives a rank; whatever accelerate remembers is forgotten before and after."""
    import accelerate.state as state

    rank, world = dist.get_rank(), dist.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in names.items()})

    def forget() -> None:
        for cls in (state.AcceleratorState, state.PartialState, state.GradientState):
            cls._reset_state()

    forget()
    try:
        with tempfile.TemporaryDirectory(prefix="longweave-trainer-") as folder:
            yield Path(folder)
    finally:
        forget()
        os.environ.clear()
        os.environ.update(before)


def model_of(family: str, **changes: Any) -> nn.Module:
    model = build(family, torch.float32, **changes)
    model.set_attn_implementation("sdpa" if family != "gpt_oss" else "eager")
    return model


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Of any trainer's configuration: SGD, since Adam turns the rounding of near-zero gradients into whole steps."""
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 3,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "ddp_backend": "gloo",
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "seed": 7,
        "bf16": False,
        "gradient_checkpointing": False,
        **changes,
    }


def lengths(count: int, longest: int = 60, seed: int = 3) -> list[int]:
    """Heavy-tailed: many short ones, a few long ones, a few of 2 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator).mul(1.2).add(2.2).exp().long().clamp(2, longest).tolist()


def examples(count: int, seed: int = 3, longest: int = 60) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n in lengths(count, longest, seed):
        ids = torch.randint(5, WORDS, (n,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": list(ids)})
    return found


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w5 … w89, and what trainers ask for."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "<s>": 3, "</s>": 4, **{f"w{i}": i for i in range(5, WORDS)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def finished(trainer: Any, record: Record) -> Record:
    trainer.train()
    record.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return record


def pooled(model: nn.Module, how: dict[str, Any] | None) -> nn.Module:
    return model if how is None else lw.pool(model, **how)


# -- the trainers ----------------------------------------------------------------------------------------


def hf_trainer(how: dict[str, Any] | None, family: str = "llama", **changes: Any) -> Record:
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    with as_launched() as folder:
        record, model = Record(), pooled(model_of(family), how)
        data = examples(STEPS * 3 * dist.get_world_size() * 2)
        collator = DataCollatorForSeq2Seq(tokenizer(), padding=True)
        args = TrainingArguments(**arguments(folder, **changes))
        return finished(Trainer(model, args, collator, data, callbacks=[Log(record)]), record)


def sft(how: dict[str, Any] | None, family: str = "llama", packing: bool = False, **changes: Any) -> Record:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    with as_launched() as folder:
        record, model = Record(), pooled(model_of(family), how)
        data = Dataset.from_list([{"text": words(e["input_ids"])} for e in examples(STEPS * 3 * 4 * 2)])
        args = SFTConfig(**arguments(folder, packing=packing, max_length=48, **changes))
        trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer(), callbacks=[Log(record)])
        return finished(trainer, record)


def dpo(how: dict[str, Any] | None, family: str = "llama", **changes: Any) -> Record:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    with as_launched() as folder:
        record, model, reference = Record(), model_of(family), model_of(family)
        for one in (model, reference):
            pooled(one, how)
        rows = examples(STEPS * 2 * 4 * 3)
        data = Dataset.from_list(
            [
                {
                    "prompt": words(a["input_ids"]),
                    "chosen": " " + words(b["input_ids"]),
                    "rejected": " " + words(c["input_ids"]),
                }
                for a, b, c in zip(rows[::3], rows[1::3], rows[2::3], strict=True)
            ]
        )
        args = DPOConfig(**arguments(folder, per_device_train_batch_size=2, **changes))
        trainer = DPOTrainer(
            model, reference, args, train_dataset=data, processing_class=tokenizer(), callbacks=[Log(record)]
        )
        return finished(trainer, record)


def reward(how: dict[str, Any] | None, family: str = "llama", **changes: Any) -> Record:
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    with as_launched() as folder:
        record = Record()
        config = model_of(family).config
        config.num_labels = 1
        torch.manual_seed(0)
        model = pooled(AutoModelForSequenceClassification.from_config(config), how)
        rows = examples(STEPS * 2 * 4 * 2)
        data = Dataset.from_list(
            [
                {"chosen": words(a["input_ids"]), "rejected": words(b["input_ids"])}
                for a, b in zip(rows[::2], rows[1::2], strict=True)
            ]
        )
        args = RewardConfig(**arguments(folder, per_device_train_batch_size=2, **changes))
        trainer = RewardTrainer(model, args, train_dataset=data, processing_class=tokenizer(), callbacks=[Log(record)])
        return finished(trainer, record)


def grpo(how: dict[str, Any] | None, family: str = "llama", **changes: Any) -> Record:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def few_repeats(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [len(set(text.split())) + 0.1 * len(text.split()) for text in completions]

    with as_launched() as folder:
        record, model = Record(), pooled(model_of(family), how)
        data = Dataset.from_list([{"prompt": words(e["input_ids"])} for e in examples(STEPS * 4 * 4, longest=30)])
        args = GRPOConfig(
            **arguments(
                folder,
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=12,
                temperature=1.0,
                **changes,
            )
        )
        trainer = GRPOTrainer(model, few_repeats, args, data, processing_class=tokenizer(), callbacks=[Log(record)])
        return finished(trainer, record)


RUNS: dict[str, Callable[..., Record]] = {
    "trainer": hf_trainer,
    "sft": sft,
    "dpo": dpo,
    "reward": reward,
    "grpo": grpo,
}


def compared(name: str, how: dict[str, Any], **options: Any) -> tuple[float, float, float, list[float]]:
    """The largest differences of losses, gradient norms and weights between a run without `lw.pool` and one with it."""
    torch.manual_seed(0)
    plain = RUNS[name](None, **options)
    torch.manual_seed(0)
    shared = RUNS[name](how, **options)
    assert len(plain.losses) == len(shared.losses) == STEPS
    loss = max(abs(a - b) / max(abs(a), 1) for a, b in zip(plain.losses, shared.losses, strict=True))
    norm = max(abs(a - b) / max(abs(a), 1e-3) for a, b in zip(plain.norms, shared.norms, strict=True))
    weights = max(float((plain.weights[n] - shared.weights[n]).abs().max()) for n in plain.weights)
    return loss, norm, weights, plain.losses
