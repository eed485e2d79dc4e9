"""The code in docs/models.md runs as it is written, and its losses are those of one process."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import plain_transformers  # noqa: F401 - before models are made
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference import worst
from torch import Tensor, nn

import longweave as lw
from longweave.launch import Ranks

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
RECIPES = {
    name: (int(size), code)
    for name, size, code in re.findall(
        r"<!-- test: ([\w ]+), (\d) ranks -->\n```python\n(.*?)```", PAGE.read_text(), re.S
    )
}
TWO_ROWS = ("fsdp2", "gpus")  # data-parallel ones
CU = [0, 13, 14, 31, 40]


def config() -> object:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        attn_implementation="eager",
    )


def batches(replica: int = 0) -> list[tuple[Tensor, list[int]]]:
    g = torch.Generator().manual_seed(7 + replica)
    return [(torch.randint(0, 97, (CU[-1],), generator=g), CU) for _ in range(3)]


def prompts() -> list[tuple[Tensor, list[Tensor]]]:
    g = torch.Generator().manual_seed(11)
    draw = lambda n: torch.randint(0, 97, (n,), generator=g)  # noqa: E731
    return [(draw(9), [draw(5), draw(1), draw(12)]), (draw(2), [draw(3), draw(20)])]


@contextmanager
def plain_steps() -> Iterator[None]:
    """SGD in the place of AdamW, which would hide a gradient that is wrong by a factor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", lambda parameters, lr: torch.optim.SGD(parameters, lr=100 * lr))
        yield


def recipe(name: str) -> tuple[list[float], dict[str, Tensor]]:
    size, code = RECIPES[name]
    replica = dist.get_rank() // (size // 2) if name in TWO_ROWS else 0
    names = {"config": config(), "loader": batches(replica), "groups": prompts(), "__name__": "recipe"}
    with plain_steps():
        exec(compile(code, str(PAGE), "exec"), names)
    parameters = {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for n, p in names["model"].named_parameters()
    }
    return names["losses"], parameters


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def logprobs(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Of the tokens of each document but its first."""
    logits = [model(input_ids=ids[None, a:b], use_cache=False).logits[0, :-1] for a, b in pairwise(CU)]
    return [
        -F.cross_entropy(x, ids[a + 1 : b], reduction="none") for x, (a, b) in zip(logits, pairwise(CU), strict=True)
    ]


VALID = CU[-1] - len(CU) + 1


def train(losses: Iterable[Callable[[nn.Module], Tensor]], accumulate: bool = False) -> tuple[list[float], dict]:
    """One process: the losses, a step after each or one after all, and the parameters in the end."""
    model, optimizer = fresh()
    seen = []
    for make in losses:
        loss = make(model)
        loss.backward()
        seen.append(loss.item())
        if not accumulate:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()  # nothing to do without gradients
    return seen, {n: p.detach() for n, p in model.named_parameters()}


def compare(ranks: Ranks, name: str, want: tuple[list[float], dict[str, Tensor]]) -> None:
    losses, parameters = want
    start = dict(fresh()[0].named_parameters())
    for got, after in ranks.run(recipe, name, size=RECIPES[name][0]):
        assert got == pytest.approx(losses, rel=1e-5)
        for key, value in after.items():
            moved = parameters[key] - start[key]
            assert moved.abs().max() > 1e-4, key
            # Parameters of about 0.5 are rounded to 3e-8 in each of three steps of about 1e-2.
            assert worst(value - start[key], moved) < 1e-4, key


@pytest.mark.parametrize("name", ["hugging face", "fsdp2", "gpus", "ddp", "accumulation"])
def test_training_recipes(ranks: Ranks, name: str) -> None:
    replicas, accumulate = 2 if name in TWO_ROWS else 1, name == "accumulation"
    steps = list(zip(*(batches(r) for r in range(replicas)), strict=True))
    valid = VALID * (len(steps) if accumulate else replicas)

    def mean(step: tuple[tuple[Tensor, list[int]], ...], model: nn.Module) -> Tensor:
        return -sum(x.sum() for ids, _ in step for x in logprobs(model, ids)) / valid

    compare(ranks, name, train([partial(mean, step) for step in steps], accumulate))


def test_logprobs(ranks: Ranks) -> None:
    advantages = torch.linspace(-0.5, 1, CU[-1])
    ratios = []

    def full(model: nn.Module, ids: Tensor) -> Tensor:
        return torch.cat([torch.cat([x.new_zeros(1), x]) for x in logprobs(model, ids)])

    with torch.no_grad():
        before = [full(fresh()[0], ids) for ids, _ in batches()]

    def clipped(ids: Tensor, old: Tensor, model: nn.Module) -> Tensor:
        ratio = (full(model, ids) - old).exp()
        ratios.append(ratio.detach())
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / VALID

    want = train([partial(clipped, ids, old) for (ids, _), old in zip(batches(), before, strict=True)])
    assert (ratios[-1] - 1).abs().max() > 0.2  # the weights have moved, some as far as to be clipped
    compare(ranks, "logprobs", want)


def test_a_shared_prefix(ranks: Ranks) -> None:
    """In one process every answer is read after its own copy of the prompt."""

    def mean(prompt: Tensor, answers: list[Tensor], model: nn.Module) -> Tensor:
        total = 0
        for answer in answers:
            ids = torch.cat([prompt, answer])
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            total = total + F.cross_entropy(logits, answer, reduction="sum")
        return total / sum(map(len, answers))

    compare(ranks, "shared prefix", train([partial(mean, *group) for group in prompts()]))


def test_a_model_of_your_own(ranks: Ranks) -> None:
    """The same code in one process, with torch's attention on one document after another."""

    def attention(q: Tensor, k: Tensor, v: Tensor, pack: lw.Pack) -> Tensor:
        heads = [[x[a:b].transpose(0, 1) for x in (q, k, v)] for a, b in pairwise(CU)]
        return torch.cat([F.scaled_dot_product_attention(*one, is_causal=True).transpose(0, 1) for one in heads])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(lw), "attention", attention)
        want, parameters = recipe("own model")
    for losses, after in ranks.run(recipe, "own model", size=2):
        assert losses == pytest.approx(want, rel=1e-5)
        for key, value in after.items():
            assert worst(value, parameters[key]) < 1e-5, key


def test_every_recipe_is_tested() -> None:
    tested = ["accumulation", "ddp", "fsdp2", "gpus", "hugging face", "logprobs", "own model", "shared prefix"]
    assert sorted(RECIPES) == tested
    assert PAGE.read_text().count("```python") == len(RECIPES)
