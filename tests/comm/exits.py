"""A short run that ends as scripts do: some destroy the group, some forget to, some die with an error."""

import os
import sys

import torch
import torch.distributed as dist

import longweave as lw

rank, world, store, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
pack = lw.Pack([0, 7, 24], layout="zigzag")
x = torch.randn(pack.tokens, 2, 8, requires_grad=True)
g = torch.zeros(pack.tokens, 2)
kept = [
    lw.attention(x, x, x, pack),
    lw.gated_delta_rule(x, x, x, g, g, pack),
    lw.causal_conv1d(x.flatten(1), torch.ones(16, 3), None, pack),
    lw.gather_recompute(torch.relu, x, pack),
    pack.unshard(x),
]
kept[0].sum().backward()  # the other graphs stay, and with them what they hold
if how == "destroys":
    dist.destroy_process_group()
print("done", flush=True)
