"""The tensors of a `fit` that is under way: more than a checkpoint has of its model.

That is what replicas have accumulated, each by itself; metrics in the middle of an
epoch; counters that the logs show; and arrays that callbacks keep.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tfdp.checkpoint.index import Index
from tfdp.checkpoint.model_state import (
    COUNTER,
    PENDING,
    RUN,
    ShardWriter,
    shard_writer_of,
    state_of,
)
from tfdp.checkpoint.pending import counter_of, num_pending, own_sums_of, slices_of
from tfdp.checkpoint.replica_state import OwnValues, clear, own_tensors, replicas_of
from tfdp.keras_hooks.file_view import Entry
from tfdp.sharding.state_tensors import StateTensor, renamed

_METRICS = f"{RUN}/metrics"
_SUMS = f"{RUN}/{PENDING}"


class RunState:
    """All tensors of a model in `fit`, to be saved or to be restored.

    Args:
        model: Built Keras model.
        arrays: Dict from names to arrays, those of callbacks.
    """

    def __init__(self, model: Any, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self._model = model
        self._sharer = shard_writer_of(model)
        self._replicas = replicas_of(model)

    def facts(self) -> dict[str, Any]:
        """What has to be known to restore it, as JSON can hold it."""
        return {
            "replicas": self._replicas.count,
            "merges": [item.merge for item in metrics_of(self._model)],
        }

    def to_save(self, *, in_epoch: bool) -> list[StateTensor]:
        """The tensors as they are.

        Args:
            in_epoch: Bool, whether metrics are needed: the epoch is not over.

        Returns:
            List of `StateTensor`.
        """
        tensors = self._always()
        if num_pending(self._model):
            tensors += self._accumulated(self._replicas.count)
        if in_epoch:
            tensors += own_tensors(metrics_of(self._model), self._replicas)
        return tensors

    def to_restore(self, index: Index, facts: dict, *, with_metrics: bool) -> Wanted:
        """The tensors that a backup is read into.

        Args:
            index: `Index` of the backup.
            facts: Dict, what `facts` had returned.
            with_metrics: Bool, whether training goes on within the epoch.

        Returns:
            `Wanted`.
        """
        saved = {entry.name for entry in index.entries}
        tensors, left_out = self._always(), []
        has_sums = any(name.startswith(f"{_SUMS}/") for name in saved)
        if has_sums:
            tensors += self._accumulated(facts["replicas"])
        if with_metrics:
            tensors += own_tensors(
                metrics_of(self._model, facts["merges"]),
                self._replicas,
                facts["replicas"],
            )
        else:
            left_out = [name for name in saved if name.startswith(f"{_METRICS}/")]
        label = "within the epoch" if with_metrics else "at its start"
        return Wanted(self, tensors, left_out, label)

    def forget(self) -> None:
        """Forgets what has been accumulated; the backup has it, or there is none."""
        count = counter_of(self._model)
        if count is None:
            return
        count.assign(0)
        clear(sums_of(self._model), self._replicas)
        for tensor in slices_of(self._model):
            for piece in tensor.held:
                piece.write(np.zeros_like(piece.read()))

    def _always(self) -> list[StateTensor]:
        tensors = state_of(self._model)
        tensors += _counters(self._model, self._sharer)
        for name, array in self.arrays.items():
            tensors.append(_of_array(f"{RUN}/callbacks/{name}", array, self._sharer))
        return tensors

    def _accumulated(self, saved_count: int) -> list[StateTensor]:
        """Sums as they are, with the loss scale in them: it is restored, too."""
        count = counter_of(self._model)
        if count is None:
            return []
        tensors = [self._sharer.replicated(f"{_SUMS}/steps", count, COUNTER)]
        tensors += [renamed(t, f"{_SUMS}/{t.name}") for t in slices_of(self._model)]
        sums = sums_of(self._model)
        return tensors + own_tensors(sums, self._replicas, saved_count)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is restored of a backup.

    Args:
        state: `RunState`.
        tensors: List of `StateTensor`, what is read.
        left_out: List of strings, names of what is not.
        label: String, what all workers have to decide alike.
    """

    state: RunState
    tensors: list[StateTensor]
    left_out: list[str]
    label: str


def sums_of(model: Any) -> list[OwnValues]:
    """What each replica has accumulated by itself."""
    return [OwnValues(f"{_SUMS}/{name}", total) for name, total in own_sums_of(model)]


def metrics_of(model: Any, merges: list[str] | None = None) -> list[OwnValues]:
    """The variables of a model's metrics.

    Args:
        model: Keras model.
        merges: List of strings, how each one's values make one, if the step that
            would tell has not been traced yet. Defaults to `None`.

    Returns:
        List of `OwnValues`.
    """
    variables = [v for metric in model.metrics for v in metric.variables]
    own = [getattr(variable.value, "merge", "sum") for variable in variables]
    kinds = own if merges is None or len(merges) != len(own) else merges
    return [
        OwnValues(f"{_METRICS}/{number}", variable, kind)
        for number, (variable, kind) in enumerate(zip(variables, kinds, strict=True))
    ]


def _counters(model: Any, shard_writer: ShardWriter) -> list[StateTensor]:
    """Variables of what is switched on that a checkpoint of the model leaves out."""
    features = getattr(model.optimizer, "features", None)
    if features is None:
        return []
    found: dict[str, Any] = {}
    if features.scale is not None:
        for name in ("skipped_steps", "skips_at_minimum", "non_finite"):
            found[name] = getattr(features.scale, name)
    if features.noise is not None:
        found.update(signal=features.noise.signal, noise=features.noise.noise)
    return [
        shard_writer.replicated(f"{RUN}/counters/{name}", variable, str(variable.dtype))
        for name, variable in found.items()
    ]


def _of_array(name: str, array: np.ndarray, shard_writer: ShardWriter) -> StateTensor:
    def write(value: Any) -> None:
        array[...] = np.asarray(value).reshape(array.shape)

    entry = Entry(name, array.shape, lambda: array, write)
    return shard_writer.replicated(name, entry, array.dtype.name)
