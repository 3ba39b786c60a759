"""Waiting for data: its share of a step on each worker, and what to do about it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

# From this part of a step on waiting matters, and below the second there is none: Keras
# itself takes a few milliseconds between two steps.
_MUCH, _LITTLE = 0.2, 0.1
# Buffers are full when training begins.
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
        kind: String, such as `GENERATOR`, or empty for what needs no word.
        has_serial_map: Bool, whether a `map` has no `num_parallel_calls`.
            Defaults to `False`.
        has_map: Bool, whether there is a `map`. Defaults to `False`.
        is_cached: Bool, whether there is a `cache`. Defaults to `False`.
        obstacle: String, what makes each worker prepare all rows, and what to do.
            Defaults to none.
    """

    kind: str = ""
    has_serial_map: bool = False
    has_map: bool = False
    is_cached: bool = False
    obstacle: str = ""


@dataclasses.dataclass(frozen=True)
class InputWait:
    """Mean step of one worker, and how much of it passes before its data is there.

    Args:
        num_steps: Int, steps of which it is the mean.
        step_seconds: Float.
        input_seconds: Float.

    Example:

    >>> InputWait(num_steps=40, step_seconds=0.2, input_seconds=0.05).share
    0.25
    """

    num_steps: int
    step_seconds: float
    input_seconds: float

    @property
    def share(self) -> float:
        """Float, the part of a step that is waiting."""
        return self.input_seconds / self.step_seconds if self.step_seconds else 0.0


def mean_wait(times: Sequence[tuple[float, float]]) -> InputWait:
    """The mean of steps, without the first ones, in which buffers are still full.

    Args:
        times: Sequence of pairs, seconds of a step and those before it had its data;
            at least one.

    Example:

    >>> mean_wait([(9.0, 0.0), (9.0, 0.0), (2.0, 1.0), (4.0, 2.0)])
    InputWait(num_steps=2, step_seconds=3.0, input_seconds=1.5)
    """
    settled = times[min(_SETTLING_STEPS, len(times) // 2) :]
    steps, waits = zip(*settled, strict=True)
    return InputWait(len(settled), statistics.fmean(steps), statistics.fmean(waits))


def advise(waits: Mapping[int, InputWait], pipeline: Pipeline) -> str:
    """Recommend one change of the input pipeline.

    Args:
        waits: Mapping from the worker's rank to its `InputWait`, at least one.
        pipeline: `Pipeline`.

    Returns:
        String, one sentence.

    Example:

    >>> advise({0: InputWait(40, 0.2, 0.01)}, Pipeline())
    'Data is there in time: little is to gain in the input pipeline.'
    """
    rank = max(waits, key=lambda key: waits[key].share)
    share = waits[rank].share
    if share < _MUCH:
        return "Data is there in time: little is to gain in the input pipeline."
    others = [wait.share for key, wait in waits.items() if key != rank]
    is_apart = bool(others) and statistics.median(others) < _LITTLE
    who = f"Worker {rank} waits" if others else "Training waits"
    # An obstacle costs every worker the same. Which of them is seen to wait for it
    # is chance: one that is a little faster has its data while it waits for the rest.
    is_of_one = is_apart and not pipeline.obstacle
    remedy = _REMEDY_OF_ONE if is_of_one else _remedy(pipeline)
    return f"{who} for its data for {share:.0%} of a step: {remedy}."


def _remedy(pipeline: Pipeline) -> str:
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
            "its arrays are in memory, so that this is Python between two steps; take "
            "larger batches, or `steps_per_execution` in `compile`"
        )
    if pipeline.has_serial_map:
        return "give each `map` `num_parallel_calls=tf.data.AUTOTUNE`"
    if pipeline.has_map and not pipeline.is_cached:
        return (
            "`cache()` behind the part that is the same in each epoch keeps it, where "
            "memory is enough; or give each worker more cores"
        )
    return "give each worker more cores or a faster disk, or prepare less for each row"
