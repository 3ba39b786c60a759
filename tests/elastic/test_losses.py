"""A job goes on without the workers that it loses, exactly."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from tests.elastic import job
from tests.elastic.training import BATCH_SIZE, EPOCHS, NUM_SAMPLES, STEPS_PER_EPOCH
from tests.harness.tiers import full
from tfdp.features.attempts import restart_data
from tools.bench.hosts_bed import INTERFACE, BedError, TwoHosts

pytestmark = [pytest.mark.slow, pytest.mark.processes]

NUM_STEPS = EPOCHS * STEPS_PER_EPOCH


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the results of one device, each once."""
    known: dict[str, dict[str, Any]] = {}

    def of(**arguments: Any) -> dict[str, Any]:
        key = repr(sorted(arguments.items()))
        if key not in known:
            folder = tmp_path_factory.mktemp("one")
            known[key] = job.on_one_device(folder, **arguments)
        return known[key]

    return of


def steps_of(result: dict[str, Any]) -> list[int]:
    return [step for _, step in result["steps"]]


def again(result: dict[str, Any]) -> int:
    """How many steps were made again."""
    return len(steps_of(result)) - len(set(steps_of(result)))


def check(outcome: job.Outcome, survivors: list[int], expected: dict[str, Any]) -> None:
    """Each survivor ends as one device does, in one call of `fit`."""
    for index in survivors:
        assert outcome.codes[index] == 0, outcome.output[-4000:]
        result = outcome.results[index]
        job.assert_same(result, expected)
        assert (result["begins"], result["ends"]) == (1, 1)
        assert again(result) <= 1
        assert set(steps_of(result)) == set(range(1, NUM_STEPS + 1))


@pytest.mark.parametrize(
    ("num_workers", "devices", "where", "rank", "step"),
    [
        full(3, 1, "compute", 0, 8),
        full(2, 2, "batch", 0, 8),
        full(3, 1, "evaluate", 0, 12),
        full(3, 1, "save", 2, 9),
        full(3, 1, "save", 0, 6),
        full(3, 1, "trace", 1, 1),
        full(4, 1, "batch", 3, 1),
        full(2, 1, "batch", 1, 24),
        full(3, 1, "after", 0, 2),
    ],
)
def test_the_others_end_as_one_device_does_after_a_kill(
    tmp_path, expected, num_workers, devices, where, rank, step
):
    features = ["compute"] if where == "compute" else []
    kill = {"where": where, "rank": rank, "step": step}
    arguments = {"features": features, "after_fit": "evaluate"}
    outcome = job.run(tmp_path, num_workers, devices, kill=kill, **arguments)
    survivors = [r for r in range(num_workers) if r != rank]
    check(outcome, survivors, expected(**arguments))
    assert outcome.codes[rank] == -9
    goes_on = "`evaluate` begins again" if where == "after" else "Training continues"
    assert f"{goes_on} with {len(survivors)} worker" in outcome.output
    replicas = {outcome.results[r]["replicas"] for r in survivors}
    assert replicas == {len(survivors) * devices}


@pytest.mark.parametrize(
    ("num_workers", "devices", "features"),
    [
        full(3, 1, ["stage 2", "accumulation", "scaling"]),
        full(2, 2, ["stage 1"]),
        full(3, 1, ["stage 1", "scaling"]),
        full(3, 1, ["rest"]),
        full(3, 1, ["stage 3", "accumulation", "scaling"]),
        full(2, 2, ["stage 3"]),
        full(2, 1, ["stage 3"]),
    ],
)
def test_state_that_was_divided_among_the_replicas_is_whole_after_a_loss(
    tmp_path, expected, num_workers, devices, features
):
    kill = {"where": "batch", "rank": 1, "step": 9}
    outcome = job.run(tmp_path, num_workers, devices, kill=kill, features=features)
    survivors = [r for r in range(num_workers) if r != 1]
    kept = [name for name in features if not name.startswith("stage")]
    check(outcome, survivors, expected(features=kept))


@pytest.mark.full
def test_sharded_parameters_are_whole_on_one_worker_and_divided_again_by_a_join(
    tmp_path, expected
):
    kill = {"where": "batch", "rank": 0, "step": 3}
    features = ["stage 3", "deferred", "frozen"]
    outcome = job.run(
        tmp_path, 2, kill=kill, features=features, replacements=1, step_seconds=0.3
    )
    check(outcome, [1], expected(features=["frozen"]))
    assert outcome.codes == [-9, 0, 0], outcome.output[-4000:]
    job.assert_same(outcome.results[2], expected(features=["frozen"]))
    assert "Training continues with 1 worker" in outcome.output
    assert {outcome.results[r]["replicas"] for r in (1, 2)} == {2}


@pytest.mark.full
@pytest.mark.parametrize("stage", ["stage 2", "stage 3"])
def test_a_loss_before_the_first_state_leaves_no_weights_that_were_sharded(
    tmp_path, expected, stage
):
    kill = {"where": "save", "rank": 1, "step": 0}
    outcome = job.run(tmp_path, 3, kill=kill, features=[stage])
    if stage == "stage 2":
        check(outcome, [0, 2], expected(features=[]))
        return
    assert outcome.codes == [1, -9, 1]
    assert "No worker has found a state from which to continue" in outcome.output


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 2])
def test_a_loss_before_parameters_are_sharded(tmp_path, expected, devices):
    kill = {"where": "before", "rank": 2, "step": 0}
    outcome = job.run(tmp_path, 3, devices, kill=kill, features=["stage 3", "frozen"])
    check(outcome, [0, 1], expected(features=["frozen"]))


@pytest.mark.full
def test_another_loss_while_parameters_are_divided_anew(tmp_path, expected):
    kill = {"where": "batch", "rank": 1, "step": 8}
    later = {"where": "renewal", "rank": 0, "step": 1}
    outcome = job.run(
        tmp_path, 4, kill=kill, kill_later=later, features=["stage 3", "frozen"]
    )
    check(outcome, [2, 3], expected(features=["frozen"]))


@pytest.mark.slow(seconds=30)
def test_each_sample_makes_one_step_of_an_epoch_through_a_loss_and_a_join(
    tmp_path, expected
):
    kill = {"where": "compute", "rank": 0, "step": 3}
    outcome = job.run(
        tmp_path,
        3,
        kill=kill,
        features=["rows"],
        min_workers=2,  # as many as are left
        replacements=1,
        step_seconds=0.3,
        deadline_seconds=180.0,  # alone 50 seconds on two slow cores with AVX2
    )
    check(outcome, [1, 2], expected(features=["rows"]))
    assert outcome.codes == [-9, 0, 0, 0], outcome.output[-4000:]
    job.assert_same(outcome.results[3], expected(features=["rows"]))
    assert "1 worker joined the job" in outcome.output
    assert {outcome.results[r]["replicas"] for r in (1, 2, 3)} == {3}
    rows = job.rows_by_step(outcome.folder)
    for epoch in range(EPOCHS):
        batches = [rows[epoch, batch] for batch in range(STEPS_PER_EPOCH)]
        assert all(len(batch) == BATCH_SIZE for batch in batches)
        assert sorted(itertools.chain(*batches)) == list(range(NUM_SAMPLES))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [[0, 1], [0, 1, 2], [1, 3]])
def test_several_workers_that_are_lost_at_once_are_all_left_out(
    tmp_path, expected, ranks
):
    kill = {"where": "batch", "ranks": ranks, "step": 8}
    outcome = job.run(tmp_path, 4, kill=kill)
    check(outcome, [r for r in range(4) if r not in ranks], expected())


@pytest.mark.full
def test_a_dataset_that_is_shuffled_anew_in_each_epoch_keeps_its_order(
    tmp_path, expected
):
    kill = {"where": "batch", "rank": 1, "step": 9}
    arguments = {"data": "dataset"}
    outcome = job.run(
        tmp_path, 3, kill=kill, replacements=1, step_seconds=0.25, **arguments
    )
    check(outcome, [0, 2], expected(**arguments))
    job.assert_same(outcome.results[3], expected(**arguments))


@pytest.mark.full
@pytest.mark.parametrize("steps", [3, 50])
def test_a_loss_among_several_steps_of_one_execution(tmp_path, expected, steps):
    kill = {"where": "batch", "rank": 1, "step": 9}
    arguments = {"steps_per_execution": steps}
    outcome = job.run(tmp_path, 3, kill=kill, **arguments)
    for rank in (0, 2):
        job.assert_same(outcome.results[rank], expected(**arguments))


@pytest.mark.full
def test_without_states_in_memory_the_last_backup_of_the_disk_counts(
    tmp_path, expected
):
    kill = {"where": "batch", "rank": 1, "step": 9}
    outcome = job.run(tmp_path, 3, kill=kill, memory_every=None, save_freq=2)
    for rank in (0, 2):
        job.assert_same(outcome.results[rank], expected())
        # The save that is under way is not complete: the one before counts.
        assert again(outcome.results[rank]) <= 4
    assert f"from {tmp_path}" in outcome.output


@pytest.mark.full
def test_a_preempted_worker_leaves_training_to_the_others(tmp_path, expected):
    kill = {"where": "batch", "rank": 1, "step": 3, "signal": 15}
    outcome = job.run(tmp_path, 3, kill=kill, step_seconds=0.2)
    check(outcome, [0, 2], expected())
    assert outcome.codes[1] == 75
    assert [again(outcome.results[r]) for r in (0, 2)] == [0, 0]


@pytest.mark.full
def test_a_log_is_continued_by_the_next_first_worker_and_not_begun_by_a_new_one(
    tmp_path, expected
):
    kill = {"where": "batch", "rank": 0, "step": 9}
    outcome = job.run(
        tmp_path, 2, kill=kill, features=["csv"], replacements=1, step_seconds=0.25
    )
    check(outcome, [1], expected())
    assert outcome.codes == [-9, 0, 0], outcome.output[-4000:]
    header, *rows = (tmp_path / "log.csv").read_text().splitlines()
    assert header.startswith("epoch,")
    assert [int(row.partition(",")[0]) for row in rows] == list(range(EPOCHS))


@pytest.mark.full
def test_too_few_workers_wait_for_others_to_join(tmp_path, expected):
    kill = {"where": "batch", "rank": 1, "step": 9}
    outcome = job.run(tmp_path, 2, kill=kill, min_workers=2, replacements=1)
    check(outcome, [0], expected())
    assert outcome.codes == [0, -9, 0]
    assert "1 worker of 2 is left, and `min_workers` is 2: waiting" in outcome.output


@pytest.mark.full
def test_too_few_workers_end_after_the_timeout(tmp_path):
    kill = {"where": "batch", "rank": 1, "step": 9}
    outcome = job.run(tmp_path, 2, kill=kill, min_workers=2, timeout_seconds=6.0)
    assert outcome.codes == [1, -9]
    assert "none joined within 6 s" in outcome.output


@pytest.mark.full
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("other_model", "cannot join the running job, which has other model"),
        ("runs_alone", "which it can only in `fit`"),
    ],
)
def test_a_process_that_cannot_join_ends_and_harms_nobody(
    tmp_path, expected, option, words
):
    kill = {"where": "batch", "rank": 1, "step": 2}
    outcome = job.run(
        tmp_path,
        2,
        kill=kill,
        replacements=1,
        replaced_by={option: True},
        step_seconds=0.25,
    )
    check(outcome, [0], expected())
    assert outcome.codes == [0, -9, 1]
    assert words in outcome.output


@pytest.mark.full
def test_a_worker_may_be_lost_while_it_joins(tmp_path, expected):
    kill = {"where": "batch", "rank": 1, "step": 2}
    again = {"where": "load", "rank": 1, "step": 1}
    outcome = job.run(
        tmp_path,
        3,
        kill=kill,
        replacements=1,
        replaced_by={"kill": again},
        step_seconds=0.25,
    )
    assert outcome.codes == [0, -9, 0, -9], outcome.output[-4000:]
    assert "1 worker joined the job" in outcome.output
    for rank in (0, 2):
        job.assert_same(outcome.results[rank], expected())


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 2])
def test_a_suspended_worker_is_left_out_and_ends_when_it_wakes(
    tmp_path, expected, rank
):
    woken: list[float] = []

    def wake_later(processes: list[Any]) -> None:
        others = [p for index, p in enumerate(processes) if index != rank]
        if not any(p.is_alive() for p in others) and not woken:
            woken.append(time.time())
            os.kill(processes[rank].pid, signal.SIGCONT)

    kill = {"where": "batch", "rank": rank, "step": 9, "signal": signal.SIGSTOP}
    outcome = job.run(tmp_path, 3, kill=kill, timeout_seconds=8.0, disturb=wake_later)
    check(outcome, [r for r in range(3) if r != rank], expected())
    assert woken
    assert outcome.codes[rank] not in (0, -9)


@pytest.fixture
def bed() -> Iterator[TwoHosts]:
    try:
        with TwoHosts("1gbit") as made:
            yield made
    except BedError as error:
        pytest.skip(str(error))


@pytest.mark.full
@pytest.mark.parametrize(
    ("hosts", "seconds", "survivors"),
    [
        ((0, 0, 1), 5.0, [0, 1, 2]),
        ((0, 0, 1), 60.0, [0, 1]),
        ((1, 0, 0), 60.0, [1, 2]),
        ((0, 1), 60.0, [0]),
    ],
)
def test_the_larger_part_of_a_cut_network_continues(
    tmp_path, expected, bed, hosts, seconds, survivors
):
    at: list[float] = []

    def cut(processes: list[Any]) -> None:
        state = "up" if at else "down"
        is_due = (tmp_path / "kills").exists()
        if at:
            is_due = len(at) < 2 and time.monotonic() > at[0] + seconds
        if is_due:
            at.append(time.monotonic())
            link = f"ip -n {bed.names[0]} link set {INTERFACE} {state}"
            subprocess.run(link.split(), check=True)

    outcome = job.run(
        tmp_path,
        len(hosts),
        # A signal that is ignored: only its time counts.
        kill={"where": "batch", "rank": 1, "step": 8, "signal": signal.SIGCONT},
        step_seconds=0.1,
        timeout_seconds=30.0 if seconds < 30 else 8.0,
        disturb=cut,
        bed=bed,
        hosts=hosts,
    )
    check(outcome, survivors, expected())
    for rank in set(range(len(hosts))) - set(survivors):
        assert outcome.codes[rank] not in (0, -9), outcome.output[-4000:]
    assert at, "no cut"
    replicas = {outcome.results[rank]["replicas"] for rank in survivors}
    assert replicas == {len(survivors)}


@pytest.mark.full
def test_workers_are_lost_one_after_another_until_one_is_left(tmp_path, expected):
    def kill_the_first(processes: list[Any]) -> None:
        left = [p for p in processes if p.is_alive()]
        done = (tmp_path / "backups").exists()
        if done and len(left) > 1 and time.time() > next_at[0]:
            next_at[0] = time.time() + 2.5
            left[0].kill()

    next_at = [time.time() + 5.0]
    outcome = job.run(tmp_path, 4, disturb=kill_the_first, step_seconds=0.4)
    assert outcome.codes == [-9, -9, -9, 0]
    job.assert_same(outcome.results[3], expected())
    assert outcome.results[3]["replicas"] == 1


def test_what_cannot_continue_is_refused_at_the_beginning(tmp_path):
    outcome = job.run(tmp_path, 2, features=["local"])
    assert outcome.codes == [1, 1]
    assert re.search(r"is not for .* Received: LocalSGD", outcome.output)


def test_data_whose_order_cannot_be_repeated_stays_for_evaluate():
    rows = tf.data.Dataset.range(8).shuffle(8).filter(lambda row: row > 1).batch(2)
    arguments = {"x": rows}
    restart_data(arguments)
    assert arguments["x"] is rows
