"""Fine-tune a Hugging Face model in a loop of one's own, with every sequence divided over ranks:

torchrun --nproc-per-node 2 examples/hf_loop.py

The model is a small hybrid (GatedDeltaNet and softmax attention) made on the spot, the documents are Python's own
sources, byte by byte: a long one among short ones in every batch. One rank and two print the same losses.
"""

import argparse
import sysconfig
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

import longweave as lw

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--longest", type=int, default=2048, help="bytes of the long document of a batch")
options = parser.parse_args()

dist.init_process_group("gloo")  # "nccl" on GPUs, with .to(device) for the model and the ids
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
dims = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
torch.manual_seed(0)  # the same weights on every rank; or from_pretrained
model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**sizes, **heads, **dims))
lw.parallelize(model)  # over all ranks; give a mesh or a group for fewer
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
texts = [file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
for step in range(options.steps):
    lengths = [options.longest, options.longest // 5, options.longest // 11, 1]  # any; nothing is padded
    chosen = [texts[(4 * step + i) % len(texts)] for i in range(4)]
    documents = [torch.tensor(list(text[:n])) for text, n in zip(chosen, lengths, strict=True)]
    input_ids, cu_seqlens = torch.cat(documents), [0, *accumulate(map(len, documents))]  # the same on every rank
    batch = lw.shard_batch(input_ids, cu_seqlens)  # this rank's tokens
    loss = batch.loss(model(**batch.inputs).logits)  # this rank's part of the mean over all tokens
    loss.backward()
    lw.reduce_gradients(model)  # the SUM over ranks is the whole gradient
    optimizer.step()
    optimizer.zero_grad()
    whole = float(batch.reduce_loss(loss))
    if dist.get_rank() == 0:
        print(f"step {step} loss {whole:.6f}, {len(batch.input_ids)} of {len(input_ids)} tokens on this rank")
dist.destroy_process_group()
