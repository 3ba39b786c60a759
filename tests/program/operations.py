"""The operations that random programs are composed of.

An operation is a function of the values of a program and of arguments that JSON can
hold, and a function that chooses both. Whether a choice is valid is found out by
computing it; a size is a number or, where it grows with the rows, a string.
"""

from __future__ import annotations

import dataclasses
import random
import string
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

FLOAT, INT, BOOL = "float", "int", "bool"
# Entries that no index reaches beyond.
SMALL = 3


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a value while a program is composed.

    Args:
        dtype: String: `"float"`, `"int"` or `"bool"`.
        shape: Tuple of ints, and of strings where a size depends on the rows.
    """

    dtype: str
    shape: tuple[Any, ...]

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)


Choice = tuple[list[int], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation.

    Args:
        apply: Callable of the tensors and of the arguments by name.
        choose: Callable of `random.Random` and a list of `Known`, which returns the
            indices of the inputs and the arguments, or `None`.
        weight: Int, how often it is tried.
        needs_state: Bool, whether it gets the `State` of the program first.
    """

    apply: Callable[..., Any]
    choose: Callable[[random.Random, Sequence[Known]], Choice | None]
    weight: int = 1
    needs_state: bool = False


OPERATIONS: dict[str, Operation] = {}


def operation(
    choose: Callable, *, weight: int = 1, needs_state: bool = False
) -> Callable:
    """Enter a function into the table, by its name."""

    def enter(apply: Callable) -> Callable:
        name = apply.__name__.strip("_")
        OPERATIONS[name] = Operation(apply, choose, weight, needs_state)
        return apply

    return enter


# How inputs are chosen.


def _indices(
    pool: Sequence[Known], dtype: str | None, least: int, most: int
) -> list[int]:
    return [
        index
        for index, known in enumerate(pool)
        if dtype in (None, known.dtype) and least <= known.rank <= most
    ]


def pick(
    r: random.Random,
    pool: Sequence[Known],
    dtype: str | None = FLOAT,
    least: int = 0,
    most: int = 4,
) -> int | None:
    """Choose a value, most often one of the last."""
    found = _indices(pool, dtype, least, most)
    if not found:
        return None
    return r.choice(found[-6:] if r.random() < 0.6 else found)


def one(dtype: str | None = FLOAT, least: int = 0, most: int = 4, **arguments: Any):
    """Choose one value, and each argument by its function of a value's rank."""

    def choose(r: random.Random, pool: Sequence[Known]) -> Choice | None:
        index = pick(r, pool, dtype, least, most)
        if index is None:
            return None
        known = pool[index]
        return [index], {name: make(r, known) for name, make in arguments.items()}

    return choose


def two(dtype: str = FLOAT, least: int = 0, **arguments: Any) -> Callable:
    """Choose two values that broadcast to one shape."""

    def choose(r: random.Random, pool: Sequence[Known]) -> Choice | None:
        first = pick(r, pool, dtype, least)
        if first is None:
            return None
        others = [
            i
            for i in _indices(pool, dtype, least, 4)
            if _broadcast(pool[first].shape, pool[i].shape)
        ]
        second = r.choice(others)
        pair = [first, second] if r.random() < 0.5 else [second, first]
        known = pool[first]
        return pair, {name: make(r, known) for name, make in arguments.items()}

    return choose


def _broadcast(one: tuple, other: tuple) -> bool:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def of(*options: Any) -> Callable:
    """Choose one of some options."""
    return lambda r, known: r.choice(options)


def axis(*, of_result: bool = False) -> Callable:
    """Choose an axis, counted from the front or from the end."""

    def choose(r: random.Random, known: Known) -> int:
        rank = known.rank + of_result
        return r.randrange(-rank, rank)

    return choose


def some_axes(r: random.Random, known: Known) -> list[int] | None:
    """Choose axes: all, or any of them."""
    if r.random() < 0.15:
        return None
    axes = r.sample(range(known.rank), r.randint(1, known.rank))
    return [a - known.rank if r.random() < 0.3 else a for a in axes]


def permutation(r: random.Random, known: Known) -> list[int]:
    """Choose an order of the axes."""
    return r.sample(range(known.rank), known.rank)


def number(least: int, most: int) -> Callable:
    """Choose an int."""
    return lambda r, known: r.randint(least, most)


# Elements.

UNARY: dict[str, Callable[[Any], Any]] = {
    "relu": tf.nn.relu,
    "tanh": tf.tanh,
    "sigmoid": tf.sigmoid,
    "softplus": tf.math.softplus,
    "elu": tf.nn.elu,
    "selu": tf.nn.selu,
    "gelu": tf.nn.gelu,
    "leaky_relu": tf.nn.leaky_relu,
    "silu": tf.nn.silu,
    "softsign": tf.nn.softsign,
    "exp": lambda x: tf.exp(-tf.abs(x)),
    "log": lambda x: tf.math.log(tf.abs(x) + 0.5),
    "square": tf.square,
    "sqrt": lambda x: tf.sqrt(tf.abs(x) + 0.1),
    "rsqrt": lambda x: tf.math.rsqrt(tf.square(x) + 0.3),
    "reciprocal": lambda x: tf.math.reciprocal(tf.square(x) + 1.0),
    "abs": tf.abs,
    "negative": tf.negative,
    "sin": tf.sin,
    "cos": tf.cos,
    "tan": lambda x: tf.tan(tf.tanh(x)),
    "atan": tf.atan,
    "erf": tf.math.erf,
    "log1p": lambda x: tf.math.log1p(tf.abs(x)),
    "expm1": lambda x: tf.math.expm1(tf.tanh(x)),
    "lgamma": lambda x: tf.math.lgamma(tf.abs(x) + 1.0),
    "cosh": lambda x: tf.cosh(tf.tanh(x)),
    "asinh": tf.asinh,
    "clip": lambda x: tf.clip_by_value(x, -0.5, 0.7),
    "clip_by_norm": lambda x: tf.clip_by_norm(x, 2.0),
    "sign": tf.sign,
    "floor": tf.floor,
    "round": tf.round,
    "zeros_like": tf.zeros_like,
    "ones_like": tf.ones_like,
    "stop_gradient": tf.stop_gradient,
    "identity": tf.identity,
    "check": lambda x: tf.debugging.check_numerics(x, "not finite"),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": tf.add,
    "subtract": tf.subtract,
    "multiply": tf.multiply,
    "divide": lambda a, b: a / (1.0 + tf.square(b)),
    "maximum": tf.maximum,
    "minimum": tf.minimum,
    "squared_difference": tf.math.squared_difference,
    "divide_no_nan": lambda a, b: tf.math.divide_no_nan(a, tf.nn.relu(b) + 0.0),
    "xlogy": lambda a, b: tf.math.xlogy(tf.nn.relu(a), tf.abs(b) + 0.2),
    "atan2": lambda a, b: tf.atan2(a, tf.abs(b) + 0.5),
    "pow": lambda a, b: tf.pow(tf.abs(a) + 0.5, tf.tanh(b)),
    "mod": lambda a, b: tf.math.floormod(a, tf.abs(b) + 1.0),
    "addn": lambda a, b: tf.add_n([a, b]) if a.shape == b.shape else a + b,
}


@operation(one(kind=of(*UNARY)), weight=8)
def unary(x, kind):
    return UNARY[kind](x)


@operation(two(kind=of(*BINARY)), weight=8)
def binary(a, b, kind):
    return BINARY[kind](a, b)


@operation(two(kind=of("greater", "less_equal", "equal", "not_equal")), weight=2)
def compare(a, b, kind):
    return getattr(tf, kind)(a, b)


@operation(two(INT, kind=of("equal", "less", "greater_equal")))
def compare_ints(a, b, kind):
    return getattr(tf, kind)(a, b)


@operation(two(BOOL, kind=of("logical_and", "logical_or", "logical_xor")))
def logical(a, b, kind):
    return getattr(tf.math, kind)(a, b)


@operation(one(BOOL))
def logical_not(a):
    return tf.logical_not(a)


@operation(two(INT, kind=of("add", "subtract", "multiply", "maximum", "minimum")))
def ints(a, b, kind):
    return getattr(tf, kind)(a, b)


def _where(r: random.Random, pool: Sequence[Known]) -> Choice | None:
    condition, first = pick(r, pool, BOOL), pick(r, pool)
    if condition is None or first is None:
        return None
    second = two()(r, pool)
    return None if second is None else ([condition, first, second[0][0]], {})


@operation(_where, weight=3)
def where(condition, a, b):
    return tf.where(condition, a, b)


@operation(one(INT, via=of("float64", "float32")), weight=2)
def to_float(x, via):
    return tf.cast(tf.cast(x, via), tf.float64)


@operation(one(BOOL), weight=2)
def bool_to_float(x):
    return tf.cast(x, tf.float64)


@operation(one(BOOL))
def bool_to_int(x):
    return tf.cast(x, tf.int32)


@operation(one())
def to_int(x):
    return tf.cast(tf.floor(2.0 * x), tf.int32)


@operation(one())
def through_float32(x):
    return tf.cast(tf.cast(x, tf.float32), tf.float64)


# Reductions.

REDUCTIONS: dict[str, Callable] = {
    "sum": tf.reduce_sum,
    "mean": tf.reduce_mean,
    "max": tf.reduce_max,
    "min": tf.reduce_min,
    "prod": lambda x, axis, keepdims: tf.reduce_prod(tf.tanh(x) + 0.5, axis, keepdims),
    "std": lambda x, axis, keepdims: tf.sqrt(
        tf.math.reduce_variance(x, axis, keepdims) + 0.1
    ),
    "variance": tf.math.reduce_variance,
    "logsumexp": tf.reduce_logsumexp,
    "norm": lambda x, axis, keepdims: tf.sqrt(
        tf.reduce_sum(x * x, axis, keepdims) + 0.1
    ),
    "euclidean": lambda x, axis, keepdims: tf.math.reduce_euclidean_norm(
        x + 3.0, axis, keepdims
    ),
}


@operation(
    one(
        least=1,
        kind=of(*REDUCTIONS, "sum", "mean", "max"),
        axes=some_axes,
        keepdims=of(False, True),
    ),
    weight=8,
)
def reduce(x, kind, axes, keepdims):
    return REDUCTIONS[kind](x, axes, keepdims)


@operation(one(BOOL, least=1, kind=of("any", "all"), axes=some_axes, keepdims=of(0, 1)))
def reduce_bools(x, kind, axes, keepdims):
    return getattr(tf, f"reduce_{kind}")(x, axes, bool(keepdims))


@operation(one(INT, least=1, kind=of("sum", "max", "min"), axes=some_axes))
def reduce_ints(x, kind, axes):
    return getattr(tf, f"reduce_{kind}")(x, axes)


@operation(one(least=1))
def l2_loss(x):
    return tf.nn.l2_loss(x) * 0.1


@operation(one(least=1, axis=axis(), kind=of("argmax", "argmin")), weight=2)
def arg(x, axis, kind):
    return getattr(tf, kind)(x, axis, output_type=tf.int32)


@operation(one(least=1, axes=some_axes))
def moments(x, axes):
    axes = list(range(len(x.shape))) if axes is None else axes
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 0.1)


@operation(one(least=1))
def count_nonzero(x):
    return tf.math.count_nonzero(x > 0.1, dtype=tf.int32)


@operation(one(least=1, most=1))
def bincount(x):
    kept = tf.cast(tf.clip_by_value(x, 0.0, 3.0), tf.int32)
    return tf.cast(tf.math.bincount(kept, minlength=4, maxlength=4), tf.float64)


# Products of matrices.


def _matmul(r: random.Random, pool: Sequence[Known]) -> Choice | None:
    first = pick(r, pool, FLOAT, 2)
    if first is None:
        return None
    left, right = r.random() < 0.3, r.random() < 0.4
    inner = pool[first].shape[-2 if left else -1]
    others = [
        i
        for i in _indices(pool, FLOAT, 2, 4)
        if pool[i].shape[-1 if right else -2] == inner
        and _broadcast(pool[first].shape[:-2], pool[i].shape[:-2])
    ]
    if not others:
        return None
    pair = [first, r.choice(others)]
    kind = r.choice(("transpose", "adjoint"))
    return pair, {"left": left, "right": right, "kind": kind}


@operation(_matmul, weight=6)
def matmul(a, b, left, right, kind):
    flags = {f"{kind}_a": left, f"{kind}_b": right}
    return 0.5 * tf.matmul(a, b, **flags)


def _einsum(r: random.Random, pool: Sequence[Known]) -> Choice | None:
    pair = [pick(r, pool, FLOAT, 1, 3), pick(r, pool, FLOAT, 1, 3)]
    if None in pair:
        return None
    letters = iter(string.ascii_lowercase)
    first = [next(letters) for _ in pool[pair[0]].shape]
    second = []
    for size in pool[pair[1]].shape:
        shared = [
            letter
            for letter, other in zip(first, pool[pair[0]].shape, strict=True)
            if other == size and letter not in second
        ]
        second.append(
            r.choice(shared) if shared and r.random() < 0.7 else next(letters)
        )
    found = sorted(set(first + second))
    result = r.sample(found, r.randint(0, min(3, len(found))))
    equation = f"{''.join(first)},{''.join(second)}->{''.join(result)}"
    return pair, {"equation": equation}


@operation(_einsum, weight=4)
def einsum(a, b, equation):
    return 0.3 * tf.einsum(equation, a, b)


def _tensordot(r: random.Random, pool: Sequence[Known]) -> Choice | None:
    first, second = pick(r, pool, FLOAT, 1, 3), pick(r, pool, FLOAT, 1, 3)
    if first is None or second is None:
        return None
    pairs = [
        [i, j]
        for i, size in enumerate(pool[first].shape)
        for j, other in enumerate(pool[second].shape)
        if size == other
    ]
    if not pairs:
        return None
    return [first, second], {"axes": [[n] for n in r.choice(pairs)]}


@operation(_tensordot, weight=2)
def tensordot(a, b, axes):
    return 0.3 * tf.tensordot(a, b, axes)


# Layouts.


@operation(one(None, least=2, order=permutation), weight=5)
def transpose(x, order):
    return tf.transpose(x, order)


@operation(one(None, most=3, axis=axis(of_result=True)), weight=4)
def expand_dims(x, axis):
    return tf.expand_dims(x, axis)


def _ones(r: random.Random, known: Known) -> list[int]:
    return [axis for axis, size in enumerate(known.shape) if size == 1]


@operation(one(None, least=1, axes=_ones), weight=2)
def squeeze(x, axes):
    return tf.squeeze(x, axes) if axes else x


@operation(one(None, least=1), weight=2)
def flatten(x):
    return tf.reshape(x, [-1])


@operation(one(None, least=2, first=number(0, 2)), weight=4)
def merge_axes(x, first):
    """Merge an axis with the next one, by the integers of its shape."""
    shape, rank = tf.shape(x), len(x.shape)
    first = min(first, rank - 2)
    merged = shape[first] * shape[first + 1]
    target = tf.concat([shape[:first], [merged], shape[first + 2 :]], 0)
    return tf.reshape(x, target)


@operation(one(None, least=1, most=3, axis=axis(), by=of(2, 3, 4)), weight=4)
def split_axis(x, axis, by):
    """Make two axes of one."""
    shape, rank = tf.shape(x), len(x.shape)
    axis %= rank
    parts = [shape[i] for i in range(rank)]
    parts[axis : axis + 1] = [parts[axis] // by, by]
    return tf.reshape(x, parts)


@operation(one(None, least=2, last=of(1, 2, 3, 4, 12)), weight=3)
def reshape_last(x, last):
    return tf.reshape(x, [-1, last])


@operation(one(None, least=2), weight=2)
def reshape_rows(x):
    return tf.reshape(x, [tf.shape(x)[0], -1])


@operation(one(None, least=2, order=permutation))
def reshape_reordered(x, order):
    """Give a shape with the sizes in another order: other elements are neighbours."""
    return tf.reshape(x, tf.gather(tf.shape(x), order))


@operation(one(None, least=1, axes=some_axes), weight=2)
def reverse(x, axes):
    return tf.reverse(x, list(range(len(x.shape))) if axes is None else axes)


@operation(one(None, least=1, axis=axis(), shift=of(1, -1, 2)), weight=2)
def roll(x, axis, shift):
    return tf.roll(x, shift, axis)


@operation(one(None, least=1, axis=axis(), times=of(1, 2)), weight=2)
def tile(x, axis, times):
    found = [1] * len(x.shape)
    found[axis] = times
    return tf.tile(x, found)


@operation(one(None, least=1, axis=axis()))
def repeat(x, axis):
    return tf.repeat(x, 2, axis)


@operation(one(None, most=3))
def broadcast_to(x):
    return tf.broadcast_to(x, tf.concat([[2], tf.shape(x)], 0))


def _like(r: random.Random, pool: Sequence[Known]) -> Choice | None:
    found = two()(r, pool)
    return None if found is None else (found[0], {})


@operation(_like, weight=2)
def broadcast_like(a, b):
    shape = tf.broadcast_dynamic_shape(tf.shape(a), tf.shape(b))
    return tf.broadcast_to(a, shape)


@operation(
    one(None, least=1, axis=axis(), before=of(0, 1), after=of(0, 2), value=of(0, 1)),
    weight=2,
)
def pad(x, axis, before, after, value):
    paddings = [[0, 0] for _ in x.shape]
    paddings[axis] = [before, after]
    value = tf.cast(value, x.dtype)
    return tf.pad(x, paddings, constant_values=value)


@operation(one(least=1, axis=axis(), mode=of("REFLECT", "SYMMETRIC")))
def pad_mirrored(x, axis, mode):
    paddings = [[0, 0] for _ in x.shape]
    paddings[axis] = [1, 0]
    return tf.pad(x, paddings, mode)


def _join(*, is_stack: bool) -> Callable:
    def choose(r: random.Random, pool: Sequence[Known]) -> Choice | None:
        first = pick(r, pool, FLOAT, 0 if is_stack else 1, 3 if is_stack else 4)
        if first is None:
            return None
        rank = pool[first].rank
        place = r.randrange(rank + is_stack)
        others = [
            i
            for i in _indices(pool, FLOAT, rank, rank)
            if all(
                a == b or (axis == place and not is_stack)
                for axis, (a, b) in enumerate(
                    zip(pool[first].shape, pool[i].shape, strict=True)
                )
            )
        ]
        return [first, r.choice(others)], {"axis": place}

    return choose


@operation(_join(is_stack=False), weight=4)
def concat(a, b, axis):
    return tf.concat([a, b], axis)


@operation(_join(is_stack=True), weight=3)
def stack(a, b, axis):
    return tf.stack([a, b], axis)


def _of_known_size(dtype: str | None, least: int, axis: int | None = None) -> Callable:
    """Choose a value, and an axis whose size does not depend on the rows."""

    def choose(r: random.Random, pool: Sequence[Known]) -> Choice | None:
        index = pick(r, pool, dtype, least)
        if index is None:
            return None
        shape = pool[index].shape
        found = [i for i, size in enumerate(shape) if isinstance(size, int) and size]
        own = r.choice(found) if axis is None and found else axis
        if own not in found:
            return None
        return [index], {"axis": own, "count": shape[own]}

    return choose


@operation(_of_known_size(None, 1), weight=2)
def unstack(x, axis, count):
    return tf.unstack(x, count, axis)[count // 2]


@operation(one(None, least=1, axis=axis(), count=of(2, 3), item=of(0, 1)), weight=2)
def split(x, axis, count, item):
    return tf.split(x, count, axis)[item]


@operation(one(None, least=1, axis=axis(), item=of(0, 1)))
def split_by_sizes(x, axis, item):
    return tf.split(x, [1, -1], axis)[item]


@operation(
    one(
        None,
        least=1,
        axis=axis(),
        first=of(None, 0, 1, -2),
        last=of(None, None, 3, -1),
        step=of(None, 1, 2, -1),
    ),
    weight=4,
)
def strided_slice(x, axis, first, last, step):
    index: list[Any] = [slice(None)] * len(x.shape)
    if step == -1:
        first, last = last, None
    index[axis] = slice(first, last, step)
    return x[tuple(index)]


@operation(one(None, least=1, axis=axis(), item=of(0, -1, 0, 1)), weight=3)
def item(x, axis, item):
    index: list[Any] = [slice(None)] * len(x.shape)
    index[axis] = item
    return x[tuple(index)]


@operation(one(None, least=1, most=3, place=of(0, 1, 2)))
def new_axis(x, place):
    if place == 2:
        return x[..., tf.newaxis]
    return x[tf.newaxis] if place == 0 else x[:, tf.newaxis]


@operation(one(least=1, axis=axis(), first=of(0, 1)))
def slice_op(x, axis, first):
    begin = [0] * len(x.shape)
    begin[axis] = first
    return tf.slice(x, begin, [-1] * len(x.shape))


@operation(one(least=1, axis=axis(), kind=of("half", "second half", "all")), weight=2)
def slice_by_sizes(x, axis, kind):
    """Take a part that is computed of the shape."""
    count = tf.shape(x)[axis]
    index: list[Any] = [slice(None)] * len(x.shape)
    bounds = {"half": (0, (count + 1) // 2), "second half": (count // 2, count)}
    index[axis] = slice(*bounds.get(kind, (0, count)))
    return x[tuple(index)]


# Along an axis.


@operation(one(least=1, axis=axis(), kind=of("softmax", "log_softmax")), weight=4)
def softmax(x, axis, kind):
    return getattr(tf.nn, kind)(x, axis)


@operation(one(least=1, axis=axis(), exclusive=of(0, 1), backward=of(0, 1)), weight=3)
def cumsum(x, axis, exclusive, backward):
    return 0.3 * tf.cumsum(x, axis, bool(exclusive), bool(backward))


@operation(one(least=1, axis=axis()))
def cumprod(x, axis):
    return tf.math.cumprod(tf.tanh(x) + 0.3, axis)


@operation(one(least=1, axis=axis()))
def cumulative_logsumexp(x, axis):
    return tf.math.cumulative_logsumexp(x, axis)


@operation(one(least=1, axis=axis(), direction=of("ASCENDING", "DESCENDING")), weight=2)
def sort(x, axis, direction):
    return tf.sort(x, axis, direction)


@operation(one(least=1, axis=axis()))
def argsort(x, axis):
    return tf.argsort(x, axis, stable=True)


@operation(one(least=1, k=of(1, 2)), weight=2)
def top_k(x, k):
    return tf.math.top_k(x, k)[0]


@operation(one(least=1, axes=some_axes), weight=2)
def l2_normalize(x, axes):
    return tf.math.l2_normalize(x, axes, epsilon=0.1)


@operation(one(least=1, axis=axis()))
def differences(x, axis):
    """Subtract each entry from the next one."""
    index: list[Any] = [slice(None)] * len(x.shape)
    index[axis] = slice(1, None)
    after = x[tuple(index)]
    index[axis] = slice(None, -1)
    return after - x[tuple(index)]


# Indices.


@operation(
    one(None, least=1, axis=axis(), indices=of([0], [2, 0, 1], [1, 1])), weight=2
)
def gather(x, axis, indices):
    return tf.gather(x, indices, axis=axis)


def _indexed(least: int = 1, *, same_rows: bool = False, **arguments: Any) -> Callable:
    def choose(r: random.Random, pool: Sequence[Known]) -> Choice | None:
        data, indices = pick(r, pool, FLOAT, least), pick(r, pool, INT, 1, 2)
        if data is None or indices is None:
            return None
        if same_rows and pool[data].shape[0] != pool[indices].shape[0]:
            return None
        known = pool[data]
        found = {name: make(r, known) for name, make in arguments.items()}
        return [data, indices], found

    return choose


@operation(_indexed(axis=axis()), weight=3)
def gather_by(x, indices, axis):
    """Take the entries that integers of the program name."""
    return tf.gather(x, indices % tf.shape(x)[axis], axis=axis)


@operation(_indexed(2, same_rows=True), weight=2)
def gather_batched(x, indices):
    return tf.gather(x, indices % tf.shape(x)[1], batch_dims=1, axis=1)


@operation(_indexed(1))
def gather_nd(x, indices):
    return tf.gather_nd(x, indices[..., tf.newaxis] % tf.shape(x)[0])


@operation(one(INT, most=3, axis=axis(of_result=True)), weight=3)
def one_hot(k, axis):
    return tf.one_hot(k % 4, 4, axis=axis, dtype=tf.float64)


@operation(_indexed(1, same_rows=True, kind=of("sum", "mean", "max")), weight=3)
def segments(x, indices, kind):
    while len(indices.shape) > 1:
        indices = indices[:, 0]
    function = getattr(tf.math, f"unsorted_segment_{kind}")
    return tf.clip_by_value(function(x, indices % SMALL, SMALL), -50.0, 50.0)


@operation(_indexed(1, same_rows=True), weight=2)
def scatter_nd(x, indices):
    while len(indices.shape) > 1:
        indices = indices[:, 0]
    shape = tf.concat([[SMALL], tf.shape(x)[1:]], 0)
    return tf.scatter_nd(indices[:, tf.newaxis] % SMALL, x, shape)


@operation(_indexed(1, same_rows=True, kind=of("add", "max")))
def tensor_scatter(x, indices, kind):
    while len(indices.shape) > 1:
        indices = indices[:, 0]
    target = tf.zeros_like(x)
    places = indices[:, tf.newaxis] % tf.shape(x)[0]
    return getattr(tf, f"tensor_scatter_nd_{kind}")(target, places, x)


def _masked(r: random.Random, pool: Sequence[Known]) -> Choice | None:
    data, mask = pick(r, pool, FLOAT, 1), pick(r, pool, BOOL, 1, 2)
    if data is None or mask is None:
        return None
    rank = pool[mask].rank
    is_same = pool[data].shape[:rank] == pool[mask].shape
    return ([data, mask], {}) if is_same else None


@operation(_masked, weight=3)
def boolean_mask(x, mask):
    return tf.boolean_mask(x, mask)


@operation(_masked)
def partition(x, mask):
    parts = tf.dynamic_partition(x, tf.cast(mask, tf.int32), 2)
    return tf.concat([parts[1], parts[0]], 0)


@operation(one(BOOL, least=1))
def where_indices(mask):
    return tf.cast(tf.where(mask), tf.int32)[:, 0]


@operation(one(least=2, most=3, kind=of("band_part", "diag_part", "trace")))
def matrices(x, kind):
    if kind == "band_part":
        return tf.linalg.band_part(x, 0, -1)
    return getattr(tf.linalg, kind)(x)


@operation(one(least=1, most=2))
def diag(x):
    return tf.linalg.diag(x)


@operation(one(least=2, most=3, kind=of("inv", "cholesky", "logdet")))
def positive_matrices(x, kind):
    product = tf.matmul(x, x, transpose_a=True)
    product += tf.eye(tf.shape(x)[-1], dtype=x.dtype)
    return getattr(tf.linalg, kind)(product)


# Layers of networks.


@operation(one(least=3, most=3), weight=2)
def conv1d(x):
    filters = tf.reshape(tf.range(12.0), [3, 1, 4]) / 12.0
    kernel = tf.cast(filters, tf.float64) * tf.ones([3, 1, 4], tf.float64)
    return tf.nn.conv1d(x[..., :1], kernel, 1, "SAME")


@operation(one(least=3, most=3, kind=of("max", "avg")), weight=2)
def pool1d(x, kind):
    return getattr(tf.nn, f"{kind}_pool1d")(x, 2, 1, "SAME")


@operation(one(least=2, most=4))
def bias_add(x):
    bias = tf.cast(tf.range(tf.shape(x)[-1]), x.dtype) * 0.1
    return tf.nn.bias_add(x, bias)


@operation(_indexed(2, same_rows=True), weight=2)
def sparse_cross_entropy(x, labels):
    logits = tf.reshape(x, [tf.shape(x)[0], -1])
    while len(labels.shape) > 1:
        labels = labels[:, 0]
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels % tf.shape(logits)[1], logits
    )


@operation(two(least=2))
def cross_entropy(a, b):
    labels = tf.nn.softmax(tf.broadcast_to(b, tf.shape(a + b)))
    return tf.nn.softmax_cross_entropy_with_logits(labels, a + b * 0.0)


# Random numbers, integers of shapes.


def _seed(r: random.Random, known: Known) -> int:
    return r.randrange(100)


@operation(
    one(least=1, seed=_seed, kind=of("uniform", "normal", "truncated_normal")),
    weight=3,
)
def noise(x, seed, kind):
    function = getattr(tf.random, f"stateless_{kind}")
    found = function(tf.shape(x), [seed, 3], dtype=tf.float32)
    return x + 0.1 * tf.cast(found, tf.float64)


@operation(one(least=1, seed=_seed))
def noise_float64(x, seed):
    return x + tf.random.stateless_normal(tf.shape(x), [seed, 1], dtype=tf.float64)


@operation(one(least=1, seed=_seed), weight=2)
def dropout(x, seed):
    kept = tf.random.stateless_uniform(tf.shape(x), [seed, 5]) > 0.4
    return tf.where(kept, x / 0.6, tf.zeros_like(x))


@operation(one(least=1, seed=_seed))
def shuffle(x, seed):
    order = tf.argsort(tf.random.stateless_uniform([tf.shape(x)[0]], [seed, 7]))
    return tf.gather(x, order)


@operation(one(least=1, axis=axis()), weight=3)
def divide_by_size(x, axis):
    return x / tf.cast(tf.shape(x)[axis], x.dtype)


@operation(one(least=1, axis=axis(), kind=of("times", "root", "half")))
def of_size(x, axis, kind):
    """Compute a number of the size of an axis."""
    count = tf.shape(x)[axis]
    if kind == "half":
        return tf.reduce_sum(x) / tf.cast(count // 2 + 1, x.dtype)
    found = tf.cast(count, x.dtype)
    return tf.reduce_mean(x) * (found if kind == "times" else tf.sqrt(found))


@operation(one(least=1))
def divide_by_all(x):
    return tf.reduce_sum(x) / tf.cast(tf.size(x), x.dtype)


@operation(one(least=1, axis=axis()), weight=2)
def positions(x, axis):
    """Add the numbers of the entries of an axis."""
    numbers = tf.cast(tf.range(tf.shape(x)[axis]), x.dtype) * 0.1
    shape = [1] * len(x.shape)
    shape[axis] = -1
    return x + tf.reshape(numbers, shape)


@operation(one(least=1, axis=axis(), last=of(1, 3)))
def zeros_of(x, axis, last):
    """Make a tensor of one value with as many entries as an axis."""
    return tf.fill([tf.shape(x)[axis], last], tf.cast(0.7, x.dtype))


@operation(one(least=1, axis=axis()))
def half_of(x, axis):
    """Make a tensor of half as many entries, computed by floats."""
    count = tf.cast(tf.cast(tf.shape(x)[axis], tf.float64) * 0.5, tf.int32)
    return tf.ones([count + 1], x.dtype)


@operation(one(least=2, most=2))
def without_diagonal(x):
    """Hide the diagonal, as contrastive losses do."""
    return x - 2.0 * tf.eye(tf.shape(x)[0], tf.shape(x)[1], dtype=x.dtype)


@operation(one(least=1, most=2))
def all_pairs(x):
    """Compute a number for each pair of entries along the first axis."""
    apart = x[:, tf.newaxis] - x[tf.newaxis]
    return tf.exp(-tf.abs(apart))


# Branches and loops.


@operation(two(least=0), weight=2)
def cond(a, b):
    return tf.cond(
        tf.reduce_mean(a) > 0.1,
        lambda: tf.tanh(a) * 2.0,
        lambda: a - tf.reduce_max(b),
    )


@operation(one(least=1), weight=2)
def cond_of_rows(x):
    return tf.cond(
        tf.shape(x)[0] > 5, lambda: x - tf.reduce_mean(x, 0, True), lambda: x * 0.5
    )


@operation(one(least=0, count=of(1, 3)), weight=2)
def while_loop(x, count):
    return tf.while_loop(
        lambda i, value: i < count,
        lambda i, value: (i + 1, tf.tanh(value + x) * 0.9),
        [0, x],
    )[1]


@operation(one(least=1))
def while_of_rows(x):
    """Loop as often as there are rows, over sums of all of them."""
    return tf.while_loop(
        lambda i, value: i < tf.minimum(tf.shape(x)[0], 3),
        lambda i, value: (i + 1, value * 0.5 + tf.reduce_mean(x)),
        [0, tf.reduce_sum(x) * 0.1],
    )[1]


@operation(one(least=1))
def while_until(x):
    """Loop until a value of all rows is small."""
    return tf.while_loop(
        lambda value: tf.reduce_max(tf.abs(value)) > 0.5,
        lambda value: value * 0.5,
        [x],
        maximum_iterations=8,
    )[0]


@operation(one(least=1), weight=2)
def map_fn(x):
    return tf.map_fn(lambda row: tf.tanh(row) - tf.reduce_mean(row), x)


@operation(one(least=1))
def scan(x):
    return tf.scan(lambda state, row: 0.5 * state + row, x)


@operation(_of_known_size(FLOAT, 2, axis=1), weight=2)
def recurrent(x, axis, count):
    """Run over the second axis, as recurrent layers do."""
    steps = tf.unstack(x, count, axis)
    state = tf.zeros_like(steps[0])
    for step in steps:
        state = tf.tanh(0.5 * state + step)
    return state


@operation(one(least=2))
def scan_time(x):
    """Run over the second axis by a loop."""
    order = [1, 0, *range(2, len(x.shape))]
    found = tf.scan(lambda state, row: 0.5 * state + row, tf.transpose(x, order))
    return tf.transpose(found, order)


@operation(one(least=1))
def vectorized_map(x):
    return tf.vectorized_map(lambda row: tf.reduce_sum(row * row) * 0.3, x)


@operation(one(), weight=2)
def nested_function(x):
    return tf.function(lambda value: tf.tanh(value) + tf.reduce_mean(value))(x)


@operation(one(least=1))
def recompute(x):
    return tf.recompute_grad(lambda value: tf.tanh(value) * tf.reduce_mean(value))(x)


@operation(one(least=1))
def straight_through(x):
    @tf.custom_gradient
    def rounded(value):
        return tf.round(value), lambda upstream: upstream * 0.5

    return rounded(x)


# Gradients within the program.


@operation(one(least=1, kind=of("tanh", "square", "softplus", "sin")), weight=3)
def inner_gradient(x, kind):
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = tf.reduce_sum(UNARY[kind](x) * tf.reduce_mean(x))
    return tape.gradient(found, x)


@operation(_matmul, weight=2)
def gradient_of_product(a, b, left, right, kind):
    with tf.GradientTape() as tape:
        tape.watch(a)
        found = tf.tanh(tf.matmul(a, b, transpose_a=left, transpose_b=right))
        total = tf.reduce_sum(found * found)
    return tape.gradient(total, a)


@operation(one(least=1))
def gradient_penalty(x):
    """Compute how far the gradient of each row is from one."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = tf.reduce_sum(tf.tanh(x) ** 2)
    slope = tf.reshape(tape.gradient(found, x), [tf.shape(x)[0], -1])
    norm = tf.sqrt(tf.reduce_sum(slope * slope, 1) + 0.1)
    return tf.reduce_mean((norm - 1.0) ** 2)


# State.


@dataclasses.dataclass
class State:
    """What a program reads and assigns.

    Args:
        moving: Keras variable of four floats that is not trained.
        total: Keras metric, a sum.
    """

    moving: Any
    total: Any


def _last_of_four(r: random.Random, pool: Sequence[Known]) -> Choice | None:
    found = [i for i in _indices(pool, FLOAT, 1, 4) if pool[i].shape[-1] == 4]
    return ([r.choice(found)], {}) if found else None


@operation(_last_of_four, weight=2, needs_state=True)
def moving_average(state, x):
    mean = tf.reduce_mean(tf.reshape(x, [-1, 4]), 0)
    state.moving.assign(0.9 * state.moving + 0.1 * mean)
    return x - tf.convert_to_tensor(state.moving.value)


@operation(_last_of_four, needs_state=True)
def moving_sum(state, x):
    state.moving.assign_add(0.1 * tf.reduce_sum(tf.reshape(x, [-1, 4]), 0))
    return tf.convert_to_tensor(state.moving.value) * 0.3


@operation(one(least=1), weight=2, needs_state=True)
def metric(state, x):
    state.total.update_state(x)
    return x
