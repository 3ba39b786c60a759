"""Several variables of a replica as one flat tensor, for an optimizer to update."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.training.reduction.fusion import pack, unpack

_ids = itertools.count()


class FlatParameter:
    """Several small variables that an optimizer updates as one.

    It is read once, changed as a tensor, and written back once.

    Args:
        variables: Sequence of `tf.Variable`s of one replica and one dtype.
        value: Flat tensor, their value where that is known, or `None`. Defaults to
            `None`.
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
        # What is left to subtract where the value was never asked for.
        self._subtrahend: tf.Tensor | None = None
        self._is_changed = False

    @property
    def value(self) -> FlatParameter:
        """Itself: that of a Keras variable is live too, not what it was when asked.

        ScheduleFreeAdamW keeps a slot's `value` and assigns to the slot before it
        reads what it kept.
        """
        return self

    def read_value(self) -> tf.Tensor:
        """Flat tensor `[sum of sizes]`, the value as changed so far."""
        if self._tensor is None:
            value = pack([v.read_value() for v in self._variables])
            subtrahend, self._subtrahend = self._subtrahend, None
            if subtrahend is None:
                self._tensor = value
            else:
                self.assign(value - subtrahend)
        return self._tensor

    def assign(self, value: Any) -> None:
        """Set the value."""
        self._tensor, self._subtrahend = tf.cast(value, self.dtype), None
        self._is_changed = True

    def assign_add(self, value: Any) -> None:
        """Add to the value."""
        self.assign(self.read_value() + tf.cast(value, self.dtype))

    def assign_sub(self, value: Any) -> None:
        """Subtract from the value; the variables do it themselves where they can."""
        value = tf.cast(value, self.dtype)
        if self._tensor is None and self._subtrahend is None:
            self._subtrahend = value
        else:
            self.assign(self.read_value() - value)

    def write_back(self) -> None:
        """Give the variables their parts of the value, if it was changed."""
        if self._subtrahend is not None:
            for variable, part in self._parts_of(self._subtrahend):
                variable.assign_sub(part, read_value=False)
        elif self._is_changed:
            for variable, part in self._parts_of(self.read_value()):
                variable.assign(part, read_value=False)

    def _parts_of(self, flat: tf.Tensor) -> zip:
        return zip(self._variables, unpack(flat, self._variables), strict=True)

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        del name
        value = self.read_value()
        return value if dtype is None else tf.cast(value, dtype)


class TensorView(FlatParameter):
    """Tensor that an optimizer updates like a variable; its new value is read.

    Args:
        value: Flat tensor.
    """

    def __init__(self, value: tf.Tensor) -> None:
        super().__init__((), value)

    def scatter_update(self, rows: tf.IndexedSlices) -> None:
        """Set single elements, as a `tf.Variable` does."""
        self.assign(_scattered(tf.tensor_scatter_nd_update, self, rows))

    def scatter_add(self, rows: tf.IndexedSlices) -> None:
        """Add to single elements."""
        self.assign(_scattered(tf.tensor_scatter_nd_add, self, rows))

    def scatter_sub(self, rows: tf.IndexedSlices) -> None:
        """Subtract from single elements."""
        self.assign(_scattered(tf.tensor_scatter_nd_sub, self, rows))


class FlatParameterRange(TensorView):
    """A part of a flat variable, written back once.

    Args:
        variable: `tf.Variable` of one dimension.
        start: Int, the first element.
        stop: Int, one after the last.
    """

    def __init__(self, variable: tf.Variable, start: int, stop: int) -> None:
        super().__init__(variable.read_value()[start:stop])
        self._variable, self._start, self._stop = variable, start, stop

    def write_back(self) -> None:
        """Give the variable its part of the value, if it was changed."""
        if self._is_changed:
            self._variable[self._start : self._stop].assign(self.read_value())


def _scattered(
    operation: Callable, view: TensorView, rows: tf.IndexedSlices
) -> tf.Tensor:
    indices = rows.indices[:, tf.newaxis]  # [elements, 1]
    return operation(view.read_value(), indices, tf.cast(rows.values, view.dtype))


def _operator(name: str) -> Callable:
    def apply(view: FlatParameter, *others: Any) -> tf.Tensor:
        return getattr(view.read_value(), name)(*others)

    return apply


_OPERATORS = ("add", "sub", "mul", "truediv", "pow")
_REFLECTED = [f"r{name}" for name in _OPERATORS]
for _name in (*_OPERATORS, *_REFLECTED, "neg"):
    setattr(FlatParameter, f"__{_name}__", _operator(f"__{_name}__"))
