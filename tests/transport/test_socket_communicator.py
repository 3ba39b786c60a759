"""Collectives over sockets give the right sums, the same on all members."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

from tests.harness.tiers import full
from tests.transport.workers import Worker, each_wire, run
from tfdp.communication.transport import (
    Communicator,
    SocketCommunicator,
    TransportError,
    new_tag,
    steps_ahead,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SUMMED = ["float32", "float64", "int32", "int64", "float16", BFLOAT16]
# None, fewer than members, exchanged whole, one segment, several.
LENGTHS = [0, 1, 3, 200, 1501, 12_007]
SIZES = {"segment_bytes": 4096, "small_bytes": 2048}


def values(rank: int, length: int, dtype) -> np.ndarray:
    """Numbers of about 100, most of which float16 rounds when it adds them."""
    return ((np.arange(length) * 7919 + rank * 104_729) % 20_011 / 100).astype(dtype)


def uneven_bounds(length: int, size: int) -> list[int]:
    """The first part is empty, the last is the longest."""
    return [0, *(length * i * i // (size * size) for i in range(size - 1)), length]


def group(worker: Worker) -> Communicator:
    return worker.group(**SIZES)


def exact_sum(size: int, length: int, dtype) -> np.ndarray:
    parts = [values(rank, length, dtype) for rank in range(size)]
    if np.dtype(dtype).kind == "i":
        return np.sum(parts, axis=0, dtype=dtype)
    return np.sum([part.astype(np.float64) for part in parts], axis=0)


def is_near(found: np.ndarray, expected: np.ndarray) -> bool:
    if found.dtype.kind == "i":
        return np.array_equal(found, expected)
    half = 2 * float(ml_dtypes.finfo(found.dtype).eps)
    error = np.abs(found.astype(np.float64) - expected)
    return bool(np.all(error <= half * (np.abs(expected) + 400)))


def all_reduces(worker: Worker, dtypes, lengths) -> list[bytes]:
    communicator = group(worker)
    found = []
    for tag, (dtype, length) in enumerate((d, n) for d in dtypes for n in lengths):
        array = values(worker.rank, length, dtype)
        communicator.all_reduce(array, tag)
        assert is_near(array, exact_sum(worker.num_workers, length, dtype))
        again = values(worker.rank, length, dtype)
        communicator.all_reduce(again, -tag)
        assert again.tobytes() == array.tobytes()
        source, total = values(worker.rank, length, dtype), np.empty_like(array)
        communicator.all_reduce(source, tag, total)
        assert total.tobytes() == array.tobytes()
        assert source.tobytes() == values(worker.rank, length, dtype).tobytes()
        found.append(array.tobytes())
    return found


@each_wire
@pytest.mark.parametrize("size", [full(1), 2, 3, full(4), full(5)])
def test_all_members_get_the_same_sums(size, wire):
    found = run(size, all_reduces, SUMMED, LENGTHS, wire=wire)
    assert all(member == found[0] for member in found)


def halves(worker: Worker, dtype, length: int) -> np.ndarray:
    communicator = group(worker)
    array = values(worker.rank, length, dtype)
    communicator.all_reduce(array, 1)
    return array.view(np.uint16)


@pytest.mark.parametrize("wire", ["unix", full("memory")])
@pytest.mark.parametrize("length", [100, 12_007])
@pytest.mark.parametrize("dtype", ["float16", BFLOAT16], ids=["float16", "bfloat16"])
def test_half_precision_is_added_in_float32_and_rounded_once(dtype, length, wire):
    expected = values(0, length, dtype).astype(np.float32)
    for rank in (1, 2):
        expected += values(rank, length, dtype).astype(np.float32)
    for found in run(3, halves, dtype, length, wire=wire):
        np.testing.assert_array_equal(found, expected.astype(dtype).view(np.uint16))


def parts(worker: Worker, dtype) -> list[bytes]:
    size = worker.num_workers
    communicator = group(worker)
    found = []
    for length in LENGTHS:
        bounds = uneven_bounds(length, size)
        own = slice(bounds[worker.rank], bounds[worker.rank + 1])
        array = values(worker.rank, length, dtype)
        communicator.reduce_scatter(array, bounds, 1)
        assert is_near(array[own], exact_sum(size, length, dtype)[own])
        whole = np.zeros_like(array)
        whole[own] = array[own]
        communicator.all_gather(whole, bounds, 2)
        assert is_near(whole, exact_sum(size, length, dtype))
        found.append(whole.tobytes())
    return found


@pytest.mark.parametrize("wire", ["unix", "memory"])
@pytest.mark.parametrize("size", [full(2), 3, full(4)])
@pytest.mark.parametrize("dtype", ["float32", BFLOAT16], ids=["float32", "bfloat16"])
def test_uneven_and_empty_parts_are_scattered_and_gathered(dtype, size, wire):
    found = run(size, parts, dtype, wire=wire)
    assert all(member == found[0] for member in found)


def moves(worker: Worker) -> None:
    """All-to-all of lengths that differ, broadcasts from each member, a barrier."""
    size, rank = worker.num_workers, worker.rank
    communicator = group(worker)
    for scale in (1, 5_000):
        sent = [np.full(scale * (rank + to), rank, np.uint8) for to in range(size)]
        received = [np.zeros(scale * (rank + i), np.uint8) for i in range(size)]
        communicator.all_to_all(sent, received, 1)
        for index, array in enumerate(received):
            assert np.all(array == index)
    communicator.barrier(2)
    for source in range(size):
        for length in LENGTHS:
            array = values(rank, length, BFLOAT16)
            communicator.broadcast(array, source, 3)
            np.testing.assert_array_equal(
                array.view(np.uint16), values(source, length, BFLOAT16).view(np.uint16)
            )


@pytest.mark.parametrize("wire", ["unix", "memory"])
@pytest.mark.parametrize("size", [full(1), full(2), 3, full(5)])
def test_arrays_are_moved_between_all_members(size, wire):
    run(size, moves, wire=wire)


def two_lanes(worker: Worker) -> None:
    """Members in another order, and several groups over one mesh."""
    mesh = worker.mesh()
    all_members = SocketCommunicator(mesh, [2, 0, 1], "all")
    assert all_members.index == [1, 2, 0][worker.rank]
    if worker.rank < 2:
        pair = SocketCommunicator(mesh, [0, 1], "pair")
        array = np.ones(200_000, np.float32)
        pair.all_reduce(array, 1)
        assert np.all(array == 2)
    array = np.array([worker.rank] * 3, np.int32)
    all_members.all_gather(array, [0, 1, 2, 3], 1)
    assert array.tolist() == [2, 0, 1]


def test_a_worker_is_a_member_of_several_groups():
    run(3, two_lanes)


def disagree(worker: Worker, size: int, how: str) -> str:
    communicator = group(worker)
    worker.meet("group")  # else the first to disagree end the making of the last
    is_other = worker.rank == 1
    array = np.ones(size + (how == "size" and is_other), np.float32)
    if how == "dtype" and is_other:
        array = array.view(np.int32)
    bounds = [0, *([size] * worker.num_workers)]
    call = functools.partial(communicator.all_reduce, array, 1)
    if how == "kind" and is_other:
        call = functools.partial(communicator.all_gather, array, bounds, 1)
    if how == "tag" and is_other:
        call = functools.partial(communicator.all_reduce, array, 2)
    with pytest.raises(TransportError, match="run different collectives") as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("wire", ["unix", full("memory")])
@pytest.mark.parametrize("how", ["tag", "size", "dtype", "kind"])
@pytest.mark.parametrize("length", [10, 12_000])
@pytest.mark.parametrize("size", [full(2), 3])
def test_members_that_disagree_all_raise(size, length, how, wire):
    for message in run(size, disagree, length, how, deadline_seconds=5.0, wire=wire):
        assert "all-reduce" in message


def be_ahead(worker: Worker, length: int, generation: int) -> int | None:
    """Worker 1 has seen one error more than the others."""
    communicator = group(worker)
    worker.meet("group")
    own = generation + (worker.rank == 1)
    array = np.ones(length, np.float32)
    with pytest.raises(TransportError, match="error on some workers only") as caught:
        communicator.all_reduce(array, new_tag(own, "the same"))
    return steps_ahead(caught.value, own)


@pytest.mark.parametrize("wire", ["unix", "memory"])
@pytest.mark.parametrize("length", [10, 12_000])
@pytest.mark.parametrize("generation", [0, full(65_535)])
def test_all_members_learn_that_one_has_seen_an_error_more(generation, length, wire):
    found = run(3, be_ahead, length, generation, deadline_seconds=5.0, wire=wire)
    assert found == [1, 0, 1]


def wrong_bounds(worker: Worker) -> None:
    communicator = group(worker)
    with pytest.raises(TransportError, match="with other bounds"):
        communicator.all_gather(np.ones(10), [0, 4 + worker.rank, 10], 1)


def test_members_with_other_bounds_raise():
    run(2, wrong_bounds)
