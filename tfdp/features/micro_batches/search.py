"""The feature of `fit` that doubles micro-batches when a step runs out of memory."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.communication.coordination.facts import digest
from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.communication.coordination.watch import PeerStepFailed
from tfdp.features.micro_batches.division import MicroBatches
from tfdp.features.micro_batches.memory_search import MemorySearch
from tfdp.ground._compat import runtime
from tfdp.ground.base import loops
from tfdp.ground.base.context import strategy_of
from tfdp.ground.base.feature import Feature, Fit
from tfdp.ground.text import pluralize
from tfdp.training.keras_hooks.worker_callbacks import callback_list
from tfdp.training.optimizer.features import installed
from tfdp.training.reduction.cache_file import cache_path, read_entries, store_entry
from tfdp.training.reduction.training_group import training_group

_log = logging.getLogger("tfdp")
_FILE = "micro_batches.json"
_FIXED = "`GradientAccumulation(steps=4)` with smaller batches"
# After these errors, on this worker or another one, a step may succeed with more
# micro-batches, so the step is repeated. Other errors end the `fit`.
_OUT_OF_MEMORY = (tf.errors.ResourceExhaustedError, PeerStepFailed)


class MicroBatchSearch(Feature):
    """Hooks of `fit` that repeat a step that ran out of memory.

    Each repetition has twice the micro-batches.
    """

    def choose_callbacks(self, fit: Fit) -> None:
        """Reset the division of steps into micro-batches, before a `fit` begins.

        Without the callback `GradientAccumulation(steps="auto")`, the division that an
        earlier `fit` with this callback has left in the optimizer is removed, and the
        step is traced again. The callbacks stay as they are.
        """
        callbacks = callback_list(fit.arguments.get("callbacks"))
        is_auto = any(str(getattr(c, "steps", None)) == "auto" for c in callbacks)
        division = division_of(fit.model)
        if division is not None:
            division.has_begun = False
        if division is not None and not is_auto:
            fit.model.optimizer.features.uninstall(MicroBatches)
            fit.model.train_function = None

    def wrap_step(self, model: Any, step: Callable) -> Callable:
        """Return a step that is repeated until it fits in memory.

        It is `step` itself if the model's optimizer has no `MicroBatches`.
        """
        division = division_of(model)
        if division is None:
            return step

        @functools.wraps(step)
        def fitting(data: Any) -> Any:
            """Run a step on an iterator of batches; repeat it until it fits in memory.

            Returns:
                The result of the step that has fit in memory.
            """
            if not division.has_begun:
                division.has_begun = True
                _begin(model, division)
            before = None
            with contextlib.ExitStack() as failing:
                failing.callback(division.forget_step)
                while True:
                    try:
                        result = step(data)
                        break
                    except _OUT_OF_MEMORY as error:
                        before = before or division.number
                        _double(model, division, error)
                        data = division.kept.take()
                failing.pop_all()
            if division.memory_search is not None:
                _halve_if_it_fits(model, division)
            elif before is not None:
                _report(model, division, before)
            division.end_step()
            return result

        return fitting


def _begin(model: Any, division: MicroBatches) -> None:
    """Choose the number of micro-batches for the first step of a `fit`.

    It is that of an earlier run or `fit`. If none is known and the memory of a worker
    is limited, a `MemorySearch` begins. All workers call this together.

    Args:
        model: The Keras model.
        division: `MicroBatches`, whose number is set.
    """
    extended = model.distribute_strategy.extended
    group = extended.worker_group
    is_trial = division.is_trial
    division.end_memory_search()
    own = read_entries(cache_path(_FILE)).get(_key(model)) if group.is_chief else 1
    kept = group.all_gather("kept number of micro-batches", own)[0]
    if is_trial:
        division.number = 1
    if type(kept) is int and division.number < kept < MemorySearch.START:
        division.number = kept
    hosts = extended.hosts
    memory_search = MemorySearch(hosts.count(hosts[group.rank]) if hosts else 1)
    on_cpus = all(runtime.device_type(d) == "CPU" for d in extended.worker_devices)
    is_limited = bool(memory_search.predictors) and on_cpus
    is_known = kept is not None or division.number > 1
    # All workers use the same number of micro-batches, so all of them search if any one
    # has a memory limit.
    if any(group.all_gather("limit of memory", is_limited)) and not is_known:
        division.begin_memory_search(memory_search)


def _halve_if_it_fits(model: Any, division: MicroBatches) -> None:
    """Halve the number of micro-batches after a step, if the next one is likely to fit.

    All workers must expect it to fit. Otherwise the search ends, and its number is
    logged and stored.

    Args:
        model: The Keras model.
        division: `MicroBatches` with a `MemorySearch`, whose `can_halve` says whether
            this worker expects a step with half the micro-batches to fit.
    """
    assert division.memory_search is not None
    own = min(division.number, division.kept.num_rows() or 1)
    found = worker_group_of(model).all_gather(
        "memory of a step", [own, division.memory_search.can_halve()]
    )
    number = max(number for number, _ in found)
    can_halve = number > 1 and all(may for _, may in found)
    division.number = -(-number // 2) if can_halve else number
    if can_halve:
        return
    division.end_memory_search()
    _store(
        model,
        division,
        f"A step is computed in {_counted(number)} for each replica, as the limit of "
        "memory demands",
    )


def division_of(model: Any) -> MicroBatches | None:
    """Return the feature `MicroBatches` of a model's optimizer, or `None`."""
    return installed(model.optimizer, MicroBatches)


def _double(model: Any, division: MicroBatches, error: Exception) -> None:
    """Double the number of micro-batches after a step that ran out of memory.

    All workers double it, or all raise.

    Args:
        model: The Keras model.
        division: `MicroBatches`.
        error: The error of the step on this worker.

    Raises:
        ValueError: If a worker cannot repeat the step.
    """
    number, rows = division.number, division.kept.num_rows()
    is_own = not isinstance(error, PeerStepFailed)
    reason = _why_not_repeatable(model, division, rows, is_own=is_own)
    # Once all replicas have computed their rows, another worker may complete the step.
    # It would take no part in a vote, which would wait for it, so there is no vote
    # then.
    can_agree = _can_agree(model) and not division.has_computed()
    if can_agree and _any_worker(model.distribute_strategy, bool(reason)):
        reason = reason or "another worker could not make it again: see its message."
    if reason:
        parts = number if rows is None else min(number, rows)
        raise ValueError(
            f"A step ran out of memory with {_counted(parts)} for each replica, and "
            f"{reason}"
        ) from error
    division.number = 2 * number
    division.end_memory_search()


def _can_agree(model: Any) -> bool:
    """Return whether workers can agree with each other after the error of a step.

    It needs several workers, and a backend whose collectives continue after an error.
    """
    extended = model.distribute_strategy.extended
    return extended.worker_group.num_workers > 1 and extended.group.backend == "direct"


def _any_worker(strategy: Any, value: bool) -> bool:
    """Return whether a value is true on any worker, after a step has failed.

    The vote is a collective of the replicas. Other workers still wait for this one in a
    collective of the failed step: the vote ends their step, and they vote, too.

    Args:
        strategy: A tfdp strategy.
        value: Bool, the vote of this worker.
    """

    @tf.function(autograph=False)
    def on_replicas(flag: tf.Tensor) -> Any:
        """Return a per-replica value: the sum of all replicas' `flag` on each."""

        def on_replica() -> tf.Tensor:
            """Return the sum over all replicas of the flags of their workers."""
            return training_group(strategy).reducer.sum([flag])[0]

        # The `run` of tfdp's strategy divides a batch, which a vote does not have. So
        # `run` of TensorFlow's base class is called.
        return tf.distribute.Strategy.run(strategy, on_replica)

    total = on_replicas(tf.constant(float(value)))
    return float(strategy.experimental_local_results(total)[0]) > 0


def _why_not_repeatable(
    model: Any, division: MicroBatches, rows: int | None, *, is_own: bool
) -> str:
    """Return why a failed step cannot be repeated, or `""` if it can.

    Args:
        model: The Keras model.
        division: `MicroBatches`.
        rows: Int, the number of rows of the largest local replica, or `None` if the
            step has not read its batch.
        is_own: Bool, whether this worker, and not another one, has run out of memory.

    Returns:
        String, the end of an error message.
    """
    strategy = model.distribute_strategy
    backend = strategy.extended.group.backend
    if division.has_computed():
        return (
            "had computed all rows: the update itself does not fit. Shard the "
            "optimizer's state with `ShardedOptimizer`, or use a smaller model."
        )
    if rows is None:
        return "had not read its batch: the input pipeline needs too much. Read less."
    if is_own and division.number >= rows:
        return (
            "a single row does not fit either. Use a smaller model, shorter rows, or a "
            "device with more memory."
        )
    if worker_group_of(model).num_workers > 1 and backend != "direct":
        return (
            f'the collectives of `backend="{backend}"` between workers cannot continue '
            f"after an error. Use {_FIXED}."
        )
    return ""


def _report(model: Any, division: MicroBatches, before: int) -> None:
    """Log and store the number of micro-batches with which a repeated step succeeded.

    Args:
        model: The Keras model.
        division: `MicroBatches` with that number.
        before: Int, the number with which the step ran out of memory.
    """
    number = division.number
    _store(
        model,
        division,
        f"A step ran out of memory with {_counted(before)} for each replica. It was "
        f"made again with {number}, and changed nothing before; later steps use "
        f"{number}, too",
    )


def _store(model: Any, division: MicroBatches, text: str) -> None:
    """Log `text` on the first worker, and store `division.number` in the cache file.

    Args:
        model: Keras model, whose step is the key in the file.
        division: `MicroBatches` with the number that was found.
        text: String for the log, a sentence without its full stop.
    """
    if worker_group_of(model).is_chief:
        _log.warning("tfdp: %s.", text)
        store_entry(cache_path(_FILE), _key(model), division.number)


def _counted(number: int) -> str:
    """Return a text such as `"2 micro-batches"`."""
    return pluralize(number, "micro-batch", "micro-batches")


def _key(model: Any) -> str:
    """Return the key of a model's step in the file of numbers of micro-batches.

    It has the model's shapes, the rows of a batch, the replicas, the kinds of devices
    and the version of TensorFlow.
    """
    strategy, loop = strategy_of(model), loops.current()
    assert strategy is not None
    shapes = [
        (tuple(variable.shape), str(variable.dtype)) for variable in model.variables
    ]
    parts = (
        digest(shapes)[:16],
        None if loop is None else loop.batch_rows,
        strategy.num_replicas_in_sync,
        sorted({runtime.device_type(d) for d in strategy.extended.worker_devices}),
        tf.__version__,
    )
    return json.dumps(parts)
