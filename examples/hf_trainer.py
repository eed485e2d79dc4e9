"""Hugging Face's Trainer on two local ranks that share their documents, whatever their lengths:

torchrun --nproc-per-node 2 examples/hf_trainer.py

Rows are Python's own sources, byte by byte: a few long ones among many short ones. Take out the line with `lw.pool`,
and the losses stay the same: a step then takes as long as the rank with the longest documents.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import longweave as lw

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--longest", type=int, default=4096, help="bytes of a document")
options = parser.parse_args()

files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
rows = [list(file.read_bytes()[: options.longest]) for file in files if file.stat().st_size > 1]


def collate(batch: list[list[int]]) -> dict[str, torch.Tensor]:
    """Right padding, which is never computed. Labels are not shifted: the model does that."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in batch], batch_first=True, padding_value=-1)
    labels = ids.masked_fill(ids < 0, -100)
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long(), "labels": labels}


config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config)
lw.pool(model, head="pooled")  # this line is all
args = TrainingArguments(
    "out/trainer",
    max_steps=options.steps,
    per_device_train_batch_size=2,
    learning_rate=1e-3,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    use_cpu=not torch.cuda.is_available(),
    remove_unused_columns=False,
)
Trainer(model, args, collate, train_dataset=rows).train()
