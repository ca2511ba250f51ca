"""Broadcast between real processes over gloo: right bytes, and an end to every wait."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from async_rl.errors import InputError
from async_rl.weights import broadcast
from async_rl.weights.broadcast import Receiver, Sender
from async_rl.weights.errors import WeightsError
from tests.weights.peers import bytes_of, epoch_info, filled, join_all, peers

SOON_S = 150.0
"""Far above what anything here takes on a busy machine, far below the deadlines that a hung wait would reach."""
LONG_S = 300.0
PATIENT_S = 10.0
"""For the answers of receivers that are well, on a busy machine."""


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender("127.0.0.1", "gloo")
    yield sender
    sender.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender waits long for answers before it calls a rank silent."""
    monkeypatch.setattr(broadcast, "SETTLE_S", PATIENT_S)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_receiver_gets_the_same_bytes_again_and_again(sender: Sender, count: int) -> None:
    with peers(count) as members:
        join_all(sender, members, epoch=1)
        for version in (1, 2):  # the second one in the same group
            buffers, manifest = filled(version)
            for peer in members:
                peer.tell("receive", manifest, 120.0)
            sender.send(buffers, manifest, 120.0)
            for peer in members:
                checksum, received = peer.answer()
                assert checksum == manifest.checksum
                assert received == bytes_of(buffers)


@pytest.mark.slow
def test_killed_receiver_is_named_and_the_rest_goes_on_in_a_new_epoch(sender: Sender, patient: None) -> None:
    with peers(3) as members:
        join_all(sender, members, epoch=1)
        buffers, manifest = filled(1, scale=2_000)  # 100 MB: more than sockets hold
        members[1].signal(signal.SIGSTOP)  # so that the kill comes in the middle for sure
        for peer in members:
            peer.tell("receive", manifest, LONG_S)
        threading.Timer(0.5, members[1].signal, [signal.SIGKILL]).start()
        with pytest.raises(WeightsError, match=r"epoch 1: .*rank 2 of 4 did not answer") as failure:
            sender.send(buffers, manifest, LONG_S)
        assert failure.value.ranks == (2,)
        survivors = [members[0], members[2]]
        for peer in survivors:
            with pytest.raises(WeightsError, match="version 1"):
                peer.answer()
        join_all(sender, survivors, epoch=2)
        for peer in survivors:
            peer.tell("receive", manifest, LONG_S)
        sender.send(buffers, manifest, LONG_S)
        assert [peer.answer()[0] for peer in survivors] == [manifest.checksum] * 2


@pytest.mark.slow
def test_stopped_receiver_ends_the_send_at_its_deadline(sender: Sender, patient: None) -> None:
    with peers(2) as members:
        join_all(sender, members, epoch=1)
        buffers, manifest = filled(1, scale=2_000)
        members[0].signal(signal.SIGSTOP)
        members[1].tell("receive", manifest, LONG_S)
        started = time.monotonic()
        with pytest.raises(WeightsError, match=r"within 2 s.*rank 1 of 3 did not answer") as failure:
            sender.send(buffers, manifest, 2.0)
        assert failure.value.ranks == (1,)
        with pytest.raises(WeightsError, match="within 2 s"):
            members[1].answer()  # the healthy one need not wait for its own deadline of 60 s
        assert time.monotonic() - started < SOON_S
        join_all(sender, [members[1]], epoch=2)
        members[1].tell("receive", manifest, LONG_S)
        sender.send(buffers, manifest, LONG_S)
        assert members[1].answer()[1] == bytes_of(buffers)


@pytest.mark.slow
def test_receiver_that_never_joins_is_named_and_the_other_is_released(sender: Sender) -> None:
    with peers(1) as members:
        members[0].tell("join", epoch_info(sender, 5, rank=2, size=3, deadline_s=LONG_S))
        started = time.monotonic()
        with pytest.raises(WeightsError, match="epoch 5: rank 1 of 3 did not join: not within 2 s") as failure:
            sender.join(5, 3, 2.0)
        assert failure.value.ranks == (1,)
        with pytest.raises(WeightsError, match="rank 1 of 3 did not join"):
            members[0].answer()
        assert time.monotonic() - started < SOON_S
        assert sender.epoch is None


@pytest.mark.slow
def test_a_join_that_is_abandoned_ends_for_everybody(sender: Sender) -> None:
    with peers(1) as members:
        members[0].tell("join", epoch_info(sender, 5, rank=2, size=3, deadline_s=600.0))
        sender.abandon(4, "an earlier epoch is none of its business")
        threading.Timer(0.5, sender.abandon, [5, "g1 is gone: killed"]).start()
        with pytest.raises(WeightsError, match="epoch 5: rank 1 of 3 did not join: g1 is gone: killed"):
            sender.join(5, 3, 600.0)
        with pytest.raises(WeightsError, match="g1 is gone: killed"):
            members[0].answer()
        join_all(sender, members, epoch=6)


@pytest.mark.slow
def test_a_send_that_is_abandoned_ends_for_everybody(sender: Sender) -> None:
    with peers(2) as members:
        join_all(sender, members, epoch=1)
        buffers, manifest = filled(1, scale=2_000)
        members[0].signal(signal.SIGSTOP)
        members[1].tell("receive", manifest, 600.0)
        threading.Timer(0.5, sender.abandon, [1, "g0 is gone: silent"]).start()
        with pytest.raises(WeightsError, match=r"sending version 1.*g0 is gone: silent; rank 1 of 3 did not answer"):
            sender.send(buffers, manifest, 600.0)
        with pytest.raises(WeightsError, match="g0 is gone: silent"):
            members[1].answer()
        join_all(sender, [members[1]], epoch=2)
        members[1].tell("receive", manifest, 60.0)
        sender.send(buffers, manifest, 60.0)
        assert members[1].answer()[1] == bytes_of(buffers)


def test_recycled_memory_is_filled_again_and_only_then(sender: Sender) -> None:
    receiver, addresses = Receiver(), []
    joining = threading.Thread(target=receiver.join, args=(epoch_info(sender, 1, rank=1, size=2),))
    joining.start()
    sender.join(1, 2, 120.0)
    joining.join(120.0)
    for version in (1, 2, 3, 4):
        buffers, manifest = filled(version) if version < 4 else filled(version, bucket_bytes=1 << 17)
        sending = threading.Thread(target=sender.send, args=(buffers, manifest, 120.0))
        sending.start()
        received = receiver.receive(manifest, 120.0)
        sending.join(120.0)
        assert all(
            torch.equal(sent, got) for (_, sent), (_, got) in zip(buffers.tensors(), received.tensors(), strict=True)
        )
        addresses.append((received, [bucket.data_ptr() for bucket in received.buckets]))
        if version != 1:
            receiver.recycle(received)
    receiver.close()
    (first, one), (_, two), (_, three), (_, four) = addresses
    assert not set(one) & set(two), "kept weights were overwritten"
    assert three == two
    assert four != three, "another layout needs other buckets"
    sent, _ = filled(1)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(sent.tensors(), first.tensors(), strict=True))


@pytest.mark.slow
def test_disagreement_is_refused_before_any_byte_and_the_sender_learns_why(sender: Sender) -> None:
    with peers(1) as members:
        join_all(sender, members, epoch=1)
        buffers, manifest = filled(1)
        shapes = {info.name: info.shape for info in manifest.tensors} | {"norm": (34,)}
        members[0].call("expect", shapes)
        members[0].tell("receive", manifest, 120.0)
        with pytest.raises(WeightsError, match=r"rank 1 reports: version 1 is of another model: norm \(33,\) \(here"):
            sender.send(buffers, manifest, 120.0)
        with pytest.raises(WeightsError, match="another model"):
            members[0].answer()


@pytest.mark.slow
def test_other_bytes_than_announced_are_an_error_on_both_sides(sender: Sender) -> None:
    with peers(1) as members:
        join_all(sender, members, epoch=1)
        buffers, manifest = filled(1)
        lie = msgspec.structs.replace(manifest, checksum="0" * 32)
        members[0].tell("receive", lie, 120.0)
        with pytest.raises(WeightsError, match="other bytes than were announced") as failure:
            sender.send(buffers, lie, 120.0)
        assert failure.value.ranks == ()
        with pytest.raises(WeightsError, match=manifest.checksum):
            members[0].answer()


@pytest.mark.slow
def test_receiver_outlives_a_sender_that_is_gone() -> None:
    with peers(1) as members:
        first = Sender("127.0.0.1", "gloo")
        join_all(first, members, epoch=1)
        _, manifest = filled(1)
        first.close()
        with pytest.raises(WeightsError, match="epoch 1"):
            members[0].call("receive", manifest, 2.0)
        second = Sender("127.0.0.1", "gloo")
        join_all(second, members, epoch=1)
        buffers, manifest = filled(2)
        members[0].tell("receive", manifest, 120.0)
        second.send(buffers, manifest, 120.0)
        assert members[0].answer()[1] == bytes_of(buffers)
        second.close()
        second.close()


def test_a_group_without_receivers_has_nothing_to_send(sender: Sender) -> None:
    buffers, manifest = filled(1)
    sender.join(1, 1, 1.0)
    sender.send(buffers, manifest, 1.0)
    assert sender.epoch == 1


def test_send_and_receive_without_a_group_say_so(sender: Sender) -> None:
    buffers, manifest = filled(1)
    with pytest.raises(WeightsError, match="join an epoch first"):
        sender.send(buffers, manifest, 1.0)
    with pytest.raises(WeightsError, match="join an epoch first"):
        Receiver().receive(manifest, 1.0)


def test_receiver_refuses_the_senders_rank_and_an_absent_learner(sender: Sender) -> None:
    with pytest.raises(WeightsError, match=r"rank is 1\.\.1"):
        Receiver().join(epoch_info(sender, 1, rank=0, size=2))
    info = msgspec.structs.replace(epoch_info(sender, 1, rank=1, size=2, deadline_s=0.5), port=1)
    with pytest.raises(WeightsError, match="store does not answer"):
        Receiver().join(info)


def test_the_store_listens_on_its_own_address_only(sender: Sender) -> None:
    # 127.0.0.2 is loopback too, so a socket bound to every address would accept this.
    import socket

    with socket.create_connection(("127.0.0.1", sender.port), 5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", sender.port), 5)


def test_every_address_is_no_address_to_send_from() -> None:
    with pytest.raises(InputError, match=r"transport\.host='0\.0\.0\.0' is no address"):
        Sender("0.0.0.0", "gloo")


def test_backend_and_device_must_fit() -> None:
    with pytest.raises(InputError, match="moves cuda memory, this end has cpu"):
        Sender("127.0.0.1", "nccl")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs for NCCL")
def test_nccl_moves_the_same_bytes() -> None:
    sender, receiver = Sender("127.0.0.1", "nccl", "cuda:0"), Receiver("cuda:1")
    results: list[object] = []

    def receive() -> None:
        receiver.join(epoch_info(sender, 1, rank=1, size=2))
        results.append(receiver.receive(manifest, LONG_S))

    buffers, manifest = filled(1)
    thread = threading.Thread(target=receive)
    thread.start()
    sender.join(1, 2, LONG_S)
    sender.send(buffers, manifest, LONG_S)
    thread.join(LONG_S)
    for (_, sent), (_, got) in zip(buffers.tensors(), results[0].tensors(), strict=True):
        assert torch.equal(sent, got.cpu())


@pytest.mark.slow
def test_the_store_does_not_grow_with_transfers_and_epochs(sender: Sender) -> None:
    assert sender._store is not None
    sizes = []
    with peers(2) as members:
        for epoch in range(1, 6):
            join_all(sender, members, epoch=epoch)
            for version in range(1, 5):
                buffers, manifest = filled(version)
                for peer in members:
                    peer.tell("receive", manifest, 120.0)
                sender.send(buffers, manifest, 120.0)
                for peer in members:
                    peer.answer()
                sizes.append(len(sender._store.list_keys()))
    epochs = {key.partition("/")[0] for key in sender._store.list_keys()}
    assert epochs == {"epoch-4", "epoch-5"}
    assert sizes[3:4] * 2 == sizes[2:4], "a further transfer in an epoch leaves nothing behind"
    assert sizes[-1] == sizes[11], "a further epoch leaves nothing behind"
