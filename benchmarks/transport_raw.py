"""The middle without a coordinator, for `benchmarks.transport`: receives the frames of groups and drops or passes them.

    python -m benchmarks.transport_raw COUNT_FILE [TARGET]

Prints its port and then receives until it is killed; COUNT_FILE holds the number of messages, 8 bytes little-endian.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import zmq

QUEUED = 64
"""Messages that one connection may hold in each direction."""


def serve(count_file: Path, target: str | None) -> None:
    """Receive, send on if there is a target, and count."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.rcvhwm = QUEUED
    push = None
    if target is not None:
        push = context.socket(zmq.PUSH)
        push.sndhwm = QUEUED
        push.connect(target)
    print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    with count_file.open("r+b") as file, mmap.mmap(file.fileno(), 8) as counter:
        number = 0
        while True:
            message = router.recv_multipart()
            if push is not None:
                push.send_multipart(message)
            number += 1
            counter[:8] = number.to_bytes(8, "little")


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
