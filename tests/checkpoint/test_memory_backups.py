"""States in memory: a run that starts again reads no disk, or says why it does."""

from __future__ import annotations

import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.test_backups import (
    KILLED,
    ONE_PROCESS,
    TWO_BY_TWO,
    TWO_WORKERS,
    assert_same,
    train,
    undisturbed,
)
from tests.harness.interrupted import Layout, Result
from tests.harness.tiers import full

PROCESS_GROUP = "backups"
pytestmark = [pytest.mark.slow, pytest.mark.processes]

THREE_WORKERS = Layout(3, 1)
__all__ = ["undisturbed"]
# Steps in an epoch; the directory has no backup before its end.
EPOCH = 5


class Hosts:
    """Folders that stand for the memory of hosts, and the run on them.

    Args:
        folder: Path.
        names: The host of each worker, by a letter.
    """

    def __init__(self, folder: Path, names: str) -> None:
        self.folder, self.names = folder, names
        for name in set(names):
            (folder / name).mkdir()

    def train(self, layout: Layout, **arguments: Any) -> Result:
        hosts = [str(self.folder / name) for name in self.names]
        return train(
            layout,
            self.folder,
            directory=str(self.folder / "backups"),
            hosts=hosts,
            **arguments,
        )

    def lose(self, name: str) -> None:
        """Replaces a host by one that has nothing."""
        shutil.rmtree(self.folder / name)
        (self.folder / name).mkdir()

    def parts(self) -> list[str]:
        """The parts in memory, such as `"a/part-0-1.json"`."""
        found = self.folder.glob("?/tfdp-memory-*/*.json")
        return sorted(f"{path.parent.parent.name}/{path.name}" for path in found)


def killed(hosts: Hosts, layout: Layout, step: int, **arguments: Any) -> Result:
    at = random.Random(step).randrange(layout.num_workers)
    kill = {"step": step, "at": at, "number": int(signal.SIGKILL)}
    found = hosts.train(layout, kill=kill, **arguments)
    assert found.codes[at] == KILLED, found.output[-3000:]
    return found


@pytest.mark.parametrize(
    ("layout", "names", "lost", "said"),
    [
        full(TWO_WORKERS, "aa", "", "from memory\n"),
        (TWO_WORKERS, "ab", "b", "copies on other hosts of the parts of worker 1\n"),
        full(ONE_PROCESS, "a", "", "from memory\n"),
        full(TWO_BY_TWO, "ab", "a", "copies on other hosts of the parts of worker 0\n"),
        full(THREE_WORKERS, "aab", "a", "of the parts of workers 0 and 1\n"),
        full(THREE_WORKERS, "aab", "b", "of the parts of worker 2\n"),
    ],
)
def test_a_run_starts_again_from_memory_bit_for_bit(
    layout, names, lost, said, undisturbed, tmp_path
):
    hosts = Hosts(tmp_path, names)
    killed(hosts, layout, EPOCH - 1, memory_every=1)
    for name in lost:
        hosts.lose(name)
    found = hosts.train(layout, memory_every=1)
    # The copies of the last state may have been under way.
    step = "4" if len(set(names)) == 1 else "[34]"
    resumed = re.search(f"resumed at step {step} of epoch 1, from memory", found.output)
    assert resumed, found.output[-3000:]
    assert said in found.output
    assert_same(found, undisturbed(layout))
    assert not hosts.parts()
    assert not (tmp_path / "backups").exists()


@pytest.mark.parametrize(
    ("before", "after", "stage"),
    [full(TWO_WORKERS, TWO_BY_TWO, 1), full(TWO_BY_TWO, TWO_WORKERS, 3)],
)
def test_a_run_starts_again_from_memory_on_other_replicas(
    before, after, stage, undisturbed, tmp_path
):
    """A host that is lost, and another number of replicas."""
    options = {"everything": False, "stage": stage}
    hosts = Hosts(tmp_path, "ab")
    killed(hosts, before, EPOCH - 1, memory_every=1, **options)
    hosts.lose("a")
    found = hosts.train(after, memory_every=1, **options)
    assert "of epoch 1, from memory" in found.output, found.output[-3000:]
    wanted = undisturbed(Layout(1, 1), everything=False)
    for name, value in wanted.weights.items():
        np.testing.assert_allclose(found.weights[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.full
def test_a_part_that_could_not_be_copied_is_never_used(undisturbed, tmp_path):
    hosts = Hosts(tmp_path, "ab")
    first = killed(hosts, TWO_WORKERS, EPOCH - 1, memory_every=1, lacks_copy=0)
    assert first.output.count("Nothing is saved in memory any more") == 1
    hosts.lose("a")
    found = hosts.train(TWO_WORKERS, memory_every=1)
    said = "resumed at step 2 of epoch 1, from memory, with the copies"
    assert said in found.output, found.output[-3000:]
    assert_same(found, undisturbed(TWO_WORKERS))


@pytest.mark.full
def test_copies_have_connections_where_steps_use_those_of_tensorflow(
    undisturbed, tmp_path
):
    hosts = Hosts(tmp_path, "ab")
    killed(hosts, TWO_WORKERS, EPOCH - 1, memory_every=1, backend="ring")
    hosts.lose("b")
    found = hosts.train(TWO_WORKERS, memory_every=1, backend="ring")
    assert "copies on other hosts of the parts of worker 1\n" in found.output
    assert_same(found, undisturbed(TWO_WORKERS, backend="ring"))


@pytest.mark.full
def test_the_directory_is_for_the_loss_of_both_hosts(undisturbed, tmp_path):
    hosts = Hosts(tmp_path, "ab")
    # The second backup has waited for the first, and may be under way.
    killed(hosts, TWO_WORKERS, 2 * EPOCH + 2, memory_every=1)
    hosts.lose("a")
    hosts.lose("b")
    found = hosts.train(TWO_WORKERS, memory_every=1)
    source = re.escape(f"{tmp_path / 'backups'}")
    resumed = re.search(f"resumed at step 1 of epoch [23], from {source}", found.output)
    assert resumed, found.output[-3000:]
    assert_same(found, undisturbed(TWO_WORKERS))
