"""Steps that do not wait for late workers: `CommunicationOptions(backup_workers=...)`.

A step of `fit` takes the first gradients, scaled to the rows of the global batch, and
drops late ones. Every worker applies the same sums in the same order, so that all
replicas stay equal. A worker that is behind takes no rows until it has caught up.

Source: Chen et al. 2016, "Revisiting Distributed Synchronous SGD",
https://arxiv.org/abs/1604.00981.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import sys
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.communication.collectives.background import Background
from tfdp.communication.collectives.process_transport import host_of
from tfdp.communication.transport import (
    QuorumFollower,
    QuorumLeader,
    QuorumMember,
    Share,
    sum_into,
)
from tfdp.ground import _compat
from tfdp.ground.base import batch_weight
from tfdp.ground.base.context import strategy_of
from tfdp.ground.base.feature import Feature, Fit, register
from tfdp.ground.base.finalizers import finalizers
from tfdp.ground.base.wrappers import other_optimizers
from tfdp.ground.text import pluralize
from tfdp.training.data.rows import count_of, take_rows
from tfdp.training.keras_hooks.worker_callbacks import callback_list
from tfdp.training.reduction.fusion import ReducedGradients, pack
from tfdp.training.reduction.gradient_exchange import GradientExchange
from tfdp.training.reduction.sparse import are_unique, sum_duplicates

# Largest number and bytes of the sums that are kept for a worker that is behind.
_MOST_STEPS, _MOST_BYTES = 256, 256 << 20
# Name of the counter in the logs of an epoch.
_LOG = "dropped_gradients"
# Numbers for the names of connections; the same on all workers, since all trace the
# same steps in the same order.
_names = itertools.count()
# The rows of a replica, and those of the global batch.
_ROWS = tf.TensorSpec([2], tf.float64)


@dataclasses.dataclass
class _Counts:
    """Numbers of steps of a `fit`, the same on all workers.

    Args:
        steps: Int, steps so far.
        without: Counter of the steps that closed without a worker, by its rank.
    """

    steps: int = 0
    without: collections.Counter[int] = dataclasses.field(
        default_factory=collections.Counter
    )

    def describe(self) -> str:
        """Return the numbers as a sentence, or `""` if no gradient was dropped."""
        parts = [
            f"{number:,} without worker {rank}"
            for rank, number in sorted(self.without.items())
        ]
        steps = pluralize(self.steps, "step")
        return f"Of {steps}, {', '.join(parts)}." if parts else ""


class FirstGradients(GradientExchange):
    """Sums of the gradients that come first, over connections to worker 0.

    Args:
        strategy: A tfdp strategy.
        model: The Keras model that is trained.
    """

    label = "`backup_workers`"

    def __init__(self, strategy: Any, model: Any) -> None:
        self.counts = _Counts()
        self._strategy, self._model = strategy, weakref.ref(model)
        self._devices = [host_of(d) for d in strategy.extended.group.devices]
        # Number of sums that have arrived before this worker has made their steps.
        self._waiting = _compat.plain_variable(0, tf.int64, self._devices[0])
        self._backgrounds: dict[tuple, Background] = {}
        self._lock = threading.Lock()
        self._traced: set[int] = set()

    def begin_step(self, args: tuple, total: tf.Tensor | None) -> tuple:
        """Take no rows if the step has closed already, see `GradientExchange`."""
        _check_model(self._strategy, self._model())
        if total is None:
            raise ValueError(
                "`backup_workers` needs data whose rows each worker can count for all: "
                "arrays, or a `tf.data.Dataset` whose cardinality is known and whose "
                "`batch` is tf.data's. It does not support Python generators, "
                "`PyDataset`, and data that is sharded by file."
            )
        self._traced = set()
        is_behind = self._waiting.read_value() > 0

        def take(part: Any) -> Any:
            """Return all rows of a part of the batch, or none."""
            if not tf.is_tensor(part) or part.shape.rank == 0:
                return part
            count = tf.cast(count_of(part), tf.int64)
            none = tf.zeros([], tf.int64)
            return take_rows(part, none, tf.where(is_behind, none, count))

        local = [
            keras.tree.map_structure(take, _compat.select_replica(replica, args))
            for replica in range(len(self._devices))
        ]
        return tuple(map(_compat.per_replica, map(list, zip(*local, strict=True))))

    def reduce(
        self, gradients: list, variables: list[Any], replica: int
    ) -> ReducedGradients:
        """See `GradientExchange`."""
        if replica in self._traced:
            raise ValueError(
                "`backup_workers` supports one update of the optimizer in a step. "
                f"Received: another one, of {pluralize(len(variables), 'variable')}"
            )
        self._traced.add(replica)
        flat = [
            g if isinstance(g, tf.IndexedSlices) else tf.convert_to_tensor(g)
            for g in gradients
        ]
        for gradient, variable in zip(flat, variables, strict=True):
            if isinstance(gradient, tf.Tensor):
                gradient.set_shape(variable.shape)
        buckets = _buckets(flat)
        positions = [i for i, g in enumerate(flat) if isinstance(g, tf.IndexedSlices)]
        tensors = [pack([flat[i] for i in bucket]) for bucket in buckets]
        for position in positions:
            tensors += [flat[position].values, flat[position].indices]
        background = self._background(
            tensors, variables, range(len(buckets), len(tensors))
        )
        background.launch(replica, [_rows(), *tensors])
        results = background.collect(replica)
        flats, rows = results[: len(buckets)], iter(results[len(buckets) :])
        sparse = {i: _joined(flat[i], next(rows), next(rows)) for i in positions}
        return ReducedGradients(flats, buckets, flat, sparse)

    def _background(
        self, tensors: list, variables: list[Any], joined: Collection[int]
    ) -> Background:
        """Return the thread that exchanges gradients of variables.

        Args:
            tensors: List of tensors that a replica sends.
            variables: List of Keras variables.
            joined: Collection of ints, positions of the tensors that are concatenated.
        """
        specs = [
            tf.TensorSpec([None, *t.shape[1:]] if i in joined else t.shape, t.dtype)
            for i, t in enumerate(tensors)
        ]
        key = (*map(id, variables), *specs)
        with self._lock:
            if key not in self._backgrounds:
                self._backgrounds[key] = self._connect(specs, variables, joined)
            return self._backgrounds[key]

    def _connect(
        self,
        specs: Sequence[tf.TensorSpec],
        variables: list[Any],
        joined: Collection[int],
    ) -> Background:
        """Connect all workers, and start the thread. The arguments: `_background`."""
        extended, name = self._strategy.extended, f"first gradients {next(_names)}"
        connect, group = extended.group.transport.connect, extended.worker_group
        on_change = functools.partial(_set, self._waiting)
        member: QuorumMember
        if group.rank:
            member = QuorumFollower(connect(0, name), on_change)
        else:
            links = {rank: connect(rank, name) for rank in range(1, group.num_workers)}
            least = group.num_workers - extended.options.backup_workers
            most = _most_behind(variables)
            member = QuorumLeader(links, least, most, joined, on_change)
        run = functools.partial(_exchange, member, joined, self.counts)
        background = Background(
            f"tfdp {name}", self._devices, [_ROWS, *specs], specs, run
        )
        finalizers.register(background, member.close)
        return background


def _rows() -> tf.Tensor:
    """Return the rows of the running replica and of the global batch, `[2]`."""
    total = tf.cast(batch_weight.num_samples(), tf.float64)
    return tf.stack([tf.round(batch_weight.current() * total), total])


def _buckets(flat: list) -> list[tuple[int, ...]]:
    """Return the positions of the dense gradients of each dtype."""
    by_dtype: dict[Any, list[int]] = {}
    for position, gradient in enumerate(flat):
        if not isinstance(gradient, tf.IndexedSlices):
            by_dtype.setdefault(gradient.dtype, []).append(position)
    return [tuple(positions) for positions in by_dtype.values()]


def _joined(
    own: tf.IndexedSlices, values: tf.Tensor, indices: tf.Tensor
) -> tf.IndexedSlices:
    """Return the rows of all workers as a sparse gradient, like that of one device.

    Args:
        own: `tf.IndexedSlices` of the replica.
        values: Tensor of shape `[rows, ...]`, of all workers.
        indices: Integer tensor of shape `[rows]`.
    """
    if are_unique(own.indices):
        indices, values = sum_duplicates(indices, values)
    return tf.IndexedSlices(values, indices, own.dense_shape)


def _most_behind(variables: list[Any]) -> int:
    """Return how many steps a worker may be behind, by the bytes of a step's sums."""
    num_bytes = sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
    return max(2, min(_MOST_STEPS, _MOST_BYTES // max(1, num_bytes)))


def _set(waiting: Any, number: int) -> None:
    """Set the variable that steps read, from a thread."""
    waiting.assign(number, read_value=False)


def _exchange(
    member: QuorumMember,
    joined: Collection[int],
    counts: _Counts,
    parts: list[list[tf.Tensor]],
) -> list[list[tf.Tensor]]:
    """Exchange the gradients of the local replicas, on the thread.

    Args:
        member: `QuorumMember` of this worker.
        joined: Collection of ints, positions of the tensors that are concatenated.
        counts: `_Counts`, updated.
        parts: List of lists of tensors: the rows, then the gradients, of each replica.

    Returns:
        List of lists of tensors, the sums for each local replica.
    """
    rows = [part[0].numpy() for part in parts]
    columns = zip(*([t.numpy() for t in part[1:]] for part in parts), strict=True)
    arrays = []
    for position, column in enumerate(columns):
        if len(column) == 1:
            arrays.append(column[0])
        elif position in joined:
            arrays.append(np.concatenate(column))
        else:
            arrays.append(np.empty_like(column[0]))
            sum_into(arrays[-1], column)
    own = float(sum(each[0] for each in rows))
    result = member.exchange(Share(own, float(rows[0][1]), arrays))
    counts.steps += 1
    counts.without.update(result.absent)
    with tf.device("CPU:0"):
        sums = [tf.convert_to_tensor(array) for array in result.arrays]
    return [sums] * len(parts)


def _check_model(strategy: Any, model: Any) -> None:
    """Raise if a model's steps need all workers, or several steps make an update.

    Args:
        strategy: The model's tfdp strategy.
        model: The Keras model.
    """
    optimizers = [model.optimizer, *other_optimizers(model).values()]
    features = [f for f in (getattr(o, "features", None) for o in optimizers) if f]
    needing = [
        f.label
        for each in features
        for f in each.installed.values()
        if f.needs_all_replicas
    ]
    found = {
        "`run_eagerly=True`": model.run_eagerly,
        "`tfdp run --rebalance`": strategy.extended.balance is not None,
        "sharding": any(getattr(o, "sharding", "none") != "none" for o in optimizers),
        "gradient accumulation": any(
            (getattr(o, "accumulation_steps", 1) or 1) != 1
            or getattr(o, "gradient_accumulation_steps", None)
            for o in optimizers
        ),
        "`LocalSGD` and `DiLoCo`": any(each.uses_local_steps for each in features),
        **dict.fromkeys(needing, True),
    }
    if unsupported := [name for name, is_used in found.items() if is_used]:
        raise ValueError(
            "`backup_workers` drops the gradients of late workers, and does not "
            f"support {' and '.join(unsupported)}. Remove one of them."
        )


class _DroppedGradients(keras.callbacks.Callback):
    """Add the number of dropped gradients to the logs of an epoch.

    Args:
        exchange: `FirstGradients`.
    """

    def __init__(self, exchange: FirstGradients) -> None:
        super().__init__()
        self._exchange = exchange
        self._before = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the number of this epoch."""
        number = self._exchange.counts.without.total()
        if logs is not None:
            logs[_LOG] = number - self._before
        self._before = number


class BackupWorkers(Feature):
    """Replaces the all-reduce of gradients in `fit`, and reports dropped gradients."""

    def __init__(self) -> None:
        self._exchanges: weakref.WeakKeyDictionary[Any, FirstGradients]
        self._exchanges = weakref.WeakKeyDictionary()

    def gradient_exchange(self, fit: Fit) -> FirstGradients | None:
        """Return the exchange of a model, the same for each of its calls of `fit`."""
        if not _is_on(fit.strategy):
            return None
        if fit.model not in self._exchanges:
            _check_workers(fit.strategy)
            self._exchanges[fit.model] = FirstGradients(fit.strategy, fit.model)
        return self._exchanges[fit.model]

    def choose_callbacks(self, fit: Fit) -> None:
        """Begin to count dropped gradients, and put their number into logs."""
        if (exchange := self.gradient_exchange(fit)) is not None:
            exchange.counts.steps = 0
            exchange.counts.without.clear()
            callbacks = fit.arguments.get("callbacks")
            if not isinstance(callbacks, keras.callbacks.CallbackList):
                others = callback_list(callbacks)
                fit.arguments["callbacks"] = [_DroppedGradients(exchange), *others]

    def batches_between_meetings(self, model: Any) -> int | None:
        """Return `None`: workers do not synchronize within an epoch."""
        return None if _is_on(strategy_of(model)) else 1

    def after_fit(self, fit: Fit) -> None:
        """Report the dropped gradients, on worker 0."""
        if not _is_on(fit.strategy) or not fit.strategy.extended.worker_group.is_chief:
            return
        if text := self._exchanges[fit.model].counts.describe():
            print(f"tfdp: {text}", file=sys.stderr, flush=True)


def _is_on(strategy: Any) -> bool:
    """Return whether steps do not wait for late workers."""
    return strategy is not None and strategy.extended.options.backup_workers > 0


def _check_workers(strategy: Any) -> None:
    """Raise if there are too few workers, or something else connects them.

    Args:
        strategy: A tfdp strategy.
    """
    extended = strategy.extended
    number, spare = extended.worker_group.num_workers, extended.options.backup_workers
    if spare >= number:
        raise ValueError(
            "`backup_workers` must be less than the number of workers. Received: "
            f"backup_workers={spare}, {pluralize(number, 'worker')}"
        )
    if extended.group.transport.name != "direct":
        raise ValueError(
            '`backup_workers` is for `backend="direct"` between CPU workers. Received: '
            f"{extended.group.transport.name!r}"
        )


register(BackupWorkers())
