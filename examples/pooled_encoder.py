"""An encoder with mean pooling: the two halves of a document shall have near embeddings, those of others not.

torchrun --nproc-per-node 2 examples/pooled_encoder.py

Tokens see their whole document (mask="full"), and `lw.document_mean` gives every rank the embeddings of all documents,
so each rank has as many negatives as one process would have. One rank and two print the same losses.
"""

import argparse
import sysconfig
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import longweave as lw

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--longest", type=int, default=512, help="bytes of half a document")
options = parser.parse_args()


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm, self.qkv, self.out = heads, nn.RMSNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, pack: lw.Pack) -> Tensor:  # (tokens, dim)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        return x + self.out(lw.attention(q, k, v, pack).flatten(1))


dist.init_process_group("gloo")
files, n = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), options.longest
texts = [torch.tensor(list(file.read_bytes()[: 2 * n])) for file in files if file.stat().st_size > n]
torch.manual_seed(0)
embed, layers = nn.Embedding(256, 64), nn.ModuleList(Layer(64) for _ in range(2))
model = nn.ModuleList([embed, layers])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(options.steps):
    first = 8 * step % (len(texts) - 7)
    documents = [half for text in texts[first : first + 8] for half in (text[:n], text[n:])]
    pack = lw.Pack([0, *accumulate(map(len, documents))], mask="full")
    x = embed(pack.shard(torch.cat(documents)))
    for layer in layers:
        x = layer(x, pack)
    vectors = F.normalize(lw.document_mean(x, pack), dim=-1)  # (documents, 64) on every rank
    scores = vectors[::2] @ vectors[1::2].T / 0.1
    loss = F.cross_entropy(scores, torch.arange(len(scores)))
    (loss / pack.world_size).backward()  # document_mean brings every rank's loss to all tokens: each is a share
    lw.reduce_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.6f}")
dist.destroy_process_group()
