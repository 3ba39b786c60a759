"""Check that all replicas have the same weights."""

from __future__ import annotations

from typing import Any

from tfdp.callbacks.bases import StrategyCallback
from tfdp.communication.coordination.facts import compare
from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.features import local_steps
from tfdp.features.drift_probe import DriftProbe
from tfdp.features.replay.training import REPLAYS, check_replay
from tfdp.ground import user_code
from tfdp.ground.arguments import checked_integer, checked_number
from tfdp.ground.base import loops
from tfdp.ground.base.context import strategy_of
from tfdp.ground.text import pluralize, say
from tfdp.training.data.batch_labels import LabelRecord
from tfdp.training.data.fingerprints import ArrayValues
from tfdp.training.data.value_differences import values_fact
from tfdp.training.replicas.assigned_values import recorded_weights
from tfdp.training.replicas.drift import (
    check_weights,
    compared_weights,
    raise_difference,
)


class ConsistencyCheck(StrategyCallback):
    """Stop training when the weights of a replica differ from those of the others.

    Data parallelism requires identical replicas: a replica that computes wrongly, or
    whose weights were changed, silently corrupts the training of all. Every `every`
    steps, before the first and after the last, replicas compare a checksum of the bits
    of all weights. A difference of a single bit ends `fit` on every worker, with an
    error that names the replica in the minority (both if there are two), the step, and
    the first variable that differs.

    The checksums are computed on the replicas' own devices and are reduced with the
    logs, without further communication. With one replica there is nothing to compare.
    Sharded parameters are left out, with a warning, since each replica has another
    shard of them; what workers assign to them outside of steps (`set_weights`,
    `assign`, `load_weights`) is compared, also with `shard_scope="node"`.

    With a Python generator or a `PyDataset`, workers also compare the class labels of
    that step's batch, by a short message: a worker that has drawn other random numbers
    would continue with other rows.

    With `replay`, some steps are computed twice: first each replica computes the rows
    of the next replica, and discards all changes; then each computes its own. Before
    the update, replicas compare the bits of gradients, of their addends of sums within
    the step, and of the sums of gradients. Where they differ, the step is repeated, and
    a line on all workers names the replica. If they differ again, `fit` ends, or with
    `on_loss="continue"` continues without the replica's worker. The cost is printed at
    the end.

    Args:
        every: Int, steps from one check to the next. With `steps_per_execution` only
            the last check of an execution is read. Defaults to 100.
        replay: Float in (0, 1], fraction of the steps that two replicas compute, such
            as 0.01 for every 100th; or `None` for none. Defaults to `None`.

    Raises:
        ValueError: If `every` is not positive, or `replay` is not in (0, 1]; in `fit`,
            if the model has a strategy other than tfdp's, or a step cannot be replayed.
        RuntimeError: In `fit`, on every worker, if replicas differ; with `replay` if
            they differ again when the step is repeated.
        ValueError: In `fit`, on every worker, if the labels of batches differ.

    Example:

    >>> ConsistencyCheck(every=50, replay=0.01).every
    50

    Source: Dixit et al. 2021, https://arxiv.org/abs/2102.11245, on processors that
    compute wrongly.
    """

    # `fit` need not compare the settings of this callback: the name of the exchange
    # before the first step has them, so workers with different settings get an error.
    compared: tuple[str, ...] = ()

    # `fit` looks for this attribute, since a callback with a `replay` fraction needs
    # steps that can be computed twice.
    can_replay = True

    def __init__(self, every: int = 100, replay: float | None = None) -> None:
        super().__init__()
        self.every = checked_integer("every", every, 1)
        if replay is not None:
            bounds = "a number above 0 and at most 1, or `None`"
            replay = float(checked_number("replay", replay, bounds, above=0, most=1))
        self.replay = replay
        self._probe: DriftProbe | None = None
        self._labels: LabelRecord | None = None
        self._step = 0
        self._last_batch = -1

    def set_model(self, model: Any) -> None:
        """Set the model; with several replicas, have its step traced again.

        The step then computes the checksums to compare.

        Raises:
            ValueError: If the model has a strategy other than tfdp's.
        """
        super().set_model(model)
        if model.distribute_strategy.num_replicas_in_sync > 1:
            model.train_function = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Compare the weights, and start the `DriftProbe` that adds checksums to steps.

        Raises:
            ValueError: If another callback or a setting excludes the comparison.
            RuntimeError: On every worker, if replicas differ.
        """
        self._probe = self._labels = None
        self._step = 0
        strategy = strategy_of(self.model)
        if self.replay is not None:
            check_replay(strategy, self.model)
        if strategy is None or strategy.num_replicas_in_sync == 1:
            return
        if local_steps.enabled(self.model.optimizer) is not None:
            raise ValueError(
                "`ConsistencyCheck` compares weights that `LocalSGD` and `DiLoCo` let "
                "differ between exchanges. Remove `ConsistencyCheck`, or the other "
                "callback."
            )
        if (exchange := loops.exchange()) is not None:
            raise ValueError(
                "`ConsistencyCheck` compares the weights of all replicas in a step, "
                f"and {exchange.label} does not wait for all. Remove one of them."
            )
        self._warn_about_sharded_weights()
        self._check("before the first step")
        self._probe = DriftProbe(strategy, self.model, self.every)
        self._probe.start()
        self._labels = self._shared_label_record()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restart the count of batches, which Keras begins at 0 in each epoch."""
        self._last_batch = -1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Let the next check cover the assignments to sharded weights before this step.

        Each worker records what it assigns outside of steps, and a checksum of the
        records is part of the comparison.
        """
        if self._probe is not None:
            self._probe.update_assigned()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Every `every` steps, compare the replicas' checksums and the workers' labels.

        Raises:
            RuntimeError: On every worker, if checksums differ.
            ValueError: On every worker, if class labels of the last batch differ.
        """
        before = self._step
        self._step += batch - self._last_batch
        self._last_batch = batch
        if self._probe is None or self._step // self.every == before // self.every:
            return
        step, numbers = self._probe.read()
        # All workers raise the error together, since the checksums were summed with the
        # logs, and the sums are the same on all workers.
        if len({number for number in numbers if number}) > 1:
            strategy = strategy_of(self.model)
            raise_difference(strategy, self.model, f"at step {step} of `fit`", numbers)
        if self._labels is not None:
            self._check_labels(self._labels)

    def on_train_end(self, logs: Any = None) -> None:
        """Compare the final weights; on worker 0, print the cost of replayed steps.

        A replayed step is one that two replicas have computed, with `replay`. The cost
        is the number of these steps, and their part of the training time.
        """
        if self._probe is not None:
            self._probe = None
            self._check("after the last step")
        replays = REPLAYS.of_model.get(self.model)
        if replays is not None and worker_group_of(self.model).is_chief:
            say(f"{replays.cost()}.")

    def _shared_label_record(self) -> LabelRecord | None:
        """Begin to keep the class labels of this worker's batches. All workers call it.

        Returns:
            `LabelRecord` of this `fit`, which keeps the labels from now on; `None` with
            one worker, or if a worker has no record.
        """
        worker_group, loop = worker_group_of(self.model), loops.current()
        record = None if loop is None else loop.label_record
        if worker_group.num_workers == 1:
            return None
        if worker_group.any("labels of batches", record is None) or record is None:
            return None
        record.is_active = True
        return record

    def _check_labels(self, labels: LabelRecord) -> None:
        """Compare the last batch's labels between workers; raise if they differ."""
        worker_group = worker_group_of(self.model)
        number = self._last_batch + 1 if labels.restarts else self._step
        arrays = labels.labels_of(number)
        values = ArrayValues(
            {f"{name} of batch {number}": arrays[name] for name in arrays}
        )
        topic = f"ConsistencyCheck(every={self.every}): labels"
        compare(worker_group, topic, [values_fact(worker_group, topic, values)])

    def _warn_about_sharded_weights(self) -> None:
        """Warn that sharded parameters are left out, if there are any."""
        weights = recorded_weights(self.model)
        sharded = [weight for weight in weights if weight.value.has_parts]
        if sharded:
            user_code.warn(
                f"ConsistencyCheck skips {len(sharded)} of "
                f"{pluralize(len(self.model.weights), 'weight')}: parameters that are "
                "sharded, so that each replica has a different part. It still compares "
                "what workers assign to them outside of steps."
            )

    def _check(self, when: str) -> None:
        """Raise `RuntimeError` on every worker if weights differ between replicas.

        Args:
            when: String for the error, such as `"before the first step"`.
        """
        # The name of the exchange contains the settings, so that workers with different
        # settings get an error that shows the difference.
        replay = "" if self.replay is None else f", replay={self.replay:g}"
        topic = f"ConsistencyCheck(every={self.every}{replay})"
        weights = compared_weights(self.model)
        check_weights(strategy_of(self.model), weights, topic, when)
