"""Tensors of a checkpoint and of a backup, and what is read of either.

Both have the state of a model between two updates, and what compressors have kept. A
checkpoint has accumulated gradients as one device would have them. A backup has the
state of a running `fit`: what replicas have accumulated, each by itself; metrics in the
middle of an epoch; counters that the logs show; and arrays that callbacks keep.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdp.checkpoint import schema
from tfdp.checkpoint.accumulated_gradients import (
    accumulated_shards,
    accumulated_state,
    accumulation_counter,
    clear_accumulated,
    num_accumulated,
    per_replica_sums,
)
from tfdp.checkpoint.index import Index
from tfdp.checkpoint.model_state import (
    ACCUMULATED_PREFIX,
    COUNTER,
    LOSS_SCALE_PREFIX,
    OTHERS_PREFIX,
    OUTER_PREFIX,
    RUN_PREFIX,
    model_state,
    replicated,
)
from tfdp.checkpoint.reader import LoadPlan
from tfdp.checkpoint.replica_state import (
    PerReplicaVariable,
    local_replicas,
    per_replica_tensors,
)
from tfdp.checkpoint.residual_state import plan_residuals, residual_tensors
from tfdp.ground import user_code
from tfdp.ground.base.wrappers import other_optimizers
from tfdp.training.keras_hooks.file_view import VariableView
from tfdp.training.sharding.state_tensors import StateTensor, renamed

_METRICS = f"{RUN_PREFIX}/metrics"
CALLBACKS_PREFIX = f"{RUN_PREFIX}/callbacks/"
_SUMS = f"{RUN_PREFIX}/{ACCUMULATED_PREFIX}"
# What a model may lack that a checkpoint has, and what is said of it then. A callback
# may switch loss scaling on later, so that a checkpoint may lack it as well.
_OPTIONAL = {
    f"{LOSS_SCALE_PREFIX}/": (
        "The checkpoint has a loss scale and the optimizer has none, so that it is "
        "left out. To go on with it, scale the loss before `restore`: "
        '`DistributedOptimizer(..., loss_scale="dynamic")`.'
    ),
    f"{OUTER_PREFIX}/": (
        "The checkpoint has the outer optimizer of `DiLoCo`, which the model does not "
        "use, so that it is left out."
    ),
    f"{_SUMS}/": (
        "This is a backup from between the micro-batches of an update. What they had "
        "accumulated is left out; `BackupAndRestore` in `fit` goes on with it."
    ),
}


def checkpoint_tensors(model: keras.Model) -> list[StateTensor]:
    """Tensors of a checkpoint that is made now."""
    tensors = model_state(model) + residual_tensors(model)
    return tensors + (accumulated_state(model) if num_accumulated(model) else [])


def plan_checkpoint(model: keras.Model, index: Index) -> LoadPlan:
    """Plan what to read of a checkpoint, which may be a backup.

    Args:
        model: Built Keras model.
        index: `Index` of the checkpoint.

    Raises:
        ValueError: If it has what the model has no place for.
    """
    saved = [entry.name for entry in index.tensors]
    _check_others_are_built(model, saved)
    accumulated = accumulated_state(model)
    if not accumulated and any(n.startswith(f"{ACCUMULATED_PREFIX}/") for n in saved):
        raise ValueError(
            "it was saved between the micro-batches of an update, and the optimizer "
            "does not accumulate; give it `accumulation_steps` before `restore`"
        )
    tensors, left_out = _match_others(model_state(model), saved)
    names, may_miss = set(saved), (*_OPTIONAL, f"{ACCUMULATED_PREFIX}/")
    # Accumulated gradients after the loss scale, by which they are multiplied.
    tensors = [
        tensor
        for tensor in (*tensors, *accumulated)
        if tensor.name in names or not tensor.name.startswith(may_miss)
    ]
    own = {tensor.name for tensor in tensors}
    for prefix, text in _OPTIONAL.items():
        unused = [n for n in saved if n.startswith(prefix) and n not in own]
        if unused:
            user_code.warn(text)
        left_out += unused
    left_out += [name for name in saved if name.startswith(f"{RUN_PREFIX}/")]
    return _load_plan(model, index, tensors, left_out)


def run_facts(model: Any) -> dict[str, Any]:
    """Metadata needed to restore the tensors of a backup, as JSON can hold it."""
    return {
        "replicas": local_replicas(model).count,
        "merges": [item.merge for item in metric_variables(model)],
    }


def backup_tensors(
    model: Any, arrays: dict[str, np.ndarray], *, in_epoch: bool
) -> list[StateTensor]:
    """Tensors of a backup that is made now.

    Args:
        model: Built Keras model, in `fit`.
        arrays: Dict from names to arrays, those of callbacks.
        in_epoch: Bool, whether metrics are needed: the epoch is not over.
    """
    replicas = local_replicas(model)
    tensors = _common_tensors(model, arrays) + residual_tensors(model)
    if num_accumulated(model):
        tensors += _accumulated_tensors(model, replicas.count)
    if in_epoch:
        tensors += per_replica_tensors(metric_variables(model), replicas)
    return tensors


def plan_backup(
    model: Any,
    arrays: dict[str, np.ndarray],
    index: Index,
    facts: dict[str, Any],
    *,
    with_metrics: bool,
) -> LoadPlan:
    """Plan what to read of a backup.

    Args:
        model: Built Keras model, in `fit`.
        arrays: Dict from names to arrays, into which those of callbacks are read.
        index: `Index` of the backup.
        facts: Dict, what `run_facts` had returned.
        with_metrics: Bool, whether training goes on within the epoch.
    """
    saved = [entry.name for entry in index.tensors]
    tensors, left_out = _match_others(_common_tensors(model, arrays), saved)
    has_sums = any(name.startswith(f"{_SUMS}/") for name in saved)
    count = facts["replicas"]
    if has_sums or with_metrics:
        # As many tensors are made; a number alone could be any.
        most = max(len(index.tensors), 1)
        schema.check(count, range(1, most + 1), "run.facts.replicas")
    if has_sums:
        tensors += _accumulated_tensors(model, count)
    if with_metrics:
        metrics = metric_variables(model, facts["merges"])
        tensors += per_replica_tensors(metrics, local_replicas(model), count)
    else:
        left_out += [name for name in saved if name.startswith(f"{_METRICS}/")]
    label = "within the epoch" if with_metrics else "at its start"
    return _load_plan(model, index, tensors, left_out, arrays=arrays, label=label)


def _load_plan(
    model: Any,
    index: Index,
    tensors: list[StateTensor],
    left_out: list[str],
    **more: Any,
) -> LoadPlan:
    residuals = plan_residuals(model, index)
    return LoadPlan(
        tensors + residuals.tensors,
        left_out + residuals.left_out,
        functools.partial(clear_accumulated, model),
        residuals.finish,
        **more,
    )


def _check_others_are_built(model: keras.Model, saved: Sequence[str]) -> None:
    """Raise where a file has the state of an optimizer that has no variables yet."""
    names = {_other_of(name) for name in saved}
    for name, optimizer in other_optimizers(model).items():
        if name in names and not optimizer.built:
            raise ValueError(
                "The state of another optimizer of the model was saved, and it has no "
                "variables yet. Build it first, in the scope, for the variables that "
                f"it trains. Received: the attribute {name!r}"
            )


def _match_others(
    tensors: Sequence[StateTensor], saved: Sequence[str]
) -> tuple[list[StateTensor], list[str]]:
    """Leave out optimizers, beside the model's own, that only one side has.

    Returns:
        Tuple of the tensors to read, and the names in the file that are not read.
    """
    own = {_other_of(tensor.name) for tensor in tensors} | {None}
    theirs = {_other_of(name) for name in saved} | {None}
    for names, text in (
        (theirs - own, "is left out: it is not there, or built by its first step"),
        (own - theirs, "was not saved, and goes on as it is"),
    ):
        if names:
            listed = ", ".join(repr(name) for name in sorted(map(str, names)))
            user_code.warn(
                f"The state of another optimizer of the model {text}: {listed}."
            )
    kept = [tensor for tensor in tensors if _other_of(tensor.name) in theirs]
    return kept, [name for name in saved if _other_of(name) not in own]


def _other_of(name: str) -> str | None:
    """The attribute of another optimizer that a tensor belongs to, or `None`."""
    first, _, rest = name.partition("/")
    return rest.partition("/")[0] if first == OTHERS_PREFIX else None


def _common_tensors(model: Any, arrays: dict[str, np.ndarray]) -> list[StateTensor]:
    """Tensors that every backup has."""
    tensors = model_state(model)
    for name, variable in _counters(model).items():
        tensors.append(replicated(model, f"{RUN_PREFIX}/counters/{name}", variable))
    for name, array in arrays.items():
        view, full_name = _view_of(array), f"{CALLBACKS_PREFIX}{name}"
        tensors.append(replicated(model, full_name, view, array.dtype.name))
    return tensors


def _accumulated_tensors(model: Any, saved_count: int) -> list[StateTensor]:
    """Accumulated sums with the loss scale in them: it is restored, too."""
    count = accumulation_counter(model)
    if count is None:
        return []
    tensors = [replicated(model, f"{_SUMS}/steps", count, COUNTER)]
    tensors += [renamed(t, f"{_SUMS}/{t.name}") for t in accumulated_shards(model)]
    sums = [
        PerReplicaVariable(f"{_SUMS}/{name}", total)
        for name, total in per_replica_sums(model)
    ]
    return tensors + per_replica_tensors(sums, local_replicas(model), saved_count)


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


def _counters(model: Any) -> dict[str, Any]:
    """Counters that the logs show, which a checkpoint of the model leaves out."""
    features = getattr(model.optimizer, "features", None)
    if features is None:
        return {}
    found: dict[str, Any] = {}
    if features.scale is not None:
        for name in ("skipped_steps", "skips_at_minimum", "non_finite"):
            found[name] = getattr(features.scale, name)
    for feature in features.installed.values():
        found.update(feature.counters)
    return found


def _view_of(array: np.ndarray) -> VariableView:
    """An array of a callback, like a variable."""

    def write(value: Any) -> None:
        array[...] = np.asarray(value).reshape(array.shape)

    return VariableView("", array.shape, lambda: array, write)
