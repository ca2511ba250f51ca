"""Layout, checksum and manifest: what both ends derive from one list of tensors."""

from __future__ import annotations

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from async_rl.protocol import TensorInfo
from async_rl.weights.base import (
    BucketLayout,
    Checksum,
    SendBuffers,
    check_manifest,
    host_bytes,
    manifest_digest,
    tensor_bytes,
)
from async_rl.weights.errors import WeightsError
from tests.weights.peers import filled

infos = st.lists(
    st.builds(
        TensorInfo,
        name=st.just("t"),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    max_size=30,
)


@given(infos, st.integers(1, 400))
def test_layout_holds_every_tensor_once_in_order_aligned_and_whole(
    tensors: list[TensorInfo], bucket_bytes: int
) -> None:
    layout = BucketLayout.of(tensors, bucket_bytes)
    ends = [(0, 0)]
    in_bucket = [0] * len(layout.sizes)
    for info, (bucket, start) in zip(tensors, layout.places, strict=True):
        end = start + tensor_bytes(info)
        assert (bucket, start) >= ends[-1]
        assert start % 16 == 0
        assert end <= layout.sizes[bucket]
        in_bucket[bucket] += 1
        ends.append((bucket, end))
    for size, count in zip(layout.sizes, in_bucket, strict=True):
        assert size <= bucket_bytes or count == 1


def test_bytes_are_those_of_the_tensors_and_checksum_ignores_padding() -> None:
    tensors = [("a", torch.arange(5).bfloat16()), ("b", torch.tensor([1.0, -2.0]))]
    buffers = SendBuffers(1 << 16)
    buffers.fill(tensors)
    plain = b"".join(bytes(host_bytes(tensor)) for _, tensor in tensors)
    manifest = buffers.manifest("run", 3)
    assert manifest.checksum == xxhash.xxh3_128(plain).hexdigest()
    assert manifest.num_bytes == len(plain) == 18
    buffers.buckets[0][10:16] = 77  # the padding between a and b
    again = Checksum()
    for _, view in buffers.tensors():
        again.update(view)
    assert again.hexdigest() == manifest.checksum


def test_refill_keeps_memory_and_layout_and_changes_the_checksum() -> None:
    buffers, manifest = filled(1)
    before = [bucket.data_ptr() for bucket in buffers.buckets]
    buffers.fill([(name, tensor.clone() * 2) for name, tensor in buffers.tensors()])
    after = buffers.manifest("run-a", 2)
    assert [bucket.data_ptr() for bucket in buffers.buckets] == before
    assert after.digest == manifest.digest
    assert after.checksum != manifest.checksum


def test_non_contiguous_tensors_are_sent_in_row_order() -> None:
    buffers = SendBuffers(1 << 16)
    tensor = torch.arange(6.0).view(2, 3).T
    buffers.fill([("t", tensor)])
    assert torch.equal(next(buffers.tensors())[1], tensor)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([("a", torch.zeros(2)), ("c", torch.zeros(3))], "at tensor 2: .*name='c'"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(3).bfloat16())], "at tensor 2: .*bfloat16"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(4))], r"at tensor 2: .*\(4,\)"),
        ([("a", torch.zeros(2))], "has 1 tensors, expected 2"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(3)), ("c", torch.zeros(1))], "no further tensor"),
        ([("a", torch.zeros(2).double()), ("b", torch.zeros(3))], "a: torch.float64 cannot be published"),
    ],
)
def test_a_publication_of_another_shape_is_refused(second: list, message: str) -> None:
    buffers = SendBuffers(1 << 16)
    buffers.fill([("a", torch.zeros(2)), ("b", torch.zeros(3))])
    with pytest.raises(ValueError, match=message):
        buffers.fill(second)


def test_a_fill_that_broke_off_leaves_no_trace() -> None:
    def broken():
        yield "a", torch.ones(100_000)
        raise RuntimeError("gather failed")

    buffers = SendBuffers(1 << 16)
    with pytest.raises(RuntimeError, match="gather failed"):
        buffers.fill(broken())
    with pytest.raises(AssertionError, match="before a complete fill"):
        buffers.manifest("run", 1)
    buffers.fill([("x", torch.arange(3.0)), ("y", torch.arange(20_000.0))])
    assert [(name, tensor.shape) for name, tensor in buffers.tensors()] == [("x", (3,)), ("y", (20_000,))]
    assert [bucket.numel() for bucket in buffers.buckets] == [12, 80_000]


def test_manifest_that_contradicts_itself_or_the_model_is_refused() -> None:
    _, manifest = filled(1)
    shapes = {info.name: info.shape for info in manifest.tensors}
    check_manifest(manifest, shapes)
    with pytest.raises(WeightsError, match="digest"):
        check_manifest(msgspec.structs.replace(manifest, tensors=manifest.tensors[::-1]))
    with pytest.raises(WeightsError, match="bytes announced"):
        check_manifest(msgspec.structs.replace(manifest, num_bytes=1))
    with pytest.raises(WeightsError, match=r"extra absent \(here \(3,\)\)"):
        check_manifest(manifest, {**shapes, "extra": (3,)})
    with pytest.raises(WeightsError, match=r"bias \(7,\) \(here absent\)"):
        check_manifest(manifest, {name: shape for name, shape in shapes.items() if name != "bias"})


def test_wire_types_are_a_closed_list() -> None:
    info = TensorInfo(name="w", dtype="int8", shape=(1,))
    _, manifest = filled(1)
    bad = msgspec.structs.replace(manifest, tensors=(info,), digest=manifest_digest([info]))
    with pytest.raises(WeightsError, match="'int8' is not one of"):
        check_manifest(bad)
