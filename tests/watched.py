"""A command in a session of its own, and what is left of it: processes, shared memory, temporary files."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

LONGWEAVE = (sys.executable, "-m", "longweave.cli")
SHARED_MEMORY = Path("/dev/shm")


class Watched:
    """Its processes carry a mark in their environment, so that they are found wherever they went."""

    def __init__(self, command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.mark = f"LONGWEAVE_MARK={uuid.uuid4().hex}"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self._shared = self._shared_memory()
        name, _, value = self.mark.partition("=")
        settings = {name: value, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.output = folder / "output"
        with self.output.open("w") as file:
            # Shells start background jobs with SIGINT ignored; tests may run in one.
            self.process = subprocess.Popen(
                list(command),
                env={**os.environ, **settings, **(env or {})},
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def processes(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:  # ended, or not ours
                continue
        return found

    def ranks(self) -> list[int]:
        """Those that `launch.Ranks` has started."""
        return [
            process
            for process in self.processes()
            if process != self.process.pid and b"multiprocessing.spawn" in _command(process)
        ]

    def signal(self, number: signal.Signals, group: bool) -> None:
        """To the command alone, or to all of its group, as a terminal does."""
        os.killpg(self.process.pid, number) if group else self.process.send_signal(number)

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def text(self) -> str:
        return self.output.read_text()

    def assert_nothing_is_left(self, within: float) -> None:
        deadline = time.monotonic() + within
        while self.processes():
            assert time.monotonic() < deadline, f"still there: {[_command(p) for p in self.processes()]}"
            time.sleep(0.05)
        # A port is held by a process, and shared memory without one would stay.
        assert self._shared_memory() <= self._shared
        assert not [path for path in self.temporary.rglob("*") if "longweave" in path.name], "temporary files"

    def end(self) -> None:
        for process in self.processes():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    @staticmethod
    def _shared_memory() -> set[str]:
        """What PyTorch and gloo may leave there; other programs have names of their own."""
        return {path.name for name in ("*torch*", "*gloo*") for path in SHARED_MEMORY.glob(name)}


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""
