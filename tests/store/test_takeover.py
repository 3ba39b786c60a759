"""The host of the store is killed; the others continue with all that they were told."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.tiers import full
from tests.store.clusters import cluster_of
from tfdp.communication.cluster import Cluster
from tfdp.communication.connection.secret import VARIABLE

_SECONDS = 20.0
# Values of each member that are looked for.
_MAX_VALUES = 50


class Member:
    """Process of `taken_over`, and what it has been told by the store."""

    def __init__(self, cluster: Cluster, rank: int, environ: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.store.taken_over"]
        self.process = subprocess.Popen(
            [*command, json.dumps(cluster.workers), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )
        self.rank = rank
        self.puts: list[int] = []
        self.gathered: list[int] = []
        # The copy of the store that this member hosts: who has it, who was too slow.
        self.standby: int | None = None
        self.slow: set[int] = set()
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # cut off by the kill
                match json.loads(line):
                    case {"put": number}:
                        self.puts.append(number)
                    case {"gathered": number}:
                        self.gathered.append(number)
                    case {"standby": standby, "slow": slow}:
                        self.standby = standby
                        self.slow |= set(slow)
                    case answer:
                        self._answers.put(answer)

    def answer(self) -> dict[str, Any]:
        return self._answers.get(timeout=_SECONDS)

    def send(self, words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


@contextlib.contextmanager
def processes_of(
    num_workers: int, secret_file: pathlib.Path | None = None
) -> Iterator[list[Member]]:
    """Members of one machine; with a secret they connect by TCP."""
    cluster, environ = cluster_of(num_workers), {}
    if secret_file is not None:
        secret_file.write_text("0123456789abcdef")
        secret_file.chmod(0o600)
        environ = {VARIABLE: str(secret_file)}
    members = [Member(cluster, rank, environ) for rank in range(num_workers)]
    try:
        for member in members:
            assert member.answer() == {"joined": True}
        yield members
    finally:
        for member in members:
            member.process.kill()
            member.close()


def ask(living: list[Member], all_members: list[Member]) -> list[dict[str, Any]]:
    """Whether each one finds the last values of which any member was told."""
    told = [member.puts[-_MAX_VALUES:] for member in all_members]
    for member in living:
        member.send(told)
    return [member.answer() for member in living]


def end(living: list[Member]) -> None:
    for member in living:
        member.send([])
    for member in living:
        assert member.answer() == {"left": True}
    for member in living:
        member.send([])
        member.close()


@pytest.mark.parametrize("seed", [0, full(1), full(2)])
def test_what_the_store_told_survives_its_host(seed: int):
    check_kills(seed)


@pytest.mark.full
def test_what_the_store_told_survives_its_host_over_tcp(tmp_path):
    check_kills(3, tmp_path / "secret")


@pytest.mark.full
@pytest.mark.parametrize("seed", range(200, 217))
def test_the_worker_with_the_copy_takes_over_from_each_host(tmp_path, seed: int):
    secret_file = tmp_path / "secret" if seed % 2 else None
    check_kills(seed, secret_file, hosts_only=True)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 115))
def test_what_the_store_told_survives_each_of_its_hosts(tmp_path, seed: int):
    check_kills(seed, tmp_path / "secret" if seed % 2 else None)


def test_the_loss_of_the_host_and_of_the_copy_is_told_to_all_in_a_sentence():
    with processes_of(4) as members:
        living = members[2:]
        for member in members[:2]:
            member.process.send_signal(signal.SIGKILL)
        for answer in ask(living, members):
            assert re.fullmatch(
                r"The connection to the job's store, on worker 0, has ended, and "
                r"worker 1, which has a copy, does not continue it: "
                r"Connection refused\.",
                answer["lost"],
            )
            assert answer["seconds"] < 4.0


def check_kills(
    seed: int, secret_file: pathlib.Path | None = None, *, hosts_only: bool = False
) -> None:
    """Kill the host, or also the standby and others, until one is left."""
    chance = random.Random(seed)
    num_hosts = 0
    with processes_of(4, secret_file) as members:
        living, host = list(members), 0
        while len(living) > 1:
            time.sleep(chance.uniform(0.0, 0.3))
            killed = members[host]
            if not hosts_only and len(living) < 4 and chance.random() < 0.3:
                killed = chance.choice(living)
            is_host = killed.rank == host
            num_hosts += is_host
            living.remove(killed)
            killed.kill()
            answers = ask(living, members)
            assert [answer["missing"] for answer in answers] == [[]] * len(living)
            assert max(answer["seconds"] for answer in answers) < 3.0
            (next_host,) = {answer["host"] for answer in answers}
            if not is_host:
                assert next_host == host
            elif not killed.slow:
                assert next_host == killed.standby
                # The standby of a later host is the first member that follows it.
                assert next_host == living[0].rank or host != 0
            host = next_host
            assert host in [member.rank for member in living]
        assert all(len(member.puts) > 0 for member in members)
        end(living)
        last = [max(member.gathered, default=-1) for member in members]
        assert last[living[0].rank] == max(last)
    print(f"Of 3 members that were killed, {num_hosts} hosted the store.")
