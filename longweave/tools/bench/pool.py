"""`lw.pool`: data-parallel ranks that share their rows, against ranks that keep them. One step, forward and backward.

    rank 0   a long row   ████████████████████████████      shared   █████████████████
    rank 1   short rows   ██████········ waits ·······               █████████████████

    home           lw.pool(model, layout="home")       every rank computes its own rows, nothing moves: the baseline
    pool           lw.pool(model)                      the decoder's work is balanced, the head's is not
    pool + head    lw.pool(model, head="pooled")       both are
    plain          the model as it is                  SDPA, one row after the other, no padding

All of them are under DDP and have the same weights. A step is run by every variant before the next one is, so a busy
machine slows all alike; its time is that of the slowest rank, with DDP's all-reduce. `home` has the kernels of `pool`:
its ratio shows what sharing gains, that of `plain` what kernels do besides. A hybrid has no plain variant, because
Hugging Face's form of its mixer on CPUs is several times slower than ours (`longweave bench linear`).

Tokens, pairs and bytes are those of the packs that really ran. Work counts FLOPs as `lw.pool` does, and the head's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import longweave as lw
from longweave.comm.exchange import resolve
from longweave.launch import Ranks
from longweave.models.pooled_decoder import POOLING
from longweave.models.running import current
from longweave.plan.cost import areas
from longweave.plan.document_work import DecoderWork
from longweave.tools.bench import peak_bytes
from longweave.tools.train.workload import build_model

HOME, POOL, POOL_HEAD, PLAIN = "home", "pool", "pool + head", "plain"
POOLED: dict[str, dict[str, Any]] = {
    HOME: {"layout": "home"},
    POOL: {},
    POOL_HEAD: {"head": "pooled"},
}
FAMILIES = {"dense": "llama", "hybrid": "qwen3_5"}

SIGMA, MEDIAN, SHORTEST = 1.5, 400, 16  # of the lengths, in tokens
WARM_UP = 2  # steps on short rows: the first pack of a group is compared, DDP sorts its buckets
LEAST_SHARE = 0.85  # the bar: of the gain that is allowed
LEAST_SPEED = 0.95  # the bar where there is nothing to gain: over the speed of home
QUIET = 0.93  # of a core for the slowest rank at home: with less, the machine is busy otherwise

Lengths = list[list[int]]  # of one step: the rows of every rank


@dataclass(frozen=True)
class PoolWorkload:
    """What is trained, by how many ranks, on how many rows a step of how many tokens."""

    family: str  # of FAMILIES
    ranks: int = 2
    rows: int = 2
    steps: int = 8
    longest: int = 8192
    seed: int = 0
    rounds: int = 2  # of each step; the best counts
    equal: bool = False  # every rank has rows of the same lengths
    hidden: int = 256
    layers: int = 4
    vocabulary: int = 1024

    def draw(self) -> list[Lengths]:
        """Log-normal lengths; those beyond `longest` are cut.

        They are the quantiles of the distribution in random order: few steps have its tail, too.
        """
        count = self.steps * self.ranks * self.rows
        normal = statistics.NormalDist(np.log(MEDIAN), SIGMA)
        quantiles = np.exp([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
        drawn = np.random.default_rng(self.seed).permutation(quantiles)
        lengths = np.clip(drawn.astype(np.int64), SHORTEST, self.longest).reshape(self.steps, self.ranks, self.rows)
        if self.equal:
            lengths = np.broadcast_to(lengths[:, :1], lengths.shape)
        found: list[Lengths] = lengths.tolist()
        return found

    def model(self) -> Any:
        torch.manual_seed(0)
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": self.hidden // 8}
        return build_model(FAMILIES[self.family], self.hidden, self.layers, vocab_size=self.vocabulary, **heads)

    @property
    def variants(self) -> list[str]:
        """What is compared on it."""
        return [*POOLED, *([PLAIN] if self.family == "dense" and not self.equal else [])]


def workloads(**sizes: int) -> list[PoolWorkload]:
    """Both models on heavy-tailed rows, then both on equal ones."""
    return [PoolWorkload(family, equal=equal, **sizes) for equal in (False, True) for family in FAMILIES]


# -- on a rank -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """The rows of one rank as one row: (1, tokens) each. A row's first token is no target."""

    borders: list[int]
    ids: Tensor
    positions: Tensor
    labels: Tensor
    items: int  # tokens of all ranks

    @classmethod
    def of(cls, lengths: Lengths, vocabulary: int) -> Packed:
        own = lengths[dist.get_rank()]
        borders = [0, *accumulate(own)]
        ids = torch.randint(vocabulary, (1, borders[-1]), generator=torch.Generator().manual_seed(dist.get_rank()))
        positions = torch.cat([torch.arange(length) for length in own])[None]
        return cls(borders, ids, positions, ids.masked_fill(positions == 0, -100), sum(map(sum, lengths)))


@dataclass(frozen=True)
class Measured:
    """One step of one variant on one rank; `seconds` are those of the slowest rank."""

    seconds: float
    busy: float  # seconds of CPU time: without waiting
    loss: float
    tokens: int
    work: float
    sent: int  # bytes, without DDP's


class Trainee:
    """One variant on this rank."""

    def __init__(self, workload: PoolWorkload, variant: str) -> None:
        model = workload.model()
        self.variant = variant
        self.head_flops = 2.0 * workload.hidden * workload.vocabulary
        self.pack: lw.Pack | None = None
        if variant != PLAIN:
            lw.pool(model, **POOLED[variant])
            model.get_input_embeddings().register_forward_hook(self._note)
        self.model = DistributedDataParallel(model)

    def _note(self, *_: object) -> None:
        found = current()
        self.pack = found if isinstance(found, lw.Pack) else None

    def step(self, batch: Packed) -> float:
        """Forward and backward; the loss of this rank's rows."""
        self.model.zero_grad(set_to_none=True)
        if self.variant != PLAIN:
            out = self.model(batch.ids, position_ids=batch.positions, labels=batch.labels, **self._rest(batch))
            out.loss.backward()
            return float(out.loss.detach())
        total = 0.0
        for a, b in pairwise(batch.borders):
            with self.model.no_sync() if b < batch.borders[-1] else nullcontext():
                out = self.model(batch.ids[:, a:b], labels=batch.labels[:, a:b], **self._rest(batch))
                out.loss.backward()
            total += float(out.loss.detach())
        return total

    def _rest(self, batch: Packed) -> dict[str, Any]:
        return {"num_items_in_batch": batch.items, "use_cache": False}

    def measure(self, batch: Packed, work: DecoderWork) -> Measured:
        ledger = resolve(None).ledger  # what DDP sends is not in it
        before = ledger.bytes_sent
        loss, seconds, busy = _timed(lambda: self.step(batch))
        sent = ledger.bytes_sent - before
        lengths = np.diff(batch.borders)
        at_home = tokens = int(lengths.sum())
        pairs = int((lengths * (lengths + 1) // 2).sum())
        if self.pack is not None:
            tokens, pairs = self.pack.tokens, int(areas(self.pack.mask, self.pack.layout)[dist.get_rank()])
        head = self.head_flops * (tokens if self.variant == POOL_HEAD else at_home)
        flops = work.flops_per_token * tokens + work.flops_per_pair * pairs + head
        return Measured(seconds, busy, loss, tokens, flops, sent)

    def peak(self, batch: Packed) -> int:
        """The most bytes that a step has alive at once, over those before it."""
        self.model.zero_grad(set_to_none=True)
        self.pack = None
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            self.step(batch)
        self.model.zero_grad(set_to_none=True)
        return peak_bytes(profile)


def _timed(call: Callable[[], float]) -> tuple[float, float, float]:
    """What it returns, the seconds of the slowest rank, and the CPU seconds of this one."""
    dist.barrier()
    begin, busy = time.perf_counter(), time.process_time()
    result = call()
    took, busy = torch.tensor(time.perf_counter() - begin), time.process_time() - busy
    dist.barrier()
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return result, float(took), busy


def on_rank(workload: PoolWorkload) -> tuple[dict[str, list[Measured]], dict[str, int]]:
    """On one of the ranks: every step of every variant, and each one's peak in the step with the most tokens on a rank.

    No peaks for equal rows: there is nothing to balance.
    """
    trainees = {variant: Trainee(workload, variant) for variant in workload.variants}
    work = _work(trainees[HOME].model)
    for _ in range(WARM_UP):
        for trainee in trainees.values():
            trainee.step(Packed.of([[64] * workload.rows] * workload.ranks, workload.vocabulary))
    found: dict[str, list[Measured]] = {variant: [] for variant in trainees}
    drawn = workload.draw()
    for number, lengths in enumerate(drawn):
        batch = Packed.of(lengths, workload.vocabulary)
        names = list(trainees)
        first = number % len(names)  # nobody is always the first
        rounds = [
            {name: trainees[name].measure(batch, work) for name in names[first:] + names[:first]}
            for _ in range(workload.rounds)
        ]
        for variant in names:
            found[variant].append(min((done[variant] for done in rounds), key=lambda step: step.seconds))
    if workload.equal:
        return found, {}
    largest = Packed.of(max(drawn, key=lambda lengths: max(map(sum, lengths))), workload.vocabulary)
    return found, {variant: trainee.peak(largest) for variant, trainee in trainees.items()}


def _work(model: nn.Module) -> DecoderWork:
    work: DecoderWork = next(vars(part)[POOLING].work for part in model.modules() if POOLING in vars(part))
    return work


# -- of all ranks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolTime:
    """One variant over all steps. Ratios above 1 are in its favour; `slowest` ones are the slowest rank over the mean,
    both summed over the steps.
    """

    workload: PoolWorkload
    variant: str
    seconds: float  # of all steps
    ratio: float  # home's seconds over these
    median_ratio: float  # of the steps
    slowest_work: float
    slowest_tokens: float
    slowest_busy: float  # by CPU time, measured
    busy: float  # seconds of CPU time, of each step's slowest rank
    busy_ratio: float  # home's over these: without waiting, whether for ranks, messages or other programs
    mb_sent: float  # in a step, by all ranks
    mb_peak: float  # of the worst rank; 0 if not measured
    allowed: float  # slowest_work of home: by how much sharing can be faster
    losses: tuple[float, ...]  # of every step
    step_seconds: tuple[float, ...] = ()
    loads: tuple[tuple[float, ...], ...] = ()  # of every step: work of each rank over the mean

    @property
    def core(self) -> float:
        """Of a core, what the slowest rank had: clearly less than 1 at home where other programs run."""
        return self.busy / self.seconds

    @property
    def share(self) -> float:
        """Of the gain that is allowed."""
        return (self.ratio - 1) / (self.allowed - 1) if self.allowed > 1 else float("nan")


def run(workload: PoolWorkload, ranks: Ranks) -> list[PoolTime]:
    """A line for each variant. Raises if they do not compute the same loss."""
    answers = ranks.run(on_rank, workload, size=workload.ranks)
    lines: list[PoolTime] = []
    home = [found[HOME] for found, _ in answers]
    allowed = _slowest([[step.work for step in steps] for steps in home])
    for variant in workload.variants:
        of_ranks = [found[variant] for found, _ in answers]
        seconds, at_home = ([step.seconds for step in steps[0]] for steps in (of_ranks, home))
        line = PoolTime(
            workload,
            variant,
            sum(seconds),
            sum(at_home) / sum(seconds),
            statistics.median(a / b for a, b in zip(at_home, seconds, strict=True)),
            _slowest([[step.work for step in steps] for steps in of_ranks]),
            _slowest([[step.tokens for step in steps] for steps in of_ranks]),
            _slowest([[step.busy for step in steps] for steps in of_ranks]),
            _most_busy(of_ranks),
            _most_busy(home) / _most_busy(of_ranks),
            sum(step.sent for steps in of_ranks for step in steps) / workload.steps / 1e6,
            max(peaks.get(variant, 0) for _, peaks in answers) / 1e6,
            allowed,
            tuple(np.sum([[step.loss for step in steps] for steps in of_ranks], axis=0).tolist()),
            tuple(seconds),
            _loads([[step.work for step in steps] for steps in of_ranks]),
        )
        if lines and not np.allclose(line.losses, lines[0].losses, rtol=1e-4):
            raise RuntimeError(f"{variant} has the losses {line.losses}, but {HOME} has {lines[0].losses}")
        lines.append(line)
    return lines


def _slowest(of_ranks: Sequence[Sequence[float]]) -> float:
    """(ranks, steps) → the largest over the mean."""
    values = np.array(of_ranks, dtype=np.float64)
    return float(values.max(0).sum() / values.mean(0).sum())


def _loads(of_ranks: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """(ranks, steps) → (steps, ranks), over the mean of the step."""
    values = np.array(of_ranks, dtype=np.float64).T
    return tuple(map(tuple, (values / values.mean(1, keepdims=True)).tolist()))


def _most_busy(of_ranks: Sequence[Sequence[Measured]]) -> float:
    return float(np.array([[step.busy for step in steps] for steps in of_ranks]).max(0).sum())


def verdict(lines: Sequence[PoolTime]) -> list[str]:
    """How the bar is met or missed, in words, by each way to pool."""
    by_name = {line.variant: line for line in lines}
    home = by_name[HOME]
    found = []
    for line in (by_name[POOL], by_name[POOL_HEAD]):
        name = f"{home.workload.family}, {line.variant}"
        if home.workload.equal:
            found.append(f"{name}, equal rows: {line.ratio:.2f} × as fast as home; {_met(line.ratio, LEAST_SPEED)}")
            continue
        memory = "falls" if line.mb_peak < home.mb_peak else "does not fall"
        found.append(
            f"{name}: {line.ratio:.2f} × as fast as home, {line.allowed:.2f} allowed: {line.share:.0%} of the gain; "
            f"{_met(line.share, LEAST_SHARE)}; peak memory {memory}, {home.mb_peak:.0f} → {line.mb_peak:.0f} MB"
        )
    if home.core < QUIET:
        found.append(
            f"other programs took cores (home's slowest rank had {home.core:.0%} of one): the ratios say little, and "
            "less the more ranks are busy at once; CPU times are nearer to the truth"
        )
    return found


def _met(value: float, bar: float) -> str:
    return f"the bar of {bar:.0%} is {'met' if value >= bar else 'missed'}"
