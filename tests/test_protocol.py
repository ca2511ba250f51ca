"""The codec returns what was sent, refuses everything else with one kind of error, and checks what types cannot say."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl import protocol
from async_rl.buffer import PackedBatch, TrajectoryGroup
from async_rl.frames import split_frames, value_from_frames, value_to_frames
from async_rl.protocol import (
    Finished,
    FromCoordinator,
    FromGenerator,
    GeneratorStats,
    Heartbeat,
    Hello,
    Lease,
    LeaseKey,
    Leases,
    Problem,
    ProtocolError,
    SamplingParams,
    Trajectory,
    VersionSpan,
    check_travels,
    decode,
    decode_value,
    encode,
    encode_value,
)

KEY = LeaseKey(kind="train", ticket=7, member=3, attempt=0)
HELLO = Hello(
    protocol=1, name="g0", incarnation="a1", run_id=None, policy_version=None, slots=4, receivers=1,
    engine="vllm", host="localhost", pid=1,
)  # fmt: skip


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "status": "complete",
        "completion_ids": np.array([5, 6, 7, 2], np.int32),
        "completion_mask": np.array([1, 1, 0, 1], np.uint8),
        "behavior_logprobs": np.array([-0.5, -1.25, 0.0, -2.0], np.float32),
        "versions": (VersionSpan(3, 0, 3), VersionSpan(4, 3, 4)),
        "reward": 0.75,
        "text": "12 ✓",
    }
    return Trajectory(**(fields | changes))


def finished(**changes: Any) -> Finished:
    return Finished.of("run", {KEY: trajectory(**changes)})


def only(message: Finished) -> Trajectory:
    """The one trajectory of a message."""
    (found,) = message.trajectories.split()
    return found


def as_received(frames: list) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def test_finished_round_trip() -> None:
    sent = finished()
    got = decode(as_received(encode(sent)), FromGenerator)
    assert (got.run_id, got.keys, only(got).reward, only(got).text) == ("run", (KEY,), 0.75, "12 ✓")
    assert only(got).versions == trajectory().versions
    for name in ("completion_ids", "completion_mask", "behavior_logprobs"):
        np.testing.assert_array_equal(getattr(only(got), name), getattr(only(sent), name), strict=True)


def test_leases_round_trip_with_plain_data() -> None:
    problem = Problem(
        id="gsm/1", prompt="3+4=", prompt_ids=np.array([3, 10, 4], np.int32),
        answer={"value": 7, "forms": ["7", 7.0, None, True]}, metadata={"weight": np.float32(0.5)},
    )  # fmt: skip
    lease = Lease(
        kind="train", ticket=7, member=3, attempt=1, problem=problem,
        sampling=SamplingParams(max_tokens=8, temperature=0.7, seed=2**63 + 11, stop_ids=(2, 9)),
    )  # fmt: skip
    (got,) = decode(as_received(encode(Leases.of([lease]))), FromCoordinator).leases
    assert got.problem.answer == problem.answer
    assert got.problem.metadata == {"weight": 0.5}
    assert got.sampling == lease.sampling
    np.testing.assert_array_equal(got.problem.prompt_ids, [3, 10, 4])


def test_many_results_travel_as_three_arrays_and_come_apart_again() -> None:
    longer = trajectory(
        completion_ids=np.arange(6, dtype=np.int32),
        completion_mask=np.ones(6, np.uint8),
        behavior_logprobs=-np.ones(6, np.float32),
        versions=(VersionSpan(5, 0, 6),),
        reward=0.25,
        sample_s=1.5,
        reward_s=0.5,
    )
    failed = only(empty(status="failed", reward=None, error="no answer"))
    sent = {msgspec.structs.replace(KEY, member=m): t for m, t in enumerate([trajectory(), failed, longer])}
    frames = as_received(encode(Finished.of("run", sent)))
    assert len(frames) == 4
    got = dict(decode(frames, FromGenerator).results())
    assert list(got) == list(sent)
    for key, before in sent.items():
        for name in Trajectory.__struct_fields__:
            np.testing.assert_array_equal(getattr(got[key], name), getattr(before, name), strict=True)


def test_one_impossible_result_refuses_its_message() -> None:
    bad = {KEY: trajectory(), msgspec.structs.replace(KEY, member=4): trajectory(reward=None)}
    with pytest.raises(ProtocolError, match="reward None, expected a finite"):
        decode(encode(Finished.of("run", bad)), FromGenerator)
    with pytest.raises(ProtocolError, match="2 keys come with 1 trajectories"):
        decode(encode(msgspec.structs.replace(finished(), keys=(KEY, KEY))), FromGenerator)


def test_leases_of_a_ticket_carry_its_problem_once() -> None:
    problems = [Problem(id=str(n), prompt="", prompt_ids=np.arange(1, 4 + n, dtype=np.int32)) for n in range(2)]
    leases = [
        Lease(
            kind="train", ticket=ticket, member=member, attempt=1, problem=problems[ticket],
            sampling=SamplingParams(max_tokens=8, temperature=0.5, seed=10 * ticket + member, stop_ids=(2,)),
        )
        for ticket in range(2) for member in range(3)
    ]  # fmt: skip
    frames = as_received(encode(Leases.of(leases)))
    assert len(frames) == 3
    got = decode(frames, FromCoordinator).leases
    assert [(one.ticket, one.member, one.sampling) for one in got] == [(x.ticket, x.member, x.sampling) for x in leases]
    assert [one.problem.id for one in got] == ["0", "0", "0", "1", "1", "1"]


def test_a_member_that_is_sampled_otherwise_keeps_its_own_temperature() -> None:
    one = Problem(id="0", prompt="", prompt_ids=np.array([1], np.int32))
    leases = [
        Lease(
            kind="train", ticket=0, member=member, attempt=1, problem=one,
            sampling=SamplingParams(max_tokens=8, temperature=temperature, seed=member),
        )
        for member, temperature in enumerate([1.0, 1.0, 0.0])
    ]  # fmt: skip
    got = decode(as_received(encode(Leases.of(leases))), FromCoordinator).leases
    assert [lease.sampling.temperature for lease in got] == [1.0, 1.0, 0.0]


def test_a_batch_comes_apart_as_it_was_packed() -> None:
    problems = [Problem(id=str(n), prompt="", prompt_ids=np.array([1], np.int32)) for n in range(3)]
    groups = (
        TrajectoryGroup(4, problems[0], (trajectory(reward=0.0), trajectory(reward=1.0))),
        TrajectoryGroup(2, problems[1], (trajectory(reward=2.0),), trajectory(reward=3.0)),
        TrajectoryGroup(9, problems[2], (trajectory(reward=4.0),)),
    )
    got = decode_value(encode_value(PackedBatch.of(groups)), PackedBatch).groups()
    told = [(g.ticket, g.problem.id, [m.reward for m in g.members], g.baseline and g.baseline.reward) for g in got]
    assert told == [(4, "0", [0.0, 1.0], None), (2, "1", [2.0], 3.0), (9, "2", [4.0], None)]
    np.testing.assert_array_equal(got[2].members[0].completion_ids, trajectory().completion_ids, strict=True)


def test_arrays_are_views_and_read_only() -> None:
    frames = as_received(encode(finished()))
    ids = only(decode(frames, FromGenerator)).completion_ids
    assert np.shares_memory(ids, np.frombuffer(frames[1], np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1
    writable = [bytearray(frame) for frame in frames]
    assert not only(decode(writable, FromGenerator)).completion_ids.flags.writeable


def test_sending_does_not_copy_arrays() -> None:
    array = np.arange(1000, dtype=np.float32)
    assert np.shares_memory(np.frombuffer(value_to_frames(array)[1], np.uint8), array)


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(ProtocolError, match="Hello"):
        decode(encode(HELLO), FromCoordinator)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"completion_ids": np.array([5, 6, 7], np.int32)}, r"completion_mask has shape \[4\], expected \[3\]"),
        ({"completion_ids": np.array([5, 6, 7, 2], np.int64)}, "completion_ids is int64, expected int32"),
        ({"completion_ids": np.array([[5, 6], [7, 2]], np.int32)}, r"completion_ids has shape \[2, 2\]"),
        ({"completion_ids": np.array([5, -1, 7, 2], np.int32)}, "negative"),
        ({"completion_mask": np.array([1, 2, 0, 1], np.uint8)}, "0 and 1"),
        ({"completion_mask": np.ones(4, np.float32)}, "completion_mask is float32"),
        ({"behavior_logprobs": np.array([0, np.nan, 0, 0], np.float32)}, "not finite"),
        ({"behavior_logprobs": np.array([0, -np.inf, 0, 0], np.float32)}, "not finite"),
        ({"versions": ()}, "end at 0, the completion has 4"),
        ({"versions": (VersionSpan(3, 0, 3),)}, "end at 3, the completion has 4"),
        ({"versions": (VersionSpan(3, 0, 5),)}, "end at 5, the completion has 4"),
        ({"versions": (VersionSpan(3, 0, 1), VersionSpan(3, 2, 4))}, "starts at 2, the one before ends at 1"),
        ({"versions": (VersionSpan(3, 0, 3), VersionSpan(3, 2, 4))}, "starts at 2, the one before ends at 3"),
        ({"versions": (VersionSpan(3, 0, 4), VersionSpan(3, 4, 4))}, "4..4 is empty"),
        ({"versions": (VersionSpan(-1, 0, 4),)}, "negative"),
        ({"reward": None}, "reward None, expected a finite"),
        ({"reward": float("nan")}, "reward nan, expected a finite"),
        ({"reward": float("inf")}, "reward inf, expected a finite"),
        ({"status": "failed"}, "failed trajectory has reward 0.75"),
        ({"status": "lost"}, "Invalid enum value"),
        ({"sample_s": -1.0}, "sample_s is -1.0"),
    ],
)
def test_inconsistent_trajectories_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        decode(encode(finished(**changes)), FromGenerator)


def empty(**changes: Any) -> Finished:
    fields = {
        "completion_ids": np.zeros(0, np.int32),
        "completion_mask": np.zeros(0, np.uint8),
        "behavior_logprobs": np.zeros(0, np.float32),
        "versions": (),
    }
    return finished(**fields, **changes)


def test_only_a_failed_trajectory_may_be_empty() -> None:
    got = decode(encode(empty(status="failed", reward=None, error="no answer")), FromGenerator)
    assert only(got).completion_ids.shape == (0,)
    with pytest.raises(ProtocolError, match="has no tokens"):
        decode(encode(empty(status="truncated")), FromGenerator)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (msgspec.structs.replace(HELLO, name="a/b"), "name must be"),
        (msgspec.structs.replace(HELLO, name=""), "name must be"),
        (msgspec.structs.replace(HELLO, name="g\x1b[2J"), "name must be"),
        (msgspec.structs.replace(HELLO, incarnation="x" * 101), "incarnation must be"),
        (msgspec.structs.replace(HELLO, slots=-1), "slots is -1"),
        (msgspec.structs.replace(HELLO, policy_version=-1), "policy_version is -1"),
        (
            Heartbeat(accepting=True, holding=(), policy_version=0, stats=GeneratorStats(slot_s=float("nan"))),
            "stats.slot_s is nan",
        ),
    ],
)
def test_impossible_values_are_refused(message: Any, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        decode(encode(message), FromGenerator)


def header_with(frame: int = 1, dtype: str = "int32", shape: tuple[int, ...] = (2,)) -> bytes:
    reference = msgspec.msgpack.encode((frame, dtype, shape))
    return msgspec.msgpack.encode([msgspec.msgpack.Ext(1, reference)])


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "no frames"),
        ([header_with()], "frame 1 does not exist or is used twice"),
        ([header_with(frame=0)], "frame 0 does not exist"),
        ([header_with(frame=-1), bytes(8)], "frame -1 does not exist"),
        ([header_with(), bytes(8), b""], "frame 2 of 3 is not used"),
        ([header_with(), bytes(7)], "has 7 bytes, int32.* has 8"),
        ([header_with(dtype="object"), bytes(16)], "dtype 'object' is not one of"),
        ([header_with(dtype="V8"), bytes(16)], "dtype 'V8' is not one of"),
        ([header_with(shape=(-1, -2)), bytes(8)], "out of bounds"),
        ([header_with(shape=(0, 1 << 62)), b""], "out of bounds"),
        ([header_with(shape=(1,) * 9), bytes(4)], "out of bounds"),
        ([msgspec.msgpack.encode([msgspec.msgpack.Ext(2, b"")])], "unknown extension code 2"),
        ([header_with()[:-1], bytes(8)], "malformed"),
        ([b"\x91" * 100_000], "recursion"),
        ([b"\xdd\xff\xff\xff\xff"], "truncated"),
    ],
)
def test_damaged_frames_are_refused(frames: list[bytes], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        value_from_frames(frames)


def test_one_frame_cannot_serve_two_arrays() -> None:
    one = value_to_frames([np.zeros(2, np.int32)])
    twice = msgspec.msgpack.encode([msgspec.msgpack.Ext(1, msgspec.msgpack.encode((1, "int32", (2,))))] * 2)
    with pytest.raises(ProtocolError, match="used twice"):
        value_from_frames([twice, one[1]])


def test_limits_hold_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = encode(finished())
    monkeypatch.setattr(protocol, "MAX_FRAMES", 3)
    with pytest.raises(ProtocolError, match="4 frames exceed the limit of 3"):
        decode(frames, FromGenerator)
    with pytest.raises(ValueError, match="Finished has 4 frames, the limit is 3"):
        encode(finished())
    monkeypatch.setattr(protocol, "MAX_FRAMES", 4)
    monkeypatch.setattr(protocol, "MAX_HEADER_BYTES", 100)
    with pytest.raises(ProtocolError, match="exceeds the limit of 100"):
        decode(frames, FromGenerator)
    with pytest.raises(ValueError, match=r"Finished has a header of .* the limit is 100"):
        encode(finished())


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_problem_that_travels_fits_with_its_lease_into_a_message(beyond: int) -> None:
    limit, longest = 100_000, 2**62
    room = limit - protocol._LEASE_BYTES
    bare = Problem(id="p", prompt="", prompt_ids=np.arange(9, dtype=np.int32), metadata={"text": "x" * 70_000})
    used = sum(memoryview(frame).nbytes for frame in value_to_frames(bare))
    whole = msgspec.structs.replace(bare, metadata={"text": "x" * (70_000 + room - used + beyond)})
    wrong = check_travels(whole, limit)
    assert (wrong is not None) == bool(beyond) and (not beyond or f"room for {room}" in wrong)
    sampling = SamplingParams(max_tokens=longest, temperature=0.7, seed=2**31 - 1, stop_ids=(longest,) * 9)
    lease = Lease(kind="train", ticket=longest, member=longest, attempt=longest, problem=whole, sampling=sampling)
    assert sum(memoryview(frame).nbytes for frame in encode(Leases.of([lease]))) <= limit + beyond


def test_a_peer_cannot_write_control_characters_into_a_log() -> None:
    header = msgspec.msgpack.encode({"type": "Stop", "reason": "", "\x1b[2J\n": 1})
    with pytest.raises(ProtocolError) as caught:
        decode([header], FromCoordinator)
    assert str(caught.value).isprintable()


def test_what_cannot_be_encoded_is_named() -> None:
    with pytest.raises(TypeError, match="cannot encode a object"):
        value_to_frames({"answer": object()})
    with pytest.raises(TypeError, match="cannot encode an array of complex64"):
        value_to_frames(np.zeros(2, np.complex64))


# --- any values, any damage ---------------------------------------------------------------------

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(["int32", "int64", "uint8", "float32", "float64"])))
    if dtype.itemsize > 1:
        dtype = dtype.newbyteorder(draw(st.sampled_from("<>")))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    array = np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


@given(plain=PLAIN, items=st.lists(arrays(), max_size=4))
def test_values_survive_frames_and_blocks(plain: Any, items: list[np.ndarray]) -> None:
    frames = value_to_frames({"plain": plain, "arrays": items})
    for got in (value_from_frames(as_received(frames)), decode_value(encode_value({"plain": plain, "arrays": items}))):
        assert got["plain"] == plain
        for sent, array in zip(items, got["arrays"], strict=True):
            assert array.shape == sent.shape and array.dtype.name == sent.dtype.name and array.flags.aligned
            np.testing.assert_array_equal(array, sent)


def test_a_typed_value_comes_back_as_its_type() -> None:
    value = {"group": (trajectory(), trajectory(reward=0.25))}
    got = decode_value(encode_value(value), dict[str, tuple[Trajectory, ...]])
    assert [item.reward for item in got["group"]] == [0.75, 0.25]
    np.testing.assert_array_equal(got["group"][1].completion_ids, [5, 6, 7, 2])


MESSAGES = [finished(), HELLO, Heartbeat(accepting=True, holding=(KEY,), policy_version=3, stats=GeneratorStats())]


def decodes_or_refuses(frames: list[bytes]) -> None:
    for kind in (FromGenerator, FromCoordinator, Any):
        try:
            decode(frames, kind)
        except ProtocolError as error:
            assert "\n" not in str(error) and len(str(error)) < 500


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_random_frames_never_raise_anything_else(frames: list[bytes]) -> None:
    decodes_or_refuses(frames)


@settings(max_examples=500)
@given(data=st.data(), message=st.sampled_from(MESSAGES))
def test_damaged_messages_never_raise_anything_else(data: st.DataObject, message: Any) -> None:
    frames = [bytearray(frame) for frame in encode(message)]
    for _ in range(data.draw(st.integers(1, 4), label="faults")):
        frame = data.draw(st.sampled_from(frames), label="frame")
        fault = data.draw(st.sampled_from(["flip", "cut", "grow", "drop", "repeat"]), label="fault")
        position = data.draw(st.integers(0, max(len(frame) - 1, 0)), label="position")
        if fault == "flip" and frame:
            frame[position] ^= 1 << data.draw(st.integers(0, 7))
        elif fault == "cut":
            del frame[position:]
        elif fault == "grow":
            frame[position:position] = data.draw(st.binary(max_size=9))
        elif fault == "drop" and len(frames) > 1:
            frames = [other for other in frames if other is not frame]
        elif fault == "repeat":
            frames.append(bytearray(frame))
    decodes_or_refuses(as_received(frames))


@given(st.binary(max_size=80))
def test_damaged_blocks_never_raise_anything_else(block: bytes) -> None:
    with pytest.raises(ProtocolError):
        split_frames(block + b"\0")


@given(cut=st.integers(0, 10_000))
def test_truncated_blocks_are_refused(cut: int) -> None:
    block = encode_value(finished())
    with pytest.raises(ProtocolError):
        decode_value(block[: cut % len(block)], Finished)
