"""Fine-tune with TRL on two local ranks that share their documents:

torchrun --nproc-per-node 2 examples/trl_sft.py

The model is a small hybrid (GatedDeltaNet and softmax attention) made on the spot, the documents are the modules of
Python's standard library, byte by byte: a few long ones among many short ones. Take out the line with `lw.pool`, and
the losses stay the same: only the time of a step changes, which is then that of the rank with the longest documents.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3_5TextConfig
from trl import SFTConfig, SFTTrainer

import longweave as lw

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--longest", type=int, default=4096, help="bytes of a document")
options = parser.parse_args()

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
inner = Tokenizer(models.BPE({"<eos>": 0, **{c: i for i, c in enumerate(alphabet, 1)}}, []))
inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>")
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
texts = Dataset.from_list([{"text": file.read_text()[: options.longest]} for file in files if file.stat().st_size])

sizes = {"vocab_size": 257, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
config = Qwen3_5TextConfig(**sizes, **heads, **linear, linear_key_head_dim=32, linear_value_head_dim=32)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config)
lw.pool(model, head="pooled")  # this line is all
args = SFTConfig(
    "out/sft",
    max_steps=options.steps,
    per_device_train_batch_size=2,
    max_length=options.longest,
    learning_rate=1e-3,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
)
SFTTrainer(model, args, train_dataset=texts, processing_class=tokenizer).train()
