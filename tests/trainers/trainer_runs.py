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
from families import build, exact
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
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
    names |= {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": 0}
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


def model_of(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build(family, dtype)
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
    return left(trainer.model, record)


def left(model: nn.Module, record: Record) -> Record:
    """The record with the weights in the end."""
    for name, p in model.named_parameters():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        record.weights[name.replace("module.", "")] = whole.detach().clone()
    return record


def pooled(model: nn.Module, how: dict[str, Any] | None) -> nn.Module:
    return model if how is None else lw.pool(model, **how)


# -- the trainers ----------------------------------------------------------------------------------------


def hf_trainer(
    how: dict[str, Any] | None,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    side: str = "right",
    **changes: Any,
) -> Record:
    """Also evaluates and predicts: metrics come from logits that must lie where their rows are."""
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    with as_launched() as folder:
        record, model = Record(), pooled(model_of(family, dtype), how)
        data = examples(STEPS * 3 * dist.get_world_size() * 2)
        for example in data:  # else a padding token would have to predict the first token of a left-padded row
            example["labels"][0] = -100
        words_of = tokenizer()
        words_of.padding_side = side
        collator = DataCollatorForSeq2Seq(words_of, padding=True)
        args = TrainingArguments(**arguments(folder, **changes))
        trainer = Trainer(model, args, collator, data, callbacks=[Log(record)])
        finished(trainer, record)
        if how is None or how.get("head") != "pooled":
            held_out = examples(7, seed=11, longest=20)  # an odd number: the last batch is smaller on some ranks
            answer = trainer.predict(held_out)
            # Padding has whatever the model makes of it; tokens have one answer.
            keep = answer.label_ids != -100
            record.extra = torch.from_numpy(answer.predictions[: len(held_out)][keep[: len(held_out)]])
        return record


def sft(
    how: dict[str, Any] | None,
    family: str = "llama",
    packing: bool = False,
    lora_outside: bool = False,
    lora_inside: bool = False,
    **changes: Any,
) -> Record:
    """LoRA is put on before `lw.pool`, or by the trainer after it."""
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from trl import SFTConfig, SFTTrainer

    with as_launched() as folder:
        record, model = Record(), model_of(family)
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        if lora_outside:
            model = get_peft_model(model, lora)
        pooled(model, how)
        data = Dataset.from_list([{"text": words(e["input_ids"])} for e in examples(STEPS * 3 * 4 * 2)])
        args = SFTConfig(**arguments(folder, packing=packing, max_length=48, **changes))
        trainer = SFTTrainer(
            model,
            args,
            train_dataset=data,
            processing_class=tokenizer(),
            callbacks=[Log(record)],
            peft_config=lora if lora_inside else None,
        )
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


def accelerate_loop(how: dict[str, Any] | None, family: str = "llama", **changes: Any) -> Record:
    """A loop of one's own, with gradients of two batches added up, clipping and a gathered loss."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import DataCollatorForSeq2Seq

    with as_launched():
        record, model = Record(), pooled(model_of(family), how)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        data = examples(STEPS * 2 * 2 * dist.get_world_size())
        loader = DataLoader(data, batch_size=2, collate_fn=DataCollatorForSeq2Seq(tokenizer()))
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.05), loader)
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    record.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
            if number % 2:
                record.losses.append(float(accelerator.gather(loss.detach()).mean()))
        return left(model, record)


def fabric(how: dict[str, Any] | None, family: str = "llama", **changes: Any) -> Record:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy
    from torch.utils.data import DataLoader
    from transformers import DataCollatorForSeq2Seq

    with as_launched():
        world = dist.get_world_size()
        runner = Fabric(accelerator="cpu", devices=world, strategy=DDPStrategy(process_group_backend="gloo"))
        runner.launch()
        record, model = Record(), pooled(model_of(family), how)
        model, optimizer = runner.setup(model, torch.optim.SGD(model.parameters(), 0.05))
        data = examples(STEPS * 2 * world)
        loader = runner.setup_dataloaders(
            DataLoader(data, batch_size=2, collate_fn=DataCollatorForSeq2Seq(tokenizer()))
        )
        for batch in loader:
            loss = model(**batch).loss
            runner.backward(loss)
            record.norms.append(float(runner.clip_gradients(model, optimizer, max_norm=1.0)))
            optimizer.step()
            optimizer.zero_grad()
            record.losses.append(float(runner.all_reduce(loss.detach(), reduce_op="mean")))
        return left(model, record)


def own_loop(
    how: dict[str, Any] | None,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    wrapper: str = "ddp",
    checkpointing: bool = False,
) -> Record:
    """Plain PyTorch: DDP, or FSDP2 over the same ranks."""
    from transformers import DataCollatorForSeq2Seq

    record, model = Record(), pooled(model_of(family, dtype), how)
    if checkpointing:
        model.gradient_checkpointing_enable()
    world, rank = dist.get_world_size(), dist.get_rank()
    if wrapper == "ddp":
        outer: nn.Module = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        outer = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(outer.parameters(), 0.05)
    collate, data = DataCollatorForSeq2Seq(tokenizer()), examples(STEPS * 2 * world)
    for start in range(0, len(data), 2 * world):
        loss = outer(**collate(data[start + 2 * rank : start + 2 * rank + 2])).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(outer.parameters(), 1.0)
        record.norms.append(float(norm.full_tensor() if wrapper == "fsdp" else norm))
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        record.losses.append(float(mean) / world)
    return left(model, record)


RUNS: dict[str, Callable[..., Record]] = {
    "trainer": hf_trainer,
    "sft": sft,
    "dpo": dpo,
    "reward": reward,
    "grpo": grpo,
    "accelerate": accelerate_loop,
    "fabric": fabric,
    "loop": own_loop,
}


def compared(name: str, how: dict[str, Any], **options: Any) -> tuple[float, float, float]:
    """The largest differences of losses, gradient norms and weights between a run without `lw.pool` and one with it."""
    with exact(options.get("dtype", torch.float32), options.get("family", "llama")):
        plain, shared = (RUNS[name](each, **options) for each in (None, how))
    assert len(plain.losses) == len(shared.losses) == STEPS
    loss = max(abs(a - b) / max(abs(a), 1) for a, b in zip(plain.losses, shared.losses, strict=True))
    norm = max(abs(a - b) / max(abs(a), 1e-3) for a, b in zip(plain.norms, shared.norms, strict=True))
    weights = max(float((plain.weights[n] - shared.weights[n]).abs().max()) for n in plain.weights)
    if plain.extra is not None and shared.extra is not None:
        assert float((plain.extra - shared.extra).abs().max()) < 1e-4
    return loss, norm, weights
