"""The link between learner and coordinator: whole values or the end of the stream, never a part and never a hang."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from async_rl.coordinator import calls as c
from async_rl.coordinator import link as module
from async_rl.coordinator.link import Link
from async_rl.coordinator.resumed import Resumed
from async_rl.frames import ProtocolError, encode_value


def pair() -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    return Link(ours, c.FromProcess), Link(theirs, c.FromLearner)


def test_values_arrive_whole_and_in_order_whatever_their_size() -> None:
    learner, process = pair()
    blocks = [np.arange(size, dtype=np.uint8) for size in (0, 1, 5_000_000, 17, 70_000)]
    answers = [
        c.Answer(number=0, frames=tuple(blocks)),
        *(c.Answer(number=i + 1, frames=(b,)) for i, b in enumerate(blocks)),
    ]

    def send() -> None:
        try:
            for answer in answers:
                process.send(answer)
        finally:
            process.close()

    sender = threading.Thread(target=send)
    sender.start()
    for sent in answers:
        answer = learner.receive()
        assert answer.number == sent.number and len(answer.frames) == len(sent.frames)
        for got, block in zip(answer.frames, sent.frames, strict=True):
            np.testing.assert_array_equal(got, block)
    assert learner.receive() is None
    sender.join()


def test_the_end_of_the_other_side_is_the_end_of_the_stream() -> None:
    learner, process = pair()
    process.send(c.Note(text="last words"))
    process.close()
    assert learner.receive() == c.Note(text="last words")
    assert learner.receive() is None
    with pytest.raises(BrokenPipeError):
        learner.send(c.Ask(number=0, call=c.GetStatus()))


def test_a_value_that_is_cut_off_is_no_value() -> None:
    ours, theirs = socket.socketpair()
    block = encode_value(c.Note(text="never whole"))
    theirs.sendall(len(block).to_bytes(8, "little") + block[:-1])
    theirs.close()
    assert Link(ours, c.FromProcess).receive() is None


def test_a_message_of_the_other_direction_is_refused() -> None:
    learner, process = pair()
    learner.send(c.Note(text="this is not the learner's to say"))
    with pytest.raises(ProtocolError, match="Note"):
        process.receive()


def test_a_side_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEND_S", 1.0)
    learner, _process = pair()
    large = Resumed(np.zeros(10_000_000, np.uint8))
    with pytest.raises(TimeoutError, match="has read nothing for 1 s"):
        learner.send(c.Setup(config=None, run_id="", log_level=0, resumed=large))  # type: ignore[arg-type]
    assert learner.receive() is None, "nothing that follows half a value could be read"
