"""One rank of 64 on fake CUDA: attention layers and whole models on a million packed tokens, forward and backward.

    python -m fake_cuda fake_runs '{"rank": 17, "attention": ["groupcast"], "models": ["qwen3_5"]}'

prints what each cost as JSON, see `fake_cuda.watch.Tally.summary`. Every run is made twice in the same process: on the
first pass a pack makes what its layers share; the second pass is what every further layer costs.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import plan_figures
import torch
import torch.distributed as dist
from fake_cuda.watch import Tally, Watch
from torch import Tensor, nn

import longweave as lw

WORLD = 64
TOKENS = 1 << 20
GIANTS = (131072, 98304, 65536, 65536)
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128

STRATEGIES: dict[str, dict[str, Any]] = {
    "groupcast": {"strategy": "groupcast"},
    "groupcast by flash": {"strategy": "groupcast", "backend": "aten_flash"},
    "ring": {"strategy": "ring"},
    "ulysses": {"strategy": "ulysses"},
    "ring × ulysses": {"strategy": "ring", "ulysses_size": 8},
    "allgather": {"strategy": "allgather"},
}

SMALL = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "max_position_embeddings": TOKENS,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 4, "experts_implementation": "grouped_mm"}

# name: transformers folder, config class, model class, what is special. Head dims are those of the real models.
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "qwen3_5": (
        "qwen3_5",
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            **EXPERTS,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 16,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 16,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
}


def documents() -> np.ndarray[Any, np.dtype[np.int64]]:
    """cu_seqlens of a million tokens: some giants, and lengths that are log-normal."""
    rng = np.random.default_rng(0)
    lengths = list(GIANTS)
    for length in np.minimum(rng.lognormal(8.0, 1.2, 4000), 60000).astype(int) + 1:
        lengths.append(min(int(length), TOKENS - sum(lengths)))
        if sum(lengths) == TOKENS:
            break
    rng.shuffle(lengths)
    return np.cumsum([0, *lengths])


# -- attention -----------------------------------------------------------------------------------------


def attention_layer(watch: Watch, pack: lw.Pack, backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """A layer on a pack that has served one before."""
    found = {}
    for turn in ("first", "later"):
        q, k, v, grad = (
            torch.empty(pack.tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda", requires_grad=leaf)
            for heads, leaf in ((HEADS, True), (KV_HEADS, True), (KV_HEADS, True), (HEADS, False))
        )
        tallies = Tally(), Tally()
        with watch.during(tallies[0]):
            out = lw.attention(q, k, v, pack, **{"backend": backend, **options})
        with watch.during(tallies[1]):
            out.backward(grad)
        same(out, q)
        for x in (q, k, v):
            same(x.grad, x)
        found[turn] = {"forward": tallies[0].summary(), "backward": tallies[1].summary()}
    return found


def same(x: Tensor | None, like: Tensor) -> None:
    assert x is not None
    assert (x.shape, x.dtype, x.device) == (like.shape, like.dtype, like.device), (x.shape, x.dtype, x.device)


def attention_run(watch: Watch, name: str, backend: str) -> dict[str, Any]:
    pack = lw.Pack(documents())
    found = attention_layer(watch, pack, backend, STRATEGIES[name])
    (plan,) = pack.plans
    found["plan"] = {
        "tokens": pack.tokens,
        "stages": plan.stages,
        "forward": plan_figures.forward(plan, pack.rank)._asdict(),
        "backward": plan_figures.backward(plan, pack.rank)._asdict(),
    }
    return found


# -- models --------------------------------------------------------------------------------------------


def build(name: str) -> nn.Module:
    folder, config_name, model_name, special = MODELS[name]
    package = importlib.import_module(f"transformers.models.{folder}")
    config = getattr(package, config_name)(**{**SMALL, **special})
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return getattr(package, model_name)(config).train()  # type: ignore[no-any-return]
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def by_layer(watch: Watch, layers: nn.ModuleList) -> Iterator[list[dict[str, Tally]]]:
    """Inside, each decoder layer's forward and backward is counted by itself."""
    tallies = [{"forward": Tally(), "backward": Tally()} for _ in layers]
    rest = watch.current
    handles = []
    for layer, own in zip(layers, tallies, strict=True):
        handles += [
            layer.register_forward_pre_hook(lambda *_, own=own: watch.switch(own["forward"])),
            layer.register_forward_hook(lambda *_: watch.switch(rest)),
            layer.register_full_backward_pre_hook(lambda *_, own=own: watch.switch(own["backward"])),
            layer.register_full_backward_hook(lambda *_: watch.switch(rest)),
        ]
    try:
        yield tallies
    finally:
        for handle in handles:
            handle.remove()


def model_run(watch: Watch, name: str) -> dict[str, Any]:
    model = lw.parallelize(build(name), dist.group.WORLD)
    ids = torch.arange(TOKENS) % SMALL["vocab_size"]
    batch = lw.shard_batch(ids, documents(), dist.group.WORLD)
    inputs = {key: x.to("cuda") if isinstance(x, Tensor) else x for key, x in batch.inputs.items()}
    found = {}
    for turn in ("first", "later"):
        with watch.during(Tally()) as rest, by_layer(watch, model.model.layers) as tallies:
            logits = model(**inputs).logits
            assert logits.shape == (1, batch.pack.tokens, SMALL["vocab_size"])
            assert (logits.dtype, logits.device.type) == (torch.bfloat16, "cuda")
            logits.backward(torch.empty_like(logits))
        for parameter in model.parameters():
            same(parameter.grad, parameter)
            parameter.grad = None
        found[turn] = {
            "layers": [{way: tally.summary() for way, tally in own.items()} for own in tallies],
            "rest": rest.summary(),
        }
    found["types"] = list(getattr(model.config, "layer_types", None) or ["full_attention"] * len(tallies))
    return found


# ------------------------------------------------------------------------------------------------------


def main(asked: dict[str, Any]) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=asked["rank"], world_size=WORLD, store=FakeStore())
    found: dict[str, Any] = {"attention": {}, "models": {}}
    # Agreement reads what other ranks sent, and there are none.
    with Watch() as watch, lw.unchecked():
        for name in asked.get("attention", ()):
            start = time.perf_counter()
            found["attention"][name] = attention_run(watch, name, asked.get("backend", "auto"))
            found["attention"][name]["seconds"] = time.perf_counter() - start
        for name in asked.get("models", ()):
            start = time.perf_counter()
            found["models"][name] = model_run(watch, name)
            found["models"][name]["seconds"] = time.perf_counter() - start
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
