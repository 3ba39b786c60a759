"""Agreement of many workers: all-gathers and heartbeats through the job's store."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tfdp.communication.cluster import Cluster, free_ports
from tfdp.communication.store import Membership, beat_seconds
from tools.bench.report import Arguments, Figure, Report

# Longest median time of an all-gather and of a barrier, which is an all-gather of empty
# texts, by the number of members, in milliseconds.
MAX_MILLISECONDS = {2: 20.0, 16: 50.0, 64: 100.0, 256: 250.0}
# Largest share of a processor that the heartbeats of all members take.
MAX_SHARE = 0.02
KINDS = {"all-gather of 40 characters": "x" * 40, "barrier": ""}
REPORT = "x" * 500
SECONDS = 60.0
BEATS = 5


def run(args: Arguments) -> None:
    """Measure members that are threads of this process."""
    report = Report(args, {"benchmark": "the job's store; members are threads"})
    for count, most in MAX_MILLISECONDS.items():
        with members_of(count) as members:
            for kind, text in KINDS.items():
                times = [
                    1000 * seconds_of_gather(members, f"{kind} {block}", text)
                    for block in range(args.blocks)
                ]
                name = f"{kind}, {count} members, ms"
                median, note = statistics.median(times), f"longest {max(times):.1f}"
                report.add(Figure(name, round(median, 1), at_most=most, note=note))
            name = f"heartbeats of {count} members, share of a processor"
            share = seconds_of_beat(members) * count / beat_seconds(count)
            note = f"one each {beat_seconds(count):.1f} s, both ends"
            report.add(Figure(name, round(share, 4), at_most=MAX_SHARE, note=note))
    report.finish()


@contextlib.contextmanager
def members_of(count: int) -> Iterator[list[Membership]]:
    """Yield members of a cluster, which have joined."""
    workers = tuple(f"127.0.0.1:{port}" for port in free_ports(count))
    members = [Membership(Cluster(workers, task_index=rank)) for rank in range(count)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda member: member.join(SECONDS), members))
        yield members
        list(pool.map(Membership.leave, members))


def seconds_of_gather(members: list[Membership], key: str, text: str) -> float:
    """Return the time until all members have the texts of all."""
    barrier = threading.Barrier(len(members) + 1)

    def gather(member: Membership) -> None:
        barrier.wait()
        texts = member.store.gather(key, text).texts(SECONDS)
        assert texts == [text] * len(members)

    with ThreadPoolExecutor(len(members)) as pool:
        done = [pool.submit(gather, member) for member in members]
        barrier.wait()
        begin = time.perf_counter()
        for future in done:
            future.result()
    return time.perf_counter() - begin


def seconds_of_beat(members: list[Membership]) -> float:
    """Return the processor time of a heartbeat and its answer, at both ends."""
    begin = time.process_time()
    for _ in range(BEATS):
        for member in members:
            member.store.beat(REPORT, is_notable=False, is_news=False, wants_all=False)
    return (time.process_time() - begin) / BEATS / len(members)
