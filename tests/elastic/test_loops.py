"""A training loop of the user's own goes on without the workers that it loses."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.elastic import job, loop
from tests.elastic.job import rows_by_step
from tests.elastic.loop import BATCH_SIZE, NUM_SAMPLES, STEPS
from tests.harness.tiers import full

pytestmark = [pytest.mark.slow, pytest.mark.processes]

run = functools.partial(job.run, script=loop.train)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the results of one device, each once."""

    @functools.cache
    def of(form: str, evaluates: bool) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("one")
        arguments = {"form": form, "evaluates": evaluates}
        return job.on_one_device(folder, script=loop.train, **arguments)

    def with_arguments(
        form: str = "function", evaluates: bool = False, **_: Any
    ) -> Any:
        return of(form if form == "iterator" else "function", evaluates)

    return with_arguments


def check(outcome: job.Outcome, survivors: list[int], expected: dict[str, Any]) -> None:
    """Each survivor ends as one device does, and makes at most one call again."""
    for index in survivors:
        assert outcome.codes[index] == 0, outcome.output[-4000:]
        result = outcome.results[index]
        job.assert_same(result, expected)
        assert result["seen"] == expected["seen"]
        losses = [change for change in result["changes"] if "was lost" in change]
        assert result["calls"] - len(losses) == expected["calls"]
    assert not (outcome.folder / "state").exists()


def check_rows(folder: Path) -> None:
    """Each sample makes one step of each epoch."""
    rows = rows_by_step(folder)
    batches = [rows[0, step] for step in range(STEPS)]
    assert {len(batch) for batch in batches} == {BATCH_SIZE}
    per_epoch = NUM_SAMPLES // BATCH_SIZE
    for first in range(0, STEPS, per_epoch):
        epoch = itertools.chain(*batches[first : first + per_epoch])
        assert sorted(epoch) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize(
    ("num_workers", "devices", "where", "ranks", "step", "more"),
    [
        (3, 1, "step", [0], 8, {}),
        full(3, 1, "step", [1], 8, {"form": "iterator"}),
        full(2, 2, "step", [0], 8, {"form": "eager"}),
        full(3, 1, "step", [0], 8, {"form": "given", "misuse": "step"}),
        full(2, 1, "step", [0], 8, {"form": "inner"}),
        full(3, 1, "commit", [2], 9, {"sharding": "optimizer"}),
        full(2, 2, "step", [1], 9, {"sharding": "gradients", "form": "iterator"}),
        full(3, 1, "step", [0], 9, {"sharding": "parameters"}),
        full(3, 1, "trace", [1], 1, {}),
        full(3, 1, "before", [0], 1, {}),
        full(3, 1, "evaluate", [2], 6, {"evaluates": True}),
        full(3, 1, "predict", [0], 6, {"evaluates": True}),
        full(3, 1, "checkpoint", [1], 6, {"evaluates": True}),
        full(3, 1, "gather", [0], 6, {"evaluates": True}),
        full(4, 1, "step", [0, 1], 8, {"disk_every": 2}),
    ],
)
def test_the_others_end_as_one_device_does_after_a_kill(
    tmp_path, one_device, num_workers, devices, where, ranks, step, more
):
    kill = {"where": where, "ranks": ranks, "step": step}
    outcome = run(tmp_path, num_workers, devices, kill=kill, **more)
    survivors = [rank for rank in range(num_workers) if rank not in ranks]
    check(outcome, survivors, one_device(**more))
    for rank in survivors:
        (change,) = outcome.results[rank]["changes"]
        assert f"continues with {len(survivors)} worker" in change
        assert "try the step again" in change
        assert outcome.results[rank]["replicas"] == len(survivors) * devices
    if more.get("form") != "iterator":
        check_rows(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("num_workers", [3, 2])
def test_a_process_that_replaces_a_lost_worker_joins_the_loop(
    tmp_path, one_device, num_workers
):
    kill = {"where": "step", "rank": 1, "step": 3}
    outcome = run(tmp_path, num_workers, kill=kill, replacements=1, step_seconds=1.0)
    check(outcome, [r for r in range(num_workers) if r != 1], one_device())
    assert outcome.codes[-1] == 0, outcome.output[-4000:]
    job.assert_same(outcome.results[num_workers], one_device())
    assert "1 worker joined the job. The loop continues with" in outcome.output
    assert {result["replicas"] for result in outcome.results.values()} == {num_workers}
    check_rows(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("misuse", "form", "words"),
    [
        ("step", "function", "was traced for the workers from before they changed"),
        ("step", "inner", "was traced for the workers from before they changed"),
        ("batches", "function", "was distributed among the workers from before"),
        ("batches", "iterator", "was distributed among the workers from before"),
        ("batches", "options", "was distributed among the workers from before"),
        ("error", "function", "ValueError: an error of the user's own"),
        ("data", "function", "continues its order from before the workers changed"),
        ("optimizer", "function", "use `model.optimizer` in the step"),
    ],
)
@pytest.mark.parametrize("joins", [False, True])
def test_what_is_not_made_anew_after_a_change_is_an_error(
    tmp_path, misuse, form, words, joins
):
    kill = {"where": "step", "rank": 1, "step": 3}
    sharding = "optimizer" if misuse == "optimizer" else "none"
    outcome = run(
        tmp_path,
        2 if joins else 3,
        kill=kill,
        replacements=int(joins),
        misuse=f"{misuse} after a join" if joins else misuse,
        form=form,
        sharding=sharding,
        step_seconds=1.0 if joins else 0.0,
    )
    assert words in outcome.output
    assert outcome.codes[0] == 1
    if joins and misuse != "optimizer":  # the new worker continues, alone
        assert outcome.codes[2] == 0, outcome.output[-4000:]


@pytest.mark.full
@pytest.mark.parametrize(
    ("where", "step"), [("load", 2), ("made", 1), ("load", 1), ("save", 1)]
)
def test_more_workers_are_lost_while_the_others_begin(
    tmp_path, one_device, where, step
):
    kill = {"where": "step", "rank": 1, "step": 8}
    later = {"where": where, "rank": 0, "step": step}
    outcome = run(tmp_path, 4, kill=kill, kill_later=later)
    for rank in (2, 3):
        job.assert_same(outcome.results[rank], one_device())
        assert outcome.results[rank]["replicas"] == 2
    check_rows(tmp_path)


@pytest.mark.full
def test_a_job_that_is_killed_as_a_whole_continues_from_its_last_commit(
    tmp_path, one_device
):
    kill = {"where": "step", "ranks": [0, 1], "step": 8}
    outcome = run(tmp_path, 2, kill=kill)
    assert outcome.codes == [-9, -9]
    outcome = run(tmp_path, 3)
    check(outcome, [0, 1, 2], one_device() | {"calls": STEPS - 7})


@pytest.mark.full
def test_too_few_workers_end_after_the_timeout(tmp_path):
    kill = {"where": "step", "rank": 1, "step": 9}
    outcome = run(tmp_path, 2, kill=kill, min_workers=2, timeout_seconds=6.0)
    assert outcome.codes == [1, -9]
    assert "none joined within 6 s" in outcome.output


@pytest.mark.full
def test_a_loop_ends_with_its_worker_where_the_job_is_to_stop(tmp_path):
    kill = {"where": "step", "rank": 1, "step": 9}
    outcome = run(tmp_path, 2, kill=kill, on_loss="stop")
    assert outcome.codes == [1, -9]
    assert "WorkersChanged" not in outcome.output
    assert "The other workers cannot continue" in outcome.output


@pytest.mark.full
def test_fit_within_the_block_is_refused(tmp_path):
    outcome = run(tmp_path, 2, misuse="fit", evaluates=True)
    assert outcome.codes == [1, 1]
    assert "call it outside of the `with` block of an `ElasticState`" in outcome.output


@pytest.mark.full
def test_arguments_that_differ_between_workers_are_refused(tmp_path):
    outcome = run(tmp_path, 2, misuse="arguments")
    assert outcome.codes == [1, 1]
    assert "must create `ElasticState` with the same arguments" in outcome.output
    assert "disk_every" in outcome.output


@pytest.mark.full
@pytest.mark.parametrize("form", ["function", "eager"])
def test_a_batch_from_before_a_change_is_warned_of(tmp_path, form):
    kill = {"where": "step", "rank": 1, "step": 3}
    outcome = run(tmp_path, 3, kill=kill, misuse="batch", form=form)
    assert "no data was read since the workers changed" in outcome.output
