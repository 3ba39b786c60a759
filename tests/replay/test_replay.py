"""Steps that two replicas compute: what differs is found, and the replica named."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import tfdp
from tests.elastic import job
from tests.harness import common
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tests.replay import left_out
from tfdp.features.replay.suspects import ReplayDigests, suspects

CASE_MODULES = ("replay.cases_replay",)


@pytest.mark.processes
def test_replay(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
def test_the_others_continue_without_a_worker_that_is_always_wrong(tmp_path):
    wanted = job.on_one_device(tmp_path / "one", script=left_out.train)
    outcome = job.run(tmp_path / "three", 3, script=left_out.train)
    assert [bool(code) for code in outcome.codes] == [False, True, False], outcome
    assert sorted(outcome.results) == [0, 2]
    for result in outcome.results.values():
        job.assert_same(result, wanted)
    text = "In step 5 of epoch 1 of fit, replica 1 (CPU:0 of worker 1, "
    for index in range(3):
        output = (outcome.folder / f"process-{index}.log").read_text()
        assert text in output, output[-3000:]
    assert "Training continues with 2 workers instead of 3" in outcome.output


@pytest.mark.parametrize("wrong", range(4))
def test_a_replica_that_is_always_wrong_is_named(wrong: int):
    own = np.arange(4)[:, np.newaxis]
    computed = np.stack([own, np.roll(own, -1, axis=0)])
    computed[:, wrong] += 10
    found = ReplayDigests(computed, np.full(4, 9))
    assert not found.is_right
    assert suspects([found, found]) == [wrong]
    received = np.full(4, 9)
    received[wrong] = 8
    computed[:, wrong] -= 10
    assert suspects([ReplayDigests(computed, received)] * 2) == [wrong]


@pytest.mark.parametrize(
    "scope",
    [lambda: tfdp.MirroredStrategy(["CPU:0"]).scope(), contextlib.nullcontext],
    ids=["a strategy", "none"],
)
def test_one_replica_has_nothing_to_compare(scope):
    with scope():
        model = common.compiled(common.mlp())
    check = tfdp.callbacks.ConsistencyCheck(replay=0.01)
    with pytest.raises(ValueError, match="Received: one replica"):
        common.fit(model, *common.regression_data(), callbacks=[check])
