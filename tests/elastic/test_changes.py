"""A change of the workers is followed by others, until one cluster is formed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tfdp.communication.coordination.watch import WorkerLost
from tfdp.features import elastic


def change(*further: WorkerLost) -> tuple[Any, list[int]]:
    """Forms a cluster in which worker 1 sees further losses; which ones it acts on."""
    seen: list[int] = []
    changes = iter(further)

    def change_cluster(change: WorkerLost) -> None:
        seen.append(change.rank)
        if error := next(changes, None):
            raise error

    group = SimpleNamespace(rank=1, num_workers=1, is_chief=True)
    extended = SimpleNamespace(change_cluster=change_cluster, worker_group=group)
    model = mock.MagicMock()
    model.distribute_strategy.extended = extended
    with (
        mock.patch.object(elastic, "other_optimizers", return_value={}),
        mock.patch.object(elastic, "worker_group_of", return_value=group),
    ):
        text = elastic.change_cluster(model, WorkerLost("One was lost.", 0), "It runs")
    return text, seen


def test_a_further_loss_forms_a_further_cluster():
    text, seen = change(WorkerLost("Another one was lost.", 2))
    assert seen == [0, 2]
    assert text.startswith("Another one was lost. It runs with 1 worker")


def test_a_worker_that_the_others_declare_lost_meanwhile_does_not_continue():
    with pytest.raises(WorkerLost, match="declared this worker lost"):
        change(WorkerLost("The other workers have declared this worker lost.", 1))
