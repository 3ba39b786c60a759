"""`MicroBatches`: the part of a step that knows the number of micro-batches."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdp.features.micro_batches.kept_batch import KeptBatch
from tfdp.features.micro_batches.memory_search import MemorySearch
from tfdp.ground._compat import tf_distribute
from tfdp.training.data.batch_weights import unpack_counted
from tfdp.training.data.rows import count_of, first_tensor
from tfdp.training.step.accumulation import read
from tfdp.training.step.step import RowDivider


class MicroBatches(RowDivider):
    """Feature that lets replicas compute rows in micro-batches, one after another.

    `MicroBatchSearch` finds their number: it repeats a step that runs out of memory
    with more micro-batches.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        num_local: Int, the number of local replicas.

    Attributes:
        kept: `KeptBatch` of the running step.
        has_begun: Bool, whether the running `fit` has begun its first step.
        memory_search: `MemorySearch` for fewer micro-batches, until it ends; or `None`.
    """

    label = '`GradientAccumulation(steps="auto")`'
    needs_all_replicas = True

    def __init__(self, make_variable: Any, num_local: int) -> None:
        self.num_local = num_local
        self._number = make_variable(
            shape=(),
            dtype="int32",
            initializer=keras.initializers.Constant(1),
            name="micro_batches",
        )
        # Number of steps in which all replicas have computed all their rows. A failed
        # step that has increased it is not repeated, since states may have changed.
        self._computed = make_variable(
            shape=(), dtype="int32", initializer="zeros", name="computed_steps"
        )
        # 1 while a search tries numbers of micro-batches, or else 0. Backups save it,
        # so that a `fit` that resumes does not keep a number that was on trial.
        self._is_trial = make_variable(
            shape=(), dtype="int32", initializer="zeros", name="is_trial"
        )
        self._num_done = 0
        self.kept = KeptBatch()
        self.has_begun = False
        self.memory_search: MemorySearch | None = None

    @property
    def variables(self) -> list:
        """List of the Keras variables that the feature has created."""
        return [self._number, self._computed, self._is_trial]

    @property
    def counters(self) -> dict[str, Any]:
        """Dict by name of the variables that backups save: `number` and `is_trial`."""
        return {"micro_batches": self._number, "micro_batches_trial": self._is_trial}

    @property
    def number(self) -> int:
        """Int, the number of micro-batches of a replica's rows."""
        return int(self._number.numpy())

    @number.setter
    def number(self, number: int) -> None:
        """Set the number of micro-batches, outside of a step."""
        self._number.assign(number)

    @property
    def is_trial(self) -> bool:
        """Bool, whether `number` is one that a search is still trying."""
        return bool(self._is_trial.numpy())

    def begin_memory_search(self, memory_search: MemorySearch) -> None:
        """Search for fewer micro-batches: the next step computes rows one by one.

        Args:
            memory_search: `MemorySearch`. After each step its `can_halve` decides
                whether the next step has half as many micro-batches.
        """
        self.memory_search, self.number = memory_search, MemorySearch.START
        self._is_trial.assign(1)

    def end_memory_search(self) -> None:
        """End the search, and keep its number of micro-batches."""
        self.memory_search = None
        self._is_trial.assign(0)

    def check(self, optimizer: Any) -> None:
        """Check that the optimizer does not shard parameters (ZeRO-3).

        Args:
            optimizer: `DistributedOptimizer`.

        Raises:
            ValueError: If it does.
        """
        if optimizer.sharding_options.shards_parameters:
            raise ValueError(
                f'{self.label} is not for `sharding="parameters"`, whose replicas '
                "gather parameters while they compute. Give the number of batches of "
                "an update: `GradientAccumulation(steps=4)`."
            )

    def num_parts(self) -> tf.Tensor:
        """Return the number of micro-batches of a replica's rows: scalar, int32."""
        return read(self._number)

    def keep_batch(self, args: tuple) -> tuple:
        """Implements `RowDivider.keep_batch`: put the batch of a step into a queue.

        If the step runs out of memory, `MicroBatchSearch` repeats it with the batch in
        the queue.

        Args:
            args: Tuple of nests of per-replica values, the arguments of the step.

        Returns:
            Tuple like `args`, with which the step runs.
        """
        plain, _ = unpack_counted(args)
        local = [
            first_tensor(tf_distribute.select_replica(replica, plain))
            for replica in range(self.num_local)
        ]
        counts = [tf.cast(count_of(each), tf.int32) for each in local]
        return self.kept.keep(args, tf.reduce_max(counts))

    def begin_changes(self) -> list:
        """Return operations that mark this step as no longer repeatable.

        They run once all replicas have computed all their rows, before states change.
        """
        part = tf_distribute.local_part(self._computed)
        return [part.assign_add(1, read_value=False)]

    def has_computed(self) -> bool:
        """Return whether all replicas had computed all their rows when a step failed.

        Such a step cannot be repeated, since it may have changed states.
        """
        return self._num_computed() > self._num_done

    def end_step(self) -> None:
        """Forget the batch of a step that has succeeded, and count the step."""
        self.kept.drop()
        self._num_done += 1

    def forget_step(self) -> None:
        """Drop the batch of a step that has failed and is not repeated.

        `has_computed` is false again afterwards.
        """
        self.kept.drop()
        self._num_done = self._num_computed()

    def _num_computed(self) -> int:
        """Return the number of steps in which all replicas computed all their rows."""
        return max(
            int(tf_distribute.local_value(self._computed, replica))
            for replica in range(self.num_local)
        )
