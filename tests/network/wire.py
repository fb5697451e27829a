"""The network between the nodes of a test: a program that passes on every frame, or does not, or does so late.

It runs in a network namespace of its own that holds one end of a cable to each node, and reads orders on its standard
input, a line of JSON each: ``{"from": 1, "to": 2, "lose": 0.2, "delay_s": 0.1}``. A cable that is cut loses everything.
Python instead of the kernel's netem: not every kernel has that, and the seed of what is lost is the test's.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import select
import socket
import sys
import time

ETH_P_ALL = 3
MAX_FRAME = 1 << 16
BROADCAST = b"\xff" * 6


def main() -> None:
    """Argument: a seed, then the name of each cable's end here; node N's hardware address ends in N + 1."""
    generator = random.Random(int(sys.argv[1]))
    cables = [_open(name) for name in sys.argv[2:]]
    lose: dict[tuple[int, int], float] = {}
    delay_s: dict[tuple[int, int], float] = {}
    late: list[tuple[float, int, int, bytes]] = []
    number = itertools.count()
    poll = select.poll()
    for descriptor in (0, *(cable.fileno() for cable in cables)):
        poll.register(descriptor, select.POLLIN)
    whose = {cable.fileno(): node for node, cable in enumerate(cables)}
    print("ready", flush=True)
    orders = b""
    while True:
        wait_ms = None if not late else max(0.0, 1000 * (late[0][0] - time.monotonic()))
        for descriptor, _ in poll.poll(wait_ms):
            if descriptor == 0:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, orders = (orders + data).split(b"\n")
                for line in lines:
                    order = json.loads(line)
                    pair = (order["from"], order["to"])
                    lose[pair], delay_s[pair] = order["lose"], order["delay_s"]
                    print("done", flush=True)
                continue
            source = whose[descriptor]
            for frame in _frames(cables[source]):
                to = range(len(cables)) if frame[:6] == BROADCAST else (frame[5] - 1,)
                for node in to:
                    pair = (source, node)
                    if node == source or not 0 <= node < len(cables) or generator.random() < lose.get(pair, 0.0):
                        continue
                    if delay_s.get(pair):
                        heapq.heappush(late, (time.monotonic() + delay_s[pair], next(number), node, frame))
                    else:
                        _send(cables[node], frame)
        while late and late[0][0] <= time.monotonic():
            _, _, node, frame = heapq.heappop(late)
            _send(cables[node], frame)


def _open(name: str) -> socket.socket:
    cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    cable.bind((name, ETH_P_ALL))
    cable.setblocking(False)
    return cable


def _frames(cable: socket.socket) -> list[bytes]:
    found = []
    while len(found) < 64:
        try:
            frame, address = cable.recvfrom(MAX_FRAME)
        except OSError:  # nothing more; or the cable is down
            break
        if address[2] != socket.PACKET_OUTGOING:
            found.append(frame)
    return found


def _send(cable: socket.socket, frame: bytes) -> None:
    try:
        cable.send(frame)
    except OSError:
        return  # its buffer is full, or it is down: lost, as networks do


if __name__ == "__main__":
    main()
