"""Tensors of a checkpoint and of a backup, and load plans for both.

Both hold the state of a model between two updates, and the state of compressors. A
checkpoint has accumulated gradients as one device would have them. A backup also has
the state of a running `fit`: the accumulated gradients of each replica, metrics in the
middle of an epoch, counters that the logs show, and arrays of callbacks.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
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
    RUN_PREFIX,
    installed_features,
    loss_scale_of,
    model_state,
    replicated,
)
from tfdp.checkpoint.reader import LoadPlan, check_model
from tfdp.checkpoint.replica_state import (
    PerReplicaVariable,
    local_replicas,
    per_replica_tensors,
)
from tfdp.checkpoint.residual_state import plan_residuals, residual_tensors
from tfdp.ground import user_code
from tfdp.ground._compat import keras_model
from tfdp.ground.base.feature import Feature, overriders
from tfdp.ground.base.wrappers import other_optimizers
from tfdp.training.keras_hooks.file_view import VariableView
from tfdp.training.sharding.state_tensors import StateTensor, renamed

# Only backups have the tensors of a running `fit`. Their names begin with `RUN_PREFIX`,
# so that `tfdp.checkpoint.restore` can recognize and skip them.
_METRICS = f"{RUN_PREFIX}/metrics"
CALLBACKS_PREFIX = f"{RUN_PREFIX}/callbacks/"
_SUMS = f"{RUN_PREFIX}/{ACCUMULATED_PREFIX}"
# Tensors with these name prefixes are optional: a callback may enable loss scaling
# later, for example. If a checkpoint has such tensors and the model has not, this
# warning is shown. Features add prefixes by `Feature.optional_tensors`.
_OPTIONAL = {
    f"{LOSS_SCALE_PREFIX}/": (
        "The loss scale of the checkpoint was not restored: the optimizer has none. "
        "To continue with it, scale the loss before `restore`: "
        '`DistributedOptimizer(..., loss_scale="dynamic")`.'
    ),
    f"{_SUMS}/": (
        "This backup was saved between the micro-batches of an update. Their "
        "accumulated gradients were not restored; `BackupAndRestore` in `fit` restores "
        "them."
    ),
}


def checkpoint_tensors(model: keras.Model) -> list[StateTensor]:
    """Return the state tensors of a model that a checkpoint saves.

    They are those of weights, optimizers and gradient compressors, and those of
    accumulated gradients if there are any.
    """
    tensors = model_state(model) + residual_tensors(model)
    return tensors + (accumulated_state(model) if num_accumulated(model) else [])


def plan_checkpoint(model: keras.Model, index: Index) -> LoadPlan:
    """Plan which tensors to read from a checkpoint, or from a backup used as one.

    Args:
        model: Built Keras model.
        index: `Index` of the checkpoint.

    Raises:
        ValueError: If the checkpoint has accumulated gradients or optimizers that the
            model has no variables for.
    """
    saved = [entry.name for entry in index.tensors]
    _check_other_optimizers_built(model, saved)
    accumulated = accumulated_state(model)
    if not accumulated and any(n.startswith(f"{ACCUMULATED_PREFIX}/") for n in saved):
        raise ValueError(
            "it was saved between the micro-batches of an update, but the optimizer "
            "does not accumulate; give it `accumulation_steps` before `restore`"
        )
    tensors, left_out = _match_other_optimizers(model_state(model), saved)
    optional = dict(_OPTIONAL)
    for feature in overriders(Feature.optional_tensors):
        optional |= feature.optional_tensors()
    names, may_miss = set(saved), (*optional, f"{ACCUMULATED_PREFIX}/")
    # Accumulated gradients come last: they are multiplied by the loss scale when they
    # are restored, so the loss scale must be restored before.
    tensors = [
        tensor
        for tensor in (*tensors, *accumulated)
        if tensor.name in names or not tensor.name.startswith(may_miss)
    ]
    own = {tensor.name for tensor in tensors}
    for prefix, text in optional.items():
        unused = [n for n in saved if n.startswith(prefix) and n not in own]
        if unused:
            user_code.warn(text)
        left_out += unused
    left_out += [name for name in saved if name.startswith(f"{RUN_PREFIX}/")]
    return _load_plan(model, index, tensors, left_out)


def run_facts(model: Any) -> dict[str, Any]:
    """Return what a backup's tensors depend on, as a dict for JSON.

    Its fields are the number of replicas, the labels of optimizer features with saved
    variables, the names of the metrics' variables, and the function that merges each.
    """
    return {
        "replicas": local_replicas(model).count,
        "features": _features_with_state(model),
        "metrics": _metric_names(model),
        "merges": [item.merge for item in metric_variables(model)],
    }


def backup_tensors(
    model: Any, arrays: dict[str, np.ndarray], *, in_epoch: bool
) -> list[StateTensor]:
    """Return the tensors of a backup of the current state.

    Args:
        model: Built Keras model, in `fit`.
        arrays: Dict from names to the arrays of callbacks.
        in_epoch: Bool, whether metrics are included, as in an unfinished epoch.
    """
    replicas = local_replicas(model)
    tensors = _common_tensors(model, arrays) + residual_tensors(model)
    if num_accumulated(model):
        tensors += _accumulated_tensors(model, replicas.count)
    if in_epoch:
        tensors += per_replica_tensors(metric_variables(model), replicas)
    return tensors


class IncompatibleBackup(ValueError):
    """Error: the backup is intact, but this run cannot resume from it."""


@contextlib.contextmanager
def _as_incompatible() -> Iterator[None]:
    """Turn a `ValueError` in the block into `IncompatibleBackup`, except `Malformed`.

    `Malformed` means that the backup is damaged; any other `ValueError` means that it
    is of another model.
    """
    try:
        yield
    except schema.Malformed:
        raise
    except ValueError as error:
        raise IncompatibleBackup(str(error)) from error


@_as_incompatible()
def plan_backup(
    model: Any,
    arrays: dict[str, np.ndarray],
    index: Index,
    facts: dict[str, Any],
    *,
    with_metrics: bool,
) -> LoadPlan:
    """Plan which tensors to read from a backup.

    Args:
        model: Built Keras model, in `fit`.
        arrays: Dict from names to arrays, into which the arrays of callbacks are read.
        index: `Index` of the backup.
        facts: Dict, the result of `run_facts` in the saved run.
        with_metrics: Bool, whether metrics are read, to continue within an epoch.

    Raises:
        IncompatibleBackup: If it is not of this model.
        schema.Malformed: If its metadata is invalid.
    """
    saved = [entry.name for entry in index.tensors]
    tensors, left_out = _match_other_optimizers(_common_tensors(model, arrays), saved)
    has_sums = any(name.startswith(f"{_SUMS}/") for name in saved)
    count = facts["replicas"]
    if has_sums or with_metrics:
        # A state tensor is created for each saved replica, so a damaged count could
        # exhaust the memory. The count cannot exceed the number of tensors in the file.
        most = max(len(index.tensors), 1)
        schema.check(count, range(1, most + 1), "run.facts.replicas")
    if has_sums:
        tensors += _saved_sums(_accumulated_tensors(model, count), saved)
    if with_metrics:
        metrics = metric_variables(model, facts["merges"])
        tensors += per_replica_tensors(metrics, local_replicas(model), count)
    else:
        left_out += [name for name in saved if name.startswith(f"{_METRICS}/")]
    label = "within the epoch" if with_metrics else "at its start"
    plan = _load_plan(model, index, tensors, left_out, arrays=arrays, label=label)
    own = _features_with_state(model)
    # Backups of the first versions do not list their features, so those of this run are
    # assumed.
    saved_with = facts.get("features", own)
    for name in sorted({*own} ^ {*saved_with}):
        how, where = ("without", "has") if name in own else ("with", "lacks")
        raise ValueError(f"it was saved {how} {name}, which this run {where}")
    check_model(index, plan)
    if with_metrics:
        # `zip` must not be strict, since the first versions saved no names of metrics.
        # `check_model` has already compared the number of variables.
        names = facts.get("metrics", []), _metric_names(model)
        for then, now in zip(*names, strict=False):
            if then != now:
                raise ValueError(
                    f"the metrics of its epoch differ: {then!r:.80} is {now!r} now"
                )
    return plan


def _load_plan(
    model: Any,
    index: Index,
    tensors: list[StateTensor],
    left_out: list[str],
    **more: Any,
) -> LoadPlan:
    """Create a load plan of some tensors and of the state of compressors.

    Args:
        model: Built Keras model.
        index: `Index` of the checkpoint or backup.
        tensors: List of `StateTensor` to read into.
        left_out: List of strings, names of saved tensors that are not read.
        **more: Further fields of `LoadPlan`.
    """
    residuals = plan_residuals(model, index)
    return LoadPlan(
        tensors + residuals.tensors,
        left_out + residuals.left_out,
        functools.partial(clear_accumulated, model),
        residuals.finish,
        **more,
    )


def _check_other_optimizers_built(model: keras.Model, saved: Sequence[str]) -> None:
    """Raise if another optimizer than `model.optimizer` was saved, but is not built.

    Args:
        model: Built Keras model.
        saved: Sequence of strings, names of the saved tensors.
    """
    names = {_other_optimizer(name) for name in saved}
    for name, optimizer in other_optimizers(model).items():
        if name in names and not optimizer.built:
            raise ValueError(
                "The state of another optimizer of the model was saved, but it has no "
                "variables yet. Build it first, in the scope, for the variables that "
                f"it trains. Received: the attribute {name!r}"
            )


def _match_other_optimizers(
    tensors: Sequence[StateTensor], saved: Sequence[str]
) -> tuple[list[StateTensor], list[str]]:
    """Skip optimizers that only the model or only the file has, with a warning.

    This is about optimizers other than `model.optimizer`, such as those of a GAN.

    Args:
        tensors: Sequence of `StateTensor` of the model.
        saved: Sequence of strings, names of the saved tensors.

    Returns:
        Tuple of the tensors to read, and the names of saved tensors to skip.
    """
    own = {_other_optimizer(tensor.name) for tensor in tensors} | {None}
    theirs = {_other_optimizer(name) for name in saved} | {None}
    for names, text in (
        (
            theirs - own,
            "was not restored: the optimizer does not exist, or is built by its first "
            "step",
        ),
        (own - theirs, "was not saved; it keeps its current values"),
    ):
        if names:
            listed = ", ".join(repr(name) for name in sorted(map(str, names)))
            user_code.warn(
                f"The state of another optimizer of the model ({listed}) {text}."
            )
    kept = [tensor for tensor in tensors if _other_optimizer(tensor.name) in theirs]
    return kept, [name for name in saved if _other_optimizer(name) not in own]


def _other_optimizer(name: str) -> str | None:
    """Return the model's attribute of the other optimizer that a tensor belongs to.

    Args:
        name: String, name of the tensor.

    Returns:
        String, or `None` for a tensor of `model.optimizer` or of no optimizer.
    """
    first, _, rest = name.partition("/")
    return rest.partition("/")[0] if first == OTHERS_PREFIX else None


def _common_tensors(model: Any, arrays: dict[str, np.ndarray]) -> list[StateTensor]:
    """Return the tensors that every backup has.

    They are those of weights, optimizers and the counters of the logs, and the arrays
    of callbacks.
    """
    tensors = model_state(model)
    for name, variable in _counters(model).items():
        tensors.append(replicated(model, f"{RUN_PREFIX}/counters/{name}", variable))
    for name, array in arrays.items():
        view, full_name = _array_view(array), f"{CALLBACKS_PREFIX}{name}"
        tensors.append(replicated(model, full_name, view, array.dtype.name))
    return tensors


def _accumulated_tensors(model: Any, saved_count: int) -> list[StateTensor]:
    """Return the tensors of accumulated gradients for a backup.

    The sums are saved as they are, multiplied by the loss scale.

    Args:
        model: Built Keras model.
        saved_count: Int, number of replicas in the backup. If this run has another
            number, sums that differ between replicas are merged when they are read.
    """
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


def _saved_sums(tensors: list[StateTensor], saved: Sequence[str]) -> list[StateTensor]:
    """Give tensors of accumulated gradients the names under which they were saved.

    ZeRO-2 and 3 save one sum over all replicas, in shards. A run on a single replica
    shards nothing, and saves the replica's own sum under another name. If one sum was
    saved for all replicas, and this run has a sum for each, only replica 0 restores it:
    the tensors of other replicas are not returned.

    Args:
        tensors: List of `StateTensor`, from `_accumulated_tensors`.
        saved: Sequence of strings, names of the saved tensors.
    """
    names, result = set(saved), []
    for tensor in tensors:
        sum_name, _, rank = tensor.name.rpartition("/replica")
        if tensor.name not in names and sum_name in names:
            if rank == "0":
                result.append(renamed(tensor, sum_name))
        elif tensor.name not in names and f"{tensor.name}/replica0" in names:
            result.append(renamed(tensor, f"{tensor.name}/replica0"))
        else:
            result.append(tensor)
    return result


def _metric_names(model: Any) -> list[str]:
    """Return the names of the variables of a model's metrics, such as `"mae/total"`.

    The numbers that Keras appends to make names unique in a process are left out.
    """
    return [
        re.sub(r"_\d+(?=/)", "", variable.path)
        for variable in keras_model.metric_variables(model)
    ]


def metric_variables(
    model: Any, merges: list[str] | None = None
) -> list[PerReplicaVariable]:
    """Return the variables of a model's metrics, and how replicas' values are merged.

    The merge functions are also stored in the variables.

    Args:
        model: Keras model.
        merges: List of strings, for each variable `"sum"`, `"max"` or `"min"`, how the
            values of replicas are merged, as a backup has it. With `None`, the default,
            or a list of another length, it is what the trace of a step has found.

    Returns:
        List of `PerReplicaVariable`.
    """
    variables = keras_model.metric_variables(model)
    traced = [getattr(variable.value, "merge", "sum") for variable in variables]
    kinds = traced if merges is None or len(merges) != len(traced) else merges
    for variable, kind in zip(variables, kinds, strict=True):
        if hasattr(variable.value, "merge"):
            # The trace of a step finds the merge function, but a run that resumes
            # within an epoch may not trace such a step, so the backup's function is
            # used.
            variable.value.merge = kind
    return [
        PerReplicaVariable(f"{_METRICS}/{number}", variable, kind)
        for number, (variable, kind) in enumerate(zip(variables, kinds, strict=True))
    ]


def _features_with_state(model: Any) -> list[str]:
    """Return labels of optimizer features with saved variables: `"a loss scale"`."""
    found = [] if loss_scale_of(model.optimizer) is None else ["a loss scale"]
    features = installed_features(model.optimizer)
    return found + [each.label for each in features if each.counters or each.state]


def _counters(model: Any) -> dict[str, Any]:
    """Return the variables, by name, in which the optimizer counts for the logs.

    An example is the number of steps skipped for an overflow. Only backups save them.
    """
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


def _array_view(array: np.ndarray) -> VariableView:
    """Return an object that is read and assigned like a variable, for an array."""

    def write(value: Any) -> None:
        """Copy values into `array`, in its shape."""
        array[...] = np.asarray(value).reshape(array.shape)

    return VariableView("", array.shape, lambda: array, write)
