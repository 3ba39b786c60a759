"""Terms of a loss, each scaled so that replicas together have one device's gradients.

Gradients are summed after each replica's are multiplied by its fraction of all rows.
That is right for a mean over rows. A sum over rows, or a loss that a user has divided
by the number of replicas, is divided by that fraction first; where a loss is the sum
of both, each term by itself. `tfdp.losses.row_forms` tells which is which.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp.base import batch_weight, program_trace
from tfdp.losses.global_statistics import global_statistic
from tfdp.losses.row_forms.form import MEAN, PAIRS, Form, Kind
from tfdp.losses.row_forms.forms import Forms
from tfdp.losses.row_forms.rules import CALLS, LOOPS
from tfdp.parameters.gathers import backward_pass, marked_backward_pass

# A log is worth less communication than a loss.
_MOST_ELEMENTS_OF_LOG = 1024
# Operations inside which the terms of a loss cannot be told apart.
_OPAQUE = (*CALLS, *LOOPS)


def gradient(
    original: Callable,
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """Replace `tf.GradientTape.gradient`: gradients of a loss as a mean over rows."""
    if (trace := program_trace.current()) is not None:
        trace.losses += tf.nest.flatten(target)
        with backward_pass() if trace.is_eager else marked_backward_pass(trace):
            return original(
                tape, target, sources, output_gradients, unconnected_gradients
            )
    with backward_pass():
        gradients = _gradient(
            original, tape, target, sources, output_gradients, unconnected_gradients
        )
    if _has_variables(sources):
        for tensor in tf.nest.flatten(gradients):
            # What a step logs of it, such as a norm, is that of a mean over rows.
            set_form(tensor, MEAN)
    return gradients


def _gradient(
    original: Callable,
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any,
    unconnected_gradients: Any,
) -> Any:
    forms = batch_weight.forms()
    if forms is None or not _has_variables(sources):
        return original(tape, target, sources, output_gradients, unconnected_gradients)
    targets, factors = [], []
    given = _given(target, output_gradients)
    for tensor, outer in given:
        for term, factor in _terms(forms, tensor):
            targets.append(term)
            factors.append(_times(outer, factor, term))
    if all(factor is None for factor in factors):
        return original(tape, targets, sources, None, unconnected_gradients)
    seeds = [
        tf.ones_like(term) if factor is None else factor
        for term, factor in zip(targets, factors, strict=True)
    ]
    return original(tape, targets, sources, seeds, unconnected_gradients)


def scale_to_row_mean(value: Any) -> Any:
    """Scale a scalar so that its mean, weighted by rows, is that of one device.

    Args:
        value: Scalar tensor of a replica's step; anything else is left as it is.

    Returns:
        Scalar tensor, float64 for a count or a sum of integers.
    """
    forms = batch_weight.forms()
    if forms is None or not tf.is_symbolic_tensor(value) or value.shape.rank != 0:
        return value
    number = tf.cast(value, tf.float64) if value.dtype.is_integer else value
    if forms.of(number).kind is Kind.STATISTIC and number.dtype.is_floating:
        found = global_statistic(forms, number, _mean_of, _MOST_ELEMENTS_OF_LOG)
        if found is not None:
            return found.value
    mean = _mean_of(number)
    return value if mean is number else mean


def _mean_of(number: Any) -> Any:
    """Scale a floating tensor that is linear in means and sums to a mean over rows."""
    forms = batch_weight.forms()
    assert forms is not None
    terms = _terms(forms, number, is_log=True)
    if all(factor is None for _, factor in terms):
        return number
    return tf.add_n([t if factor is None else t * factor for t, factor in terms])


def _parts_of_statistic(
    forms: Forms, term: Any, coefficient: Any
) -> list[tuple[Any, Any]]:
    """Return the terms of a function of means and sums, with their derivatives."""
    found = global_statistic(forms, term, _mean_of)
    if found is None:
        return []
    parts = []
    for value, derivative in zip(found.inputs, found.derivatives, strict=True):
        outer = derivative
        if coefficient is not None:
            outer *= tf.cast(coefficient, outer.dtype)
        for part, factor in _terms(forms, value, is_log=True):
            parts.append((part, outer if factor is None else outer * factor))
    return parts


def set_form(tensor: Any, form: Form) -> None:
    """Set the form of a tensor of this thread's step, whatever its operation."""
    forms = batch_weight.forms()
    if forms is not None and tf.is_symbolic_tensor(tensor):
        forms.set(tensor, form)


def set_mean(loss: Any, values: Any = None) -> None:
    """Set the form of a loss to a mean over rows, whatever its masks and weights.

    Args:
        loss: Tensor.
        values: Tensor of which it is a mean, or `None`. Defaults to `None`.
    """
    forms = batch_weight.forms()
    if forms is not None:
        compares = values is not None and forms.of(values).kind is Kind.PAIRS
        set_form(loss, PAIRS if compares else MEAN)


def _given(target: Any, output_gradients: Any) -> list[tuple[Any, Any]]:
    targets = tf.nest.flatten(target)
    if output_gradients is None:
        return [(tensor, None) for tensor in targets]
    return list(zip(targets, tf.nest.flatten(output_gradients), strict=True))


def _times(outer: Any, factor: Any, term: Any) -> Any:
    """Return the initial gradient of a term for the tape, or `None` for ones."""
    if factor is None:
        return outer
    outer = tf.ones_like(term) if outer is None else tf.cast(outer, term.dtype)
    return outer * factor


def _has_variables(sources: Any) -> bool:
    """Return whether a gradient is for an optimizer, and not of an input, say."""
    kinds = (tf.Variable, keras.Variable)
    return any(isinstance(source, kinds) for source in tf.nest.flatten(sources))


def _terms(forms: Forms, tensor: Any, *, is_log: bool = False) -> list[tuple[Any, Any]]:
    """Return the terms of a loss, with the factor that makes each a mean, or `None`.

    Args:
        forms: `Forms`.
        tensor: The loss, or a number to log.
        is_log: Bool. The rows of a loss that has them are added up by the tape, and a
            loss that no factor makes right is worth a warning.
    """
    if not tf.is_symbolic_tensor(tensor) or not tensor.dtype.is_floating:
        return [(tensor, None)]
    found = []
    for term, coefficient, replica_power in _split(forms, tensor):
        form = forms.of(term)
        if form.kind is Kind.STATISTIC and not is_log:
            parts = _parts_of_statistic(forms, term, coefficient)
            if parts:
                found += parts
                continue
        if not is_log:
            _warn_of_unsupported(forms, term, form)
        extra = not is_log and form.kind is Kind.ROWS
        form = dataclasses.replace(
            form,
            degree=form.degree + extra,
            replica_power=form.replica_power + replica_power,
        )
        factor = _factor(forms, form, term.dtype)
        if coefficient is not None:
            factor = coefficient if factor is None else coefficient * factor
        found.append((term, factor))
    return found


def _factor(forms: Forms, form: Form, dtype: tf.DType) -> Any:
    """Return the factor that makes a term a mean over rows, or `None`."""
    factor = None
    if form.degree == 1 and form.kind in (Kind.COUNT, Kind.TOTAL, Kind.ROWS):
        weight = batch_weight.current()
        factor = tf.math.divide_no_nan(tf.ones([], tf.float64), weight)
    if form.replica_power:
        replica_power = float(forms.num_replicas) ** -form.replica_power
        factor = replica_power if factor is None else factor * replica_power
    return None if factor is None else tf.cast(factor, dtype)


def _split(forms: Forms, tensor: Any) -> list[tuple[Any, Any, int]]:
    """Split a sum of different forms into its loss_terms.

    Returns:
        List of tuples: a term, its coefficient or `None`, and the power of the number
        of replicas that a user has put into the coefficient.
    """
    if forms.of(tensor).kind is not Kind.TERMS or tensor.op.type in _OPAQUE:
        return [(tensor, None, 0)]
    found = []
    for source, outer, replica_power in _linear_inputs(forms, tensor.op):
        for term, inner, power in _split(forms, source):
            both = [tf.cast(c, term.dtype) for c in (outer, inner) if c is not None]
            coefficient = tf.reduce_prod(both) if both else None
            found.append((term, coefficient, replica_power + power))
    return found


def _linear_inputs(forms: Forms, op: Any) -> list[tuple[Any, Any, int]]:
    """Return the summands of an operation with their coefficients, see `_split`."""
    inputs = list(op.inputs)
    if op.type in ("Add", "AddV2", "AddN", "Pack"):
        return [(tensor, None, 0) for tensor in inputs]
    if op.type == "Sub":
        return [(inputs[0], None, 0), (inputs[1], -1.0, 0)]
    if op.type == "Neg":
        return [(inputs[0], -1.0, 0)]
    if op.type == "Mul":
        first, second = inputs
        if forms.of(second).kind is Kind.TERMS:
            first, second = second, first
        return [(first, second, min(0, forms.replica_power_of(second)))]
    if op.type in ("RealDiv", "DivNoNan"):
        reciprocal = tf.math.reciprocal_no_nan(inputs[1])
        return [(inputs[0], reciprocal, min(0, -forms.replica_power_of(inputs[1])))]
    if op.type == "Mean":
        return [(inputs[0], 1.0 / inputs[0].shape.num_elements(), 0)]
    return [(inputs[0], None, 0)]


def _warn_of_unsupported(forms: Forms, term: Any, form: Form) -> None:
    """Warn, once for a model, of a loss that cannot be that of one device."""
    if form.kind in (Kind.COUNT, Kind.ROWS, Kind.TOTAL):
        return
    origin = forms.origin(term)
    if origin.type in _OPAQUE and form.kind is not Kind.PAIRS:
        _warn_of_function(forms, origin.name)
    elif form.kind is Kind.PAIRS and forms.should_warn("pairs"):
        warnings.warn(
            "A loss compares rows of a batch with each other or with their mean, or "
            f"selects some (operation {origin.name!r}), so that replicas that each see "
            "their own rows do not get that of one device. Compute it from the rows of "
            "all replicas, by `tfdp.all_gather`; of some rows, as a sum over a mask "
            "divided by the sum of the mask.",
            stacklevel=2,
        )
    elif form.kind is Kind.STATISTIC and forms.should_warn("statistic"):
        warnings.warn(
            "A loss depends on single rows of a batch, by their maximum or the like "
            f"(operation {origin.name!r}), so that replicas that each see their own "
            "rows do not get that of one device. Compute it from the rows of all "
            "replicas, by `tfdp.all_gather`.",
            stacklevel=2,
        )


def _warn_of_function(forms: Forms, name: str) -> None:
    """Warn, once for a model, of a loss whose terms cannot be told apart."""
    if forms.should_warn("function"):
        warnings.warn(
            "A loss is made inside a function, a branch or a loop (operation "
            f"{name!r}) in a way that tfdp cannot take apart, and is taken for a mean "
            "over rows. If it is no mean, compute it outside, in the step itself.",
            stacklevel=2,
        )
