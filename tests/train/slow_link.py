"""A link between two network namespaces that delays and loses packets: for kernels that have no netem.

    python slow_link.py NAMESPACE ADDRESS NAMESPACE ADDRESS MILLISECONDS LOSS

    namespace a  lw0 ◀──▶ this process: each packet waits, some are dropped ◀──▶ lw0  namespace b

Says "up" when both ends are there, and serves until it is ended.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
PACKET = 65536


def enter(namespace: Path) -> None:
    with namespace.open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def one_end(namespace: str, address: str) -> int:
    """A network interface whose packets this process reads and writes."""
    enter(Path("/var/run/netns") / namespace)
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", b"lw0", IFF_TUN | IFF_NO_PI))
    subprocess.run(["ip", "addr", "add", f"{address}/24", "dev", "lw0"], check=True)
    subprocess.run(["ip", "link", "set", "lw0", "up"], check=True)
    return end


def relay(ends: tuple[int, int], delay: float, loss: float) -> None:
    rng = random.Random(0)
    under_way: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        pause = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, (), (), pause)[0]:
            packet = os.read(end, PACKET)
            if rng.random() >= loss:
                count += 1
                other = ends[1] if end == ends[0] else ends[0]
                heapq.heappush(under_way, (time.monotonic() + delay, count, other, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, other, packet = heapq.heappop(under_way)
            os.write(other, packet)


if __name__ == "__main__":
    a, address_a, b, address_b, milliseconds, lost = sys.argv[1:]
    both = (one_end(a, address_a), one_end(b, address_b))
    print("up", flush=True)
    relay(both, float(milliseconds) / 1000, float(lost))
