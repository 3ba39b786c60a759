"""Member of a cluster that puts and gathers until its parent asks what it was told.

python -m tests.store.taken_over CLUSTER RANK
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
import time

from tfdp.communication.cluster import Cluster
from tfdp.communication.store import HostLost, Membership
from tfdp.communication.store.replication import Replication


def say(**words: object) -> None:
    """Send one line to the parent."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def say_standby() -> None:
    """Say which member has the copy, and which were too slow, where this one hosts."""
    announce = Replication._announce

    def announce_and_say(replication: Replication) -> None:
        announce(replication)
        standby = replication.standby
        rank = None if standby is None else standby.rank
        say(standby=rank, slow=sorted(replication._slow))

    Replication._announce = announce_and_say  # type: ignore[method-assign]


def put_all(member: Membership, rank: int, has_ended: threading.Event) -> None:
    """Put values, and say each that the store has acknowledged."""
    with contextlib.suppress(HostLost):
        for number in itertools.count():
            if has_ended.is_set():
                return
            member.store.put(f"{rank}/{number}", f"text {number}")
            say(put=number)


def gather_all(member: Membership, has_ended: threading.Event) -> None:
    """Take part in all-gathers, and say each that was complete."""
    with contextlib.suppress(HostLost):
        for number in itertools.count():
            gathering = member.store.gather(f"call {number}", f"text {number}")
            while (texts := gathering.texts(0.05)) is None:
                if has_ended.is_set():
                    return
            assert texts == [f"text {number}"] * member.cluster.num_workers, texts
            say(gathered=number)


def missing(member: Membership, told: list[list[int]]) -> list[str]:
    """The keys of acknowledged values that the store does not have.

    Args:
        told: The numbers of the values, by the rank that has put them.
    """
    texts = {f"{rank}/{n}": f"text {n}" for rank, ns in enumerate(told) for n in ns}
    return [key for key, text in texts.items() if member.store.get(key, 3.0) != text]


def main(workers: str, rank: int) -> None:
    """Run a member until its standard input ends."""
    say_standby()
    member = Membership(Cluster(tuple(json.loads(workers)), task_index=rank))
    member.join(20)
    say(joined=True)
    has_ended = threading.Event()
    threads = [
        threading.Thread(target=put_all, args=(member, rank, has_ended)),
        threading.Thread(target=gather_all, args=(member, has_ended)),
    ]
    for thread in threads:
        thread.start()
    for line in sys.stdin:
        asked = json.loads(line)
        if not asked:
            break
        begin = time.monotonic()
        try:
            member.store.put(f"{rank}/after", "text")
        except HostLost as error:
            say(lost=str(error), seconds=time.monotonic() - begin)
            return
        seconds = time.monotonic() - begin
        say(missing=missing(member, asked), seconds=seconds, host=member.store.host)
    has_ended.set()
    for thread in threads:
        thread.join()
    say(left=True)
    sys.stdin.readline()
    member.leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
