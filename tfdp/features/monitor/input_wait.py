"""Wait for input data: its fraction of a step on each worker, and advice."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

# Fractions of a step that a worker waits for data: from the first on, the wait is
# reported; below the second, the worker counts as not waiting, since Keras itself takes
# a few milliseconds between two steps.
_MUCH, _LITTLE = 0.2, 0.1
# Number of steps at the start that are left out of the mean: they hardly wait for data,
# since prefetch buffers are still full.
_SETTLING_STEPS = 10

GENERATOR, PY_DATASET, TORCH = "a generator", "a PyDataset", "a DataLoader"
ARRAYS = "arrays"
_REMEDY_OF_ONE = (
    "the others do not, so look at the disk of its host, at what else runs there, and "
    "at callbacks that only this worker runs"
)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Properties of the data of a `fit` that advice depends on.

    Args:
        kind: String, kind of the data source, such as `GENERATOR`; empty for a
            `tf.data` pipeline without a generator. Defaults to `""`.
        has_serial_map: Bool, whether a `map` has no `num_parallel_calls`.
            Defaults to `False`.
        has_map: Bool, whether the pipeline has a `map`. Defaults to `False`.
        is_cached: Bool, whether the pipeline has a `cache`. Defaults to `False`.
        obstacle: String, why each worker prepares all rows, and the remedy; empty if
            each prepares only its own. Defaults to `""`.
    """

    kind: str = ""
    has_serial_map: bool = False
    has_map: bool = False
    is_cached: bool = False
    obstacle: str = ""


@dataclasses.dataclass(frozen=True)
class InputWait:
    """Mean step time of one worker, and its mean wait for data.

    Args:
        num_steps: Int, number of averaged steps.
        step_seconds: Float, duration of a step.
        input_seconds: Float, time of a step before its data is available.

    Example:

    >>> InputWait(num_steps=40, step_seconds=0.2, input_seconds=0.05).share
    0.25
    """

    num_steps: int
    step_seconds: float
    input_seconds: float

    @property
    def share(self) -> float:
        """Float, the fraction of a step that the worker waits for data."""
        return self.input_seconds / self.step_seconds if self.step_seconds else 0.0


def mean_wait(times: Sequence[tuple[float, float]]) -> InputWait:
    """Average steps, without the first ones, in which prefetch buffers are still full.

    These are the first ten, or the first half of fewer than twenty steps.

    Args:
        times: Sequence of pairs, at least one: seconds of a step, and seconds before it
            had its data.

    Example:

    >>> mean_wait([(9.0, 0.0), (9.0, 0.0), (2.0, 1.0), (4.0, 2.0)])
    InputWait(num_steps=2, step_seconds=3.0, input_seconds=1.5)
    """
    settled = times[min(_SETTLING_STEPS, len(times) // 2) :]
    steps, waits = zip(*settled, strict=True)
    return InputWait(len(settled), statistics.fmean(steps), statistics.fmean(waits))


def advise(waits: Mapping[int, InputWait], pipeline: Pipeline) -> str:
    """Recommend one change of the input pipeline, by the worker that waits most.

    If it waits for less than 20 % of a step, no change is recommended. If the others
    wait for less than 10 % (the median), and nothing obliges each worker to prepare all
    rows, the change concerns its host; otherwise the pipeline, by `Pipeline`.

    Args:
        waits: Mapping from a worker's rank to its `InputWait`, at least one.
        pipeline: `Pipeline` of the run.

    Returns:
        String, one sentence.

    Example:

    >>> advise({0: InputWait(40, 0.2, 0.01)}, Pipeline())
    'Data arrives in time: there is little to gain in the input pipeline.'
    """
    rank = max(waits, key=lambda key: waits[key].share)
    share = waits[rank].share
    if share < _MUCH:
        return "Data arrives in time: there is little to gain in the input pipeline."
    others = [wait.share for key, wait in waits.items() if key != rank]
    is_apart = bool(others) and statistics.median(others) < _LITTLE
    who = f"Worker {rank} waits" if others else "Training waits"
    # If an obstacle makes each worker prepare all rows, it delays all workers alike.
    # But faster workers prepare data while they wait for others in collectives: a
    # single worker that waits for data is then no sign of a problem on its host.
    is_of_one = is_apart and not pipeline.obstacle
    remedy = _REMEDY_OF_ONE if is_of_one else _remedy(pipeline)
    return f"{who} for its data for {share:.0%} of a step: {remedy}."


def _remedy(pipeline: Pipeline) -> str:
    """Recommend a change to the pipeline of all workers, as a clause.

    It concerns the first of these that the pipeline has: an obstacle to preparing only
    the worker's own rows, a source that is not `tf.data`, a serial `map`, a `map`
    without `cache`. Otherwise it concerns the cores and the disk.

    Args:
        pipeline: `Pipeline`.
    """
    if pipeline.obstacle:
        return f"each worker prepares all rows, not only its own: {pipeline.obstacle}"
    if pipeline.kind == GENERATOR:
        return (
            "a Python generator draws one batch after the other; make a `tf.data` "
            "pipeline of names or indices, and load in a `map` with "
            "`num_parallel_calls=tf.data.AUTOTUNE`"
        )
    if pipeline.kind == PY_DATASET:
        return "give the `PyDataset` more `workers`, or less to do for each batch"
    if pipeline.kind == TORCH:
        return "give the `DataLoader` more `num_workers`, or less to do for each batch"
    if pipeline.kind == ARRAYS:
        return (
            "its arrays are in memory, so the wait is Python code between two steps; "
            "use larger batches, or `steps_per_execution` in `compile`"
        )
    if pipeline.has_serial_map:
        return "give each `map` `num_parallel_calls=tf.data.AUTOTUNE`"
    if pipeline.has_map and not pipeline.is_cached:
        return (
            "put `cache()` after the part that is the same in each epoch, if memory is "
            "sufficient; or give each worker more cores"
        )
    return "give each worker more cores or a faster disk, or prepare less for each row"
