"""A decoder of one's own, in plain PyTorch, with the sequence divided over ranks:

torchrun --nproc-per-node 2 examples/own_decoder.py

Only attention and the convolution know of ranks: they take the pack. One rank and two print the same losses.
"""

import argparse
import sysconfig
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import longweave as lw

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--longest", type=int, default=1024, help="bytes of a document")
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm, self.norm2 = heads, nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out, self.conv = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Parameter(torch.randn(dim, 4))
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, pack: lw.Pack) -> Tensor:  # (tokens, dim), this rank's tokens
        local = lw.causal_conv1d(self.norm(x), self.conv, None, pack, activation="silu")  # in the place of positions
        q, k, v = self.qkv(local).unflatten(-1, (3, self.heads, -1)).unbind(1)
        x = x + self.out(lw.attention(q, k, v, pack).flatten(1))
        return x + self.mlp(self.norm2(x))


dist.init_process_group("gloo")
texts = [file.read_bytes()[: options.longest] for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
documents = [torch.tensor(list(text)) for text in texts if len(text) > 1]
torch.manual_seed(0)  # the same weights on every rank
embed, blocks, head = nn.Embedding(256, 64), nn.ModuleList(Block(64) for _ in range(2)), nn.Linear(64, 256)
model = nn.ModuleList([embed, blocks, head])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(options.steps):
    chosen = [documents[(4 * step + i) % len(documents)] for i in range(4)]
    batch = lw.shard_batch(torch.cat(chosen), [0, *accumulate(map(len, chosen))])  # the same on every rank
    x = embed(batch.input_ids)
    for block in blocks:
        x = block(x, batch.pack)
    loss = batch.loss(head(x))  # this rank's part
    loss.backward()
    lw.reduce_gradients(model)  # the SUM is the whole gradient
    optimizer.step()
    optimizer.zero_grad()
    whole = float(batch.reduce_loss(loss))
    if dist.get_rank() == 0:
        print(f"step {step} loss {whole:.6f}")
dist.destroy_process_group()
