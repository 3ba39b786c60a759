"""Flat parameters: several variables of a replica that are updated as one tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.training.reduction.fusion import pack, unpack

_ids = itertools.count()


class FlatParameter:
    """Several small variables that an optimizer updates as one.

    The variables are read once, changed as a tensor, and written once.

    Args:
        variables: Sequence of `tf.Variable`s of one replica and one dtype.
        value: Flat tensor, the value of the variables if it is known, or `None`.
            Defaults to `None`.
    """

    def __init__(
        self, variables: Sequence[tf.Variable], value: tf.Tensor | None = None
    ) -> None:
        sizes = [v.shape.num_elements() for v in variables]
        self.dtype = variables[0].dtype if value is None else value.dtype
        self.shape = tf.TensorShape([sum(sizes)]) if value is None else value.shape
        self.name = self.path = f"flat_{next(_ids)}"
        self._unique_id = self.name
        self._variables = variables
        self._tensor = value
        # A subtraction that stays pending until the value is read. If the value is not
        # read, `write_back` subtracts by `assign_sub`, which copies no variable.
        self._subtrahend: tf.Tensor | None = None
        self._is_changed = False

    @property
    def value(self) -> FlatParameter:
        """The flat parameter itself, which later assignments change.

        The `value` of a Keras variable is live as well: ScheduleFreeAdamW keeps a
        slot's `value`, assigns to the slot and then reads the kept value.
        """
        return self

    def read_value(self) -> tf.Tensor:
        """Return the current value, a flat tensor `[sum of sizes]`."""
        if self._tensor is None:
            value = pack([v.read_value() for v in self._variables])
            subtrahend, self._subtrahend = self._subtrahend, None
            if subtrahend is None:
                self._tensor = value
            else:
                self.assign(value - subtrahend)
        return self._tensor

    def assign(self, value: Any) -> None:
        """Set the value of all variables together; they change in `write_back`.

        `value` is a flat tensor `[sum of sizes]`.
        """
        self._tensor, self._subtrahend = tf.cast(value, self.dtype), None
        self._is_changed = True

    def assign_add(self, value: Any) -> None:
        """Add a flat tensor to the value; variables change in `write_back`."""
        self.assign(self.read_value() + tf.cast(value, self.dtype))

    def assign_sub(self, value: Any) -> None:
        """Subtract a flat tensor from the value; variables change in `write_back`."""
        value = tf.cast(value, self.dtype)
        if self._tensor is None and self._subtrahend is None:
            self._subtrahend = value
        else:
            self.assign(self.read_value() - value)

    def write_back(self) -> None:
        """Assign a changed value to the variables, to each its part."""
        if self._subtrahend is not None:
            for variable, part in self._parts_of(self._subtrahend):
                variable.assign_sub(part, read_value=False)
        elif self._is_changed:
            for variable, part in self._parts_of(self.read_value()):
                variable.assign(part, read_value=False)

    def _parts_of(self, flat: tf.Tensor) -> zip:
        """Return pairs of a variable and its part of a flat tensor."""
        return zip(self._variables, unpack(flat, self._variables), strict=True)

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        del name
        value = self.read_value()
        return value if dtype is None else tf.cast(value, dtype)


class TensorView(FlatParameter):
    """Tensor that an optimizer updates like a variable.

    The caller takes the updated tensor by `read_value`; no variable is changed.

    Args:
        value: Flat tensor.
    """

    def __init__(self, value: tf.Tensor) -> None:
        super().__init__((), value)

    def scatter_update(self, rows: tf.IndexedSlices) -> None:
        """Set the elements at `rows.indices` to `rows.values`."""
        self.assign(_scattered(tf.tensor_scatter_nd_update, self, rows))

    def scatter_add(self, rows: tf.IndexedSlices) -> None:
        """Add `rows.values` to the elements at `rows.indices`."""
        self.assign(_scattered(tf.tensor_scatter_nd_add, self, rows))

    def scatter_sub(self, rows: tf.IndexedSlices) -> None:
        """Subtract `rows.values` from the elements at `rows.indices`."""
        self.assign(_scattered(tf.tensor_scatter_nd_sub, self, rows))


class FlatParameterRange(TensorView):
    """Range of a flat variable that an optimizer updates; `write_back` assigns it.

    Args:
        variable: `tf.Variable` of one dimension.
        start: Int, index of the first element.
        stop: Int, one more than the index of the last element.
    """

    def __init__(self, variable: tf.Variable, start: int, stop: int) -> None:
        super().__init__(variable.read_value()[start:stop])
        self._variable, self._start, self._stop = variable, start, stop

    def write_back(self) -> None:
        """Assign a changed value to the range of the variable."""
        if self._is_changed:
            self._variable[self._start : self._stop].assign(self.read_value())


def _scattered(
    operation: Callable, view: TensorView, rows: tf.IndexedSlices
) -> tf.Tensor:
    """Return the value of a view after a scatter operation.

    Args:
        operation: Function of TensorFlow, such as `tf.tensor_scatter_nd_add`.
        view: `TensorView`.
        rows: `tf.IndexedSlices` of single elements.
    """
    # TensorFlow's scatter operations take one index vector for each element, so the
    # indices need the shape [elements, 1].
    indices = rows.indices[:, tf.newaxis]
    return operation(view.read_value(), indices, tf.cast(rows.values, view.dtype))


def _operator(name: str) -> Callable:
    """Return a Python operator for flat parameters, which acts on their current values.

    Args:
        name: String, name of the operator's method, such as `"__add__"`.
    """

    def apply(view: FlatParameter, *others: Any) -> tf.Tensor:
        """Apply the operator to the current value and the other operands."""
        return getattr(view.read_value(), name)(*others)

    return apply


_OPERATORS = ("add", "sub", "mul", "truediv", "pow")
_REFLECTED = [f"r{name}" for name in _OPERATORS]
for _name in (*_OPERATORS, *_REFLECTED, "neg"):
    setattr(FlatParameter, f"__{_name}__", _operator(f"__{_name}__"))
