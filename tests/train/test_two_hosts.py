"""Two hosts: network namespaces with names of their own, one rank on each, torchrun between them.

In every run a plain link; with LONGWEAVE_FULL=1 one that is slow and loses packets, one that is cut for five seconds
and one that is cut for good. Needs root and `ip`; where namespaces cannot be made the tests say so.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from watched import Watched

from longweave.launch import Ranks
from longweave.tools.train.loop import TrainConfig
from longweave.tools.train.run import train_and_show

FULL = bool(os.environ.get("LONGWEAVE_FULL"))
only_full = pytest.mark.skipif(not FULL, reason="with LONGWEAVE_FULL=1: a minute each")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
NAMES = ("host-a", "host-b")
TINY = TrainConfig(hidden=32, layers=2, tokens=128)


def ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(args)}: {done.stderr.strip()}")


@dataclass
class Hosts:
    namespaces: tuple[str, str]
    folder: Path
    started: list[Watched]

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def plain_link(self) -> None:
        a, b = self.namespaces
        ip("link", "add", "lw0", "netns", a, "type", "veth", "peer", "name", "lw0", "netns", b)
        for namespace, address in zip(self.namespaces, ADDRESSES, strict=True):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "lw0")
            ip("-n", namespace, "link", "set", "lw0", "up")

    def slow_link(self, milliseconds: int, loss: float) -> None:
        (a, b), program = self.namespaces, Path(__file__).with_name("slow_link.py")
        if not Path("/dev/net/tun").exists():
            pytest.skip("no /dev/net/tun here: a slow link cannot be made")
        link = [sys.executable, str(program), a, ADDRESSES[0], b, ADDRESSES[1], str(milliseconds), str(loss)]
        self.started.append(watched := Watched(link, self._new_folder("link")))
        deadline = time.monotonic() + 30
        while "up" not in watched.text():
            assert time.monotonic() < deadline, watched.text()
            time.sleep(0.05)

    def set_link(self, state: str) -> None:
        ip("-n", self.namespaces[0], "link", "set", "lw0", state)

    def train(self, steps: int, wait: float) -> tuple[Watched, Watched]:
        job = ["-m", "longweave.cli", "train", "--hidden", "32", "--layers", "2", "--tokens", "128"]
        job += ["--steps", str(steps), "--wait", str(wait), "--out", str(self.out)]
        both = []
        for rank, (namespace, name, address) in enumerate(zip(self.namespaces, NAMES, ADDRESSES, strict=True)):
            launcher = [
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "2",
                "--nproc-per-node",
                "1",
                "--node-rank",
                str(rank),
            ]
            launcher += ["--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint", f"{ADDRESSES[0]}:29517"]
            launcher += ["--rdzv-conf", f"is_host={1 - rank}", "--local-addr", address]
            shell = ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh"]
            command = ["ip", "netns", "exec", namespace, *shell, sys.executable, *launcher, *job]
            settings = {"GLOO_SOCKET_IFNAME": "lw0", "TP_SOCKET_IFNAME": "lw0"}
            both.append(Watched(command, self._new_folder(name), settings))
            self.started.append(both[-1])
        return both[0], both[1]

    def steps(self) -> list[float]:
        path = self.out / "metrics.jsonl"
        return [json.loads(line)["loss"] for line in path.read_text().splitlines()] if path.exists() else []

    def until_step(self, number: int) -> None:
        deadline = time.monotonic() + 200
        while len(self.steps()) < number:
            assert time.monotonic() < deadline, [watched.text() for watched in self.started]
            time.sleep(0.02)

    def _new_folder(self, name: str) -> Path:
        (self.folder / name).mkdir()
        return self.folder / name


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {missing[0]} here: hosts cannot be made")
    names = (f"lwa{os.getpid()}", f"lwb{os.getpid()}")
    made = Hosts(names, tmp_path, [])
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"namespaces cannot be made here: {error}")
        yield made
    finally:
        for watched in made.started:
            watched.end()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def two_local_ranks(ranks: Ranks, steps: int) -> np.ndarray:
    config = TrainConfig(**{**vars(TINY), "steps": steps})
    return np.array([m.loss for m in ranks.run(train_and_show, config, False, size=2)[0]])


def finish(both: tuple[Watched, Watched]) -> None:
    for watched in both:
        assert watched.wait(300) == 0, [each.text() for each in both]
        watched.assert_nothing_is_left(5)


def test_they_train_as_two_local_ranks(hosts: Hosts, ranks: Ranks) -> None:
    hosts.plain_link()
    finish(hosts.train(3, 30))
    assert np.allclose(hosts.steps(), two_local_ranks(ranks, 3), rtol=1e-5, atol=0)


@only_full
@pytest.mark.parametrize(("milliseconds", "loss"), [(20, 0.0), (20, 0.01)])
def test_a_slow_link(hosts: Hosts, ranks: Ranks, milliseconds: int, loss: float) -> None:
    hosts.slow_link(milliseconds, loss)
    finish(hosts.train(3, 60))
    assert np.allclose(hosts.steps(), two_local_ranks(ranks, 3), rtol=1e-5, atol=0)


@only_full
def test_a_link_that_is_cut_for_five_seconds(hosts: Hosts, ranks: Ranks) -> None:
    hosts.plain_link()
    both = hosts.train(60, 60)
    hosts.until_step(3)
    hosts.set_link("down")
    time.sleep(0.5)
    done = len(hosts.steps())
    time.sleep(4.5)
    assert len(hosts.steps()) == done < 60, "nothing can go on without it"
    hosts.set_link("up")
    finish(both)
    assert np.allclose(hosts.steps(), two_local_ranks(ranks, 60), rtol=1e-4, atol=0)


@only_full
def test_a_link_that_is_cut_for_good(hosts: Hosts) -> None:
    wait = 10
    hosts.plain_link()
    both = hosts.train(100_000, wait)
    hosts.until_step(3)
    hosts.set_link("down")
    begin = time.monotonic()
    line = re.compile(r"^rank \d of 2 on (host-\w) waited in vain: .*(host-\w).* (is silent|cannot be reached) ", re.M)
    found: dict[str, str] = {}
    while len(found) < 2:
        assert time.monotonic() - begin < wait + 60, [watched.text() for watched in both]
        for name, watched in zip(NAMES, both, strict=True):
            for match in line.finditer(watched.text()):
                found[name] = match[2]
        time.sleep(0.2)
    assert found == {"host-a": "host-b", "host-b": "host-a"}
