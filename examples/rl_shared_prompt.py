"""Policy gradient with many answers to one prompt, which is computed once for all of them:

torchrun --nproc-per-node 2 examples/rl_shared_prompt.py

The prompt is a long document, answers are drawn on the spot, and the reward is the share of spaces in them: it rises.
One rank and two print the same rewards, as the whole step is the same.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import longweave as lw

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--longest", type=int, default=2048, help="bytes of the prompt")
options = parser.parse_args()

dist.init_process_group("gloo")
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, **heads))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
for step in range(options.steps):
    prompt = torch.tensor([byte % 128 for byte in files[step % len(files)].read_bytes()[: options.longest]])
    generator = torch.Generator().manual_seed(step)  # the same answers on every rank
    with torch.no_grad():  # 32 answers of 8 to 23 tokens: a sampler of your own, such as vLLM, stands here
        last = model(prompt[None, -64:]).logits[0, -1].softmax(0)
    answers = [torch.multinomial(last, 8 + i % 16, True, generator=generator) for i in range(32)]
    rewards = torch.stack([(answer == 32).float().mean() for answer in answers])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)

    # The prompt's last token opens every answer: it predicts the first token of each.
    branches = [torch.cat([prompt[-1:], answer]) for answer in answers]
    mask = lw.Mask.shared_prefix(len(prompt) - 1, [len(branch) for branch in branches])
    lw.parallelize(model)
    batch = lw.shard_batch(torch.cat([prompt[:-1], *branches]), mask=mask)
    logprobs = batch.logprobs(model(**batch.inputs).logits)  # of all tokens in their order, on every rank
    lengths = torch.tensor([len(branch) for branch in branches])
    weights = torch.cat([torch.zeros(len(prompt) - 1), advantages.repeat_interleave(lengths)])
    loss = -(weights * logprobs).sum() / sum(map(len, answers))  # a rank's gradient is its own tokens' part
    loss.backward()
    lw.reduce_gradients(model)
    lw.restore(model)  # to sample again
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        shared, alone = mask.total, sum(len(prompt) + len(answer) for answer in answers)
        print(f"step {step} loss {loss.item():.6f} reward {rewards.mean():.4f}, {shared} tokens in place of {alone}")
dist.destroy_process_group()
