"""State of a running `fit`: a backup's tensors besides those of its model.

That is what replicas have accumulated, each by itself; metrics in the middle of an
epoch; counters that the logs show; and arrays that callbacks keep.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tfdp.checkpoint import schema
from tfdp.checkpoint.accumulated_gradients import (
    accumulated_shards,
    accumulation_counter,
    num_accumulated,
    per_replica_sums,
)
from tfdp.checkpoint.index import Index
from tfdp.checkpoint.model_state import (
    ACCUMULATED_PREFIX,
    COUNTER,
    RUN_PREFIX,
    ShardWriter,
    model_state,
    shard_writer_of,
)
from tfdp.checkpoint.other_optimizers import match_others
from tfdp.checkpoint.replica_state import (
    PerReplicaVariable,
    local_replicas,
    per_replica_tensors,
    zero_local_values,
)
from tfdp.checkpoint.residual_state import (
    ResidualPlan,
    plan_residuals,
    residual_tensors,
)
from tfdp.training.keras_hooks.file_view import VariableView
from tfdp.training.sharding.state_tensors import StateTensor, renamed

_METRICS = f"{RUN_PREFIX}/metrics"
CALLBACKS_PREFIX = f"{RUN_PREFIX}/callbacks/"
_SUMS = f"{RUN_PREFIX}/{ACCUMULATED_PREFIX}"


class RunState:
    """Tensors of a model in `fit`, to save or to restore.

    Args:
        model: Built Keras model.
        arrays: Dict from names to arrays, those of callbacks.
    """

    def __init__(self, model: Any, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self._model = model
        self._shard_writer = shard_writer_of(model)
        self._replicas = local_replicas(model)

    def metadata(self) -> dict[str, Any]:
        """Metadata needed to restore it, as JSON can hold it."""
        return {
            "replicas": self._replicas.count,
            "merges": [item.merge for item in metric_variables(self._model)],
        }

    def tensors_to_save(self, *, in_epoch: bool) -> list[StateTensor]:
        """Tensors of a backup that is made now.

        Args:
            in_epoch: Bool, whether metrics are needed: the epoch is not over.

        Returns:
            List of `StateTensor`.
        """
        tensors = self._common_tensors() + residual_tensors(self._model)
        if num_accumulated(self._model):
            tensors += self._accumulated_tensors(self._replicas.count)
        if in_epoch:
            tensors += per_replica_tensors(
                metric_variables(self._model), self._replicas
            )
        return tensors

    def plan_load(
        self, index: Index, metadata: dict, *, with_metrics: bool
    ) -> LoadPlan:
        """Plan which tensors of a backup to read.

        Args:
            index: `Index` of the backup.
            metadata: Dict, what `metadata` had returned.
            with_metrics: Bool, whether training goes on within the epoch.

        Returns:
            `LoadPlan`.
        """
        saved = {entry.name for entry in index.tensors}
        tensors, left_out = match_others(self._common_tensors(), saved)
        has_sums = any(name.startswith(f"{_SUMS}/") for name in saved)
        replicas = metadata["replicas"]
        if has_sums or with_metrics:
            # As many tensors are made; a number alone could be any.
            schema.integer(1, max(len(index.tensors), 1))(
                replicas, "run.facts.replicas"
            )
        if has_sums:
            tensors += self._accumulated_tensors(replicas)
        if with_metrics:
            tensors += per_replica_tensors(
                metric_variables(self._model, metadata["merges"]),
                self._replicas,
                replicas,
            )
        else:
            left_out += [name for name in saved if name.startswith(f"{_METRICS}/")]
        label = "within the epoch" if with_metrics else "at its start"
        residuals = plan_residuals(self._model, index)
        tensors += residuals.tensors
        left_out += residuals.left_out
        return LoadPlan(self, tensors, left_out, label, residuals)

    def clear_accumulated(self) -> None:
        """Clear accumulated gradients; the backup has them, or there are none."""
        count = accumulation_counter(self._model)
        if count is None:
            return
        count.assign(0)
        zero_local_values(accumulated_variables(self._model), self._replicas)
        for tensor in accumulated_shards(self._model):
            for local in tensor.local_shards:
                local.write(np.zeros_like(local.read()))

    def _common_tensors(self) -> list[StateTensor]:
        tensors = model_state(self._model)
        tensors += _counters(self._model, self._shard_writer)
        for name, array in self.arrays.items():
            tensors.append(
                _of_array(f"{CALLBACKS_PREFIX}{name}", array, self._shard_writer)
            )
        return tensors

    def _accumulated_tensors(self, saved_count: int) -> list[StateTensor]:
        """Accumulated sums with the loss scale in them: it is restored, too."""
        count = accumulation_counter(self._model)
        if count is None:
            return []
        tensors = [self._shard_writer.replicated(f"{_SUMS}/steps", count, COUNTER)]
        tensors += [
            renamed(t, f"{_SUMS}/{t.name}") for t in accumulated_shards(self._model)
        ]
        sums = accumulated_variables(self._model)
        return tensors + per_replica_tensors(sums, self._replicas, saved_count)


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """Tensors to restore from a backup, and names to leave out.

    Args:
        state: `RunState`.
        tensors: List of `StateTensor`, what is read.
        left_out: List of strings, names of what is not.
        label: String, what all workers have to decide alike.
        residuals: `ResidualPlan`, to be finished when all is read.
    """

    state: RunState
    tensors: list[StateTensor]
    left_out: list[str]
    label: str
    residuals: ResidualPlan


def accumulated_variables(model: Any) -> list[PerReplicaVariable]:
    """Gradients that each replica has accumulated by itself."""
    return [
        PerReplicaVariable(f"{_SUMS}/{name}", total)
        for name, total in per_replica_sums(model)
    ]


def metric_variables(
    model: Any, merges: list[str] | None = None
) -> list[PerReplicaVariable]:
    """Variables of a model's metrics.

    Args:
        model: Keras model.
        merges: List of strings, how each one's values make one, if the step that
            would tell has not been traced yet. Defaults to `None`.

    Returns:
        List of `PerReplicaVariable`.
    """
    variables = [v for metric in model.metrics for v in metric.variables]
    own = [getattr(variable.value, "merge", "sum") for variable in variables]
    kinds = own if merges is None or len(merges) != len(own) else merges
    for variable, kind in zip(variables, kinds, strict=True):
        if hasattr(variable.value, "merge"):
            variable.value.merge = kind  # also where no step is left to be traced
    return [
        PerReplicaVariable(f"{_METRICS}/{number}", variable, kind)
        for number, (variable, kind) in enumerate(zip(variables, kinds, strict=True))
    ]


def _counters(model: Any, shard_writer: ShardWriter) -> list[StateTensor]:
    """Counters that the logs show, which a checkpoint of the model leaves out."""
    features = getattr(model.optimizer, "features", None)
    if features is None:
        return []
    found: dict[str, Any] = {}
    if features.scale is not None:
        for name in ("skipped_steps", "skips_at_minimum", "non_finite"):
            found[name] = getattr(features.scale, name)
    for feature in features.installed.values():
        found.update(feature.counters)
    return [
        shard_writer.replicated(f"{RUN_PREFIX}/counters/{name}", variable)
        for name, variable in found.items()
    ]


def _of_array(name: str, array: np.ndarray, shard_writer: ShardWriter) -> StateTensor:
    def write(value: Any) -> None:
        array[...] = np.asarray(value).reshape(array.shape)

    entry = VariableView(name, array.shape, lambda: array, write)
    return shard_writer.replicated(name, entry, array.dtype.name)
