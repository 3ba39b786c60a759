"""What each rank of an MPI job does in the tests: `mpiexec -n 3 python ... sums lanes`.

A rank prints a line of JSON for each case: the case, its rank, what it has seen.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tfdp.communication.cluster import mpi_start
from tfdp.communication.transport import mpi_communicator, mpi_messages
from tfdp.communication.transport.communicator import PeerLost, TransportError
from tfdp.communication.transport.mpi_communicator import MpiCommunicator

SIZES = (0, 1, 7, 3000, 200_001)
DTYPES = ("float32", "float64", "int32", "int64", "float16", "bfloat16")
TIMEOUT_SECONDS = 20.0


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def values(rank: int, size: int, name: str) -> np.ndarray:
    numbers = np.random.default_rng([rank, size]).normal(size=size) * 100
    return numbers.astype(dtype_of(name))


def expected_sum(num_workers: int, size: int, name: str) -> np.ndarray:
    """The sum in the order of the members; of halves in float32, rounded once."""
    wide = "float32" if name.endswith("16") else name
    total = values(0, size, name).astype(wide)
    for rank in range(1, num_workers):
        total = total + values(rank, size, name).astype(wide)
    return total.astype(dtype_of(name))


def uneven(size: int, num_members: int) -> list[int]:
    """Bounds of parts of which the first is empty and the last the largest."""
    inner = [size * i // (2 * num_members) for i in range(num_members)]
    return [*inner, size] if num_members > 1 else [0, size]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


def check_sums(comm: MpiCommunicator, rank: int, size: int) -> list[str]:
    wrong, tag = [], 1
    for name in DTYPES:
        for length in SIZES:
            expected, own = expected_sum(size, length, name), values(rank, length, name)
            comm.all_reduce(array := own.copy(), tag := tag + 1)
            if not same(array, expected):
                wrong.append(f"all_reduce {name} {length}")
            bounds = uneven(length, size)
            comm.reduce_scatter(array := own.copy(), bounds, tag := tag + 1)
            part = slice(bounds[rank], bounds[rank + 1])
            if not same(array[part], expected[part]):
                wrong.append(f"reduce_scatter {name} {length}")
            comm.all_gather(array, bounds, tag := tag + 1)
            if not same(array, expected):
                wrong.append(f"all_gather {name} {length}")
    return wrong


def check_moves(comm: MpiCommunicator, rank: int, size: int) -> list[str]:
    wrong, tag = [], 1_000_000_007 << 32
    for length in SIZES:
        for source in range(size):
            array = values(rank, length, "float32")
            comm.broadcast(array, source, tag := tag + 1)
            if not same(array, values(source, length, "float32")):
                wrong.append(f"broadcast {length} from {source}")
        # Member i sends i + j + 1 pieces to member j.
        sent = [
            np.full((rank + to + 1) * length, rank * 10 + to, np.uint8)
            for to in range(size)
        ]
        received = [np.empty((rank + of + 1) * length, np.uint8) for of in range(size)]
        comm.all_to_all(sent, received, tag := tag + 1)
        for of, array in enumerate(received):
            if (array != of * 10 + rank).any():
                wrong.append(f"all_to_all {length} from {of}")
        comm.barrier(tag := tag + 1)
    return wrong


def sums(rank: int, size: int) -> Any:
    comm = MpiCommunicator(range(size), "sums")
    wrong = check_sums(comm, rank, size) + check_moves(comm, rank, size)
    # In several messages, as what is longer than MPI can count.
    mpi_messages._MAX_BYTES = 10_001
    wrong += check_moves(comm, rank, size)
    comm.close()
    return wrong


def lanes(rank: int, size: int) -> Any:
    """Groups and lanes at the same time, each by a thread of its own."""
    wrong: list[str] = []

    def work(members: tuple[int, ...], lane: str) -> None:
        comm = MpiCommunicator(members, lane)
        for tag in range(30):
            array = np.full(20_000 if tag % 2 else 3, float(rank))
            comm.all_reduce(array, tag)
            if (array != sum(members)).any():
                wrong.append(f"{members} {lane} {tag}")
        comm.close()

    groups = [tuple(range(size)), tuple(reversed(range(size)))]
    groups += [tuple(range(rank % 2, size, 2))]
    names = [(group, f"lane {i}") for group in groups for i in range(2)]
    # Not in one order on all: nothing but the name says which is which.
    names = names[rank:] + names[:rank]
    threads = [threading.Thread(target=work, args=each) for each in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def one_order(rank: int, size: int) -> Any:
    """Lanes that are made in one order by all, and used at the same time."""
    wrong: list[str] = []
    comms = [MpiCommunicator(range(size), f"ordered {i}") for i in range(3)]

    def work(comm: MpiCommunicator) -> None:
        for tag in range(30):
            comm.all_reduce(array := np.full(20_000, 1.0), tag)
            if (array != size).any():
                wrong.append(f"{tag}")
        comm.close()

    threads = [threading.Thread(target=work, args=[comm]) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def error_of(call: Callable[[], Any]) -> list[Any]:
    """Name and text of the error, and the seconds until it came."""
    begin = time.monotonic()
    try:
        call()
    except (PeerLost, TransportError, ValueError, TimeoutError) as error:
        return [type(error).__name__, str(error), time.monotonic() - begin]
    return ["", "", time.monotonic() - begin]


def closed_here(rank: int, size: int) -> Any:
    """Rank 0 waits for the others, which do not come, until it is closed."""
    comm = MpiCommunicator(range(size), "closed")
    after = MpiCommunicator(range(size), "after")
    if rank == 0:
        threading.Timer(0.5, comm.close, ["the step was cancelled"]).start()
        answer = error_of(lambda: comm.all_reduce(np.ones(100_000), 1))
        again = error_of(lambda: comm.barrier(2))
        after.barrier(1)
        return [*answer, again[1]]
    after.barrier(1)
    return error_of(lambda: comm.all_reduce(np.ones(100_000), 1))


def closed_there(rank: int, size: int) -> Any:
    """All but the last wait, and it closes with a reason."""
    comm = MpiCommunicator(range(size), "closed")
    if rank < size - 1:
        return error_of(lambda: comm.all_reduce(np.ones(1_000_000), 1))
    time.sleep(0.5)
    comm.close("its disk is full")
    comm.close("no matter")
    return None


def leaves_early(rank: int, size: int) -> Any:
    """Who is through may close at once; what it sent still arrives."""
    wrong = []
    for turn in range(20):
        comm = MpiCommunicator(range(size), f"turn {turn}")
        comm.all_reduce(array := np.full(50_000, 1.0), 1)
        comm.close()
        if (array != size).any():
            wrong.append(turn)
    return wrong


def other_tags(rank: int, size: int) -> Any:
    comm = MpiCommunicator(range(size), "tags")
    return error_of(lambda: comm.all_reduce(np.ones(10_000), 5 + (rank == 0)))


def other_sizes(rank: int, size: int) -> Any:
    comm = MpiCommunicator(range(size), "sizes")
    return error_of(lambda: comm.all_reduce(np.ones(10_000 + rank * 1000), 5))


def other_dtypes(rank: int, size: int) -> Any:
    comm = MpiCommunicator(range(size), "dtypes")
    array = np.ones(10_000, np.int32 if rank else np.float32)
    return error_of(lambda: comm.all_reduce(array, 5))


def other_calls(rank: int, size: int) -> Any:
    comm = MpiCommunicator(range(size), "calls")
    if rank:
        return error_of(lambda: comm.all_reduce(np.ones(10_000), 5))
    return error_of(lambda: comm.broadcast(np.ones(10_000), 0, 5))


def waits(rank: int, size: int) -> Any:
    """Seconds of a core that a second of waiting takes."""
    comm = MpiCommunicator(range(size), "waits")
    comm.barrier(1)
    if rank:
        time.sleep(1.0)
    begin = time.process_time()
    comm.all_reduce(np.ones(1000), 2)
    return time.process_time() - begin


def members_only(rank: int, size: int) -> Any:
    return error_of(lambda: MpiCommunicator([1 - rank], "others"))


def same_worker(rank: int, size: int) -> Any:
    return error_of(
        lambda: mpi_communicator.start_and_check_job(size, 0, TIMEOUT_SECONDS)
    )


def too_few(rank: int, size: int) -> Any:
    return error_of(lambda: mpi_communicator.start_and_check_job(size + 1, rank))


def renumbered(rank: int, size: int) -> Any:
    """Workers numbered the other way round than MPI's ranks."""
    own = size - 1 - rank
    mpi_communicator.start_and_check_job(size, own, TIMEOUT_SECONDS)
    comm = MpiCommunicator(range(size), "renumbered")
    bounds = list(range(size + 1))
    array = np.full(size, own, np.int32)
    comm.all_gather(array, bounds, 1)
    return array.tolist()


def slow_end(rank: int, size: int) -> Any:
    """The first rank ends at once, the others a second later."""
    comm = MpiCommunicator(range(size), "end")
    comm.barrier(1)
    if rank:
        time.sleep(1.0)
    return "came to the end"


def fails(rank: int, size: int) -> Any:
    """The last rank raises, while the others wait for ever."""
    comm = MpiCommunicator(range(size), "fails")
    comm.barrier(1)
    if rank == size - 1:
        raise RuntimeError("this rank fails")
    comm.barrier(2)


def stopped(rank: int, size: int) -> Any:
    """The last rank stands still, and who watches over the others closes."""
    comm = MpiCommunicator(range(size), "stopped")
    comm.barrier(1)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Timer(0.5, comm.close, ["worker 1 stands still"]).start()
    comm.all_reduce(np.ones(1_000_000), 2)


def main() -> None:
    names = sys.argv[1:]
    if names[0] == "serialized":
        mpi_start.import_mpi().Init_thread(mpi_start.import_mpi().THREAD_SERIALIZED)
        del names[0]
    job = mpi_start.start_job(TIMEOUT_SECONDS)
    if names[0] != "renumbered":
        mpi_communicator.start_and_check_job(job.size, job.rank, TIMEOUT_SECONDS)
    for name in names:
        seen = globals()[name](job.rank, job.size)
        line = json.dumps({"case": name, "rank": job.rank, "seen": seen})
        os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
