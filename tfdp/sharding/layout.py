"""Sharded state in a step: each replica updates what it owns, all get the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.gradient_noise import squared_norm
from tfdp.ownership import own_step
from tfdp.sharding.exchange import Exchange
from tfdp.sharding.owned import Gradients, OwnedSlices, OwnedVariables
from tfdp.sharding.rows import pack_row
from tfdp.shards import ShardPlan
from tfdp.traits import Part, is_elementwise


@dataclasses.dataclass(frozen=True)
class ShardedPart:
    """The state of one inner optimizer on the replicas of this process.

    Args:
        optimizer: Keras optimizer that holds the settings, and no slots.
        variables: List of the Keras variables that it trains.
        plan: `ShardPlan` of them.
        replicas: List with the state that each local replica owns.
    """

    optimizer: Any
    variables: list[Any]
    plan: ShardPlan
    replicas: list[OwnedSlices | OwnedVariables]


@dataclasses.dataclass(frozen=True)
class ShardedSums:
    """The own slices of the sums of a part.

    Args:
        slices: List with a tensor of shape `[slice_size]` for each bucket, or
            `None` for one without gradients.
        dense: Frozen set of ints, positions of the variables in them.
        sparse: Dict from position to `tf.IndexedSlices` of all replicas.
        order: Tuple of ints, the positions in the order of the gradients.
    """

    slices: list[tf.Tensor | None]
    dense: frozenset[int]
    sparse: dict[int, tf.IndexedSlices]
    order: tuple[int, ...]

    def divided_by(self, divisor: tf.Tensor) -> ShardedSums:
        """The same, each element divided by a scalar; halves become float32."""
        return self.map(lambda values: _divided(values, divisor))

    def map(self, function: Callable[[tf.Tensor], tf.Tensor]) -> ShardedSums:
        """The same with a function applied to every tensor."""
        sparse = {
            index: _with_values(rows, function(rows.values))
            for index, rows in self.sparse.items()
        }
        slices = [None if piece is None else function(piece) for piece in self.slices]
        return dataclasses.replace(self, slices=slices, sparse=sparse)


class ShardedState:
    """What a step does with gradients where the state is sharded, on one replica.

    Args:
        parts: Dict from the `id` of an inner optimizer to its `ShardedPart`.
        replica: Int, index of the calling replica among the local ones.
        exchange_of: Callable from a `ShardedPart` to its `Exchange`.
        reducer: `GradientReducer`, for rows of sparse gradients.
    """

    def __init__(
        self,
        parts: dict[int, ShardedPart],
        replica: int,
        exchange_of: Callable[[ShardedPart], Exchange],
        reducer: Any,
    ) -> None:
        self._parts = parts
        self._replica = replica
        self._exchange_of = exchange_of
        self._reducer = reducer

    def reduce(
        self,
        part: Part,
        gradients: list,
        variables: list,
        *,
        may_sum: bool,
        valid: tf.Tensor | None,
    ) -> ShardedSums:
        """By a reduce-scatter of each bucket; rows of sparse gradients go to all."""
        own = self._part(part)
        positions = [_compat.index_in(part.optimizer, v) for v in variables]
        sparse = {
            position: (gradient, variable)
            for position, gradient, variable in zip(
                positions, gradients, variables, strict=True
            )
            if isinstance(gradient, tf.IndexedSlices)
        }
        dense = {
            position: tf.ensure_shape(gradient, variable.shape)
            for position, gradient, variable in zip(
                positions, gradients, variables, strict=True
            )
            if position not in sparse
        }
        slices = self._exchange_of(own).scatter(own.plan, dense, valid)
        rows = self._reducer.gather_rows(
            [gradient for gradient, _ in sparse.values()],
            [variable for _, variable in sparse.values()],
            may_sum=may_sum,
        )
        return ShardedSums(
            slices,
            frozenset(dense),
            dict(zip(sparse, rows, strict=True)),
            tuple(positions),
        )

    def held(
        self, parts: Sequence[Part], sums: list[ShardedSums]
    ) -> tuple[list[tf.Tensor], list[int]]:
        """What is accumulated of sums: slices, and which accumulators take them."""
        tensors, places = [], []
        for part, item in zip(parts, sums, strict=True):
            first = self._first_slice(part)
            for number, piece in enumerate(item.slices):
                if piece is not None:
                    tensors.append(piece)
                    places.append(first + number)
        return tensors, places

    def with_held(
        self, parts: Sequence[Part], variables: Sequence[Any], tensors: list[tf.Tensor]
    ) -> list[ShardedSums]:
        """Sums made of what was accumulated, the inverse of `held`.

        Args:
            parts: Sequence of `Part`.
            variables: Sequence of the step's variables.
            tensors: List of slices, one for each accumulator.
        """
        found = []
        for part in parts:
            own = self._part(part)
            first = self._first_slice(part)
            order = [
                _compat.index_in(part.optimizer, v) for v in part.of(list(variables))
            ]
            slices: list[tf.Tensor | None] = [
                tensors[first + number] if bucket.indices & set(order) else None
                for number, bucket in enumerate(own.plan.buckets)
            ]
            found.append(ShardedSums(slices, frozenset(order), {}, tuple(order)))
        return found

    def _first_slice(self, part: Part) -> int:
        """The place of a part's first bucket among those of all parts."""
        first = 0
        for key, own in self._parts.items():
            if key == id(part.optimizer):
                break
            first += len(own.plan.buckets)
        return first

    def examine(
        self,
        parts: Sequence[Part],
        sums: list[ShardedSums],
        *,
        checks: bool,
        measures: bool,
    ) -> ShardedFindings:
        """By one small all-reduce, if anybody asks."""
        needed = checks or measures or any(_clips_by_norm(p.optimizer) for p in parts)
        own = [self._part(part) for part in parts]
        return ShardedFindings(own, sums, self._exchange_of(own[0]), is_needed=needed)

    def clip(
        self, part: Part, sums: ShardedSums, findings: ShardedFindings
    ) -> ShardedSums:
        """Clips by norms of whole variables, of which the replica has slices."""
        optimizer = part.optimizer
        if not _clips_by_norm(optimizer):
            limit = optimizer.clipvalue
            if not limit or limit <= 0:
                return sums
            return sums.map(lambda values: tf.clip_by_value(values, -limit, limit))
        own = self._part(part)
        norms = findings.squared_norms(own)  # [num_variables]
        if optimizer.clipnorm and optimizer.clipnorm > 0:
            factors = _factors(tf.sqrt(norms), optimizer.clipnorm)
        else:
            norm = tf.sqrt(tf.reduce_sum(norms))
            # Not `tf.cast`, which would round a float to float32 first.
            limit = tf.constant(optimizer.global_clipnorm, norm.dtype)
            # NaN where the norm is infinite, as in Keras.
            factor = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
            factors = tf.fill(tf.shape(norms), factor)
            # Keras multiplies by a scalar, and what was rows becomes a tensor.
            sums = _without_rows(sums, own, self._state(own).owner)
        is_one = bool(optimizer.global_clipnorm) and not optimizer.clipnorm
        return _scaled(sums, own, self._state(own).owner, factors, is_one)

    def scale_momentum(self, part: Part, growth: Any) -> None:
        """See `WholeVariables`."""
        state = self._state(self._part(part))

        def scale() -> tf.Tensor:
            state.scale_momentum(growth)
            return tf.constant(True)

        tf.cond(tf.equal(growth, 1.0), lambda: tf.constant(False), scale)

    def update(
        self, part: Part, gradients: ShardedSums, variables: list, rate: Any
    ) -> None:
        """Updates what the replica owns; all-gathers the new values by bucket."""
        own = self._part(part)
        optimizer = part.optimizer
        if rate is None:
            rate = tf.convert_to_tensor(optimizer.learning_rate)
        else:
            optimizer = _compat.with_rate(optimizer, rate)
        if is_elementwise(part.optimizer):
            optimizer = _compat.with_counter_read(optimizer)
        given = Gradients(gradients.slices, gradients.dense, gradients.sparse)
        with own_step():
            news = self._state(own).update(optimizer, given, own.variables, rate)
        self._spread(own, news, given.present)

    def average(self, part: Part) -> None:
        """Each replica those of what it owns."""
        own = self._part(part)
        self._state(own).average(part.optimizer, own.variables)

    def overwrite_with_average(self, part: Part) -> None:
        """All-gathers the averages by bucket."""
        own = self._part(part)
        everything = frozenset(range(len(own.variables)))
        self._spread(own, self._state(own).averages(), everything)

    def swap_with_average(self, part: Part) -> None:
        """Gives variables the values of their averages, and the other way round."""
        own = self._part(part)
        state = self._state(own)
        values = state.own_values(own.variables)
        self.overwrite_with_average(part)
        state.set_averages(values)

    def restart_average(self, part: Part) -> None:
        """Gives averages the values of their variables."""
        own = self._part(part)
        state = self._state(own)
        state.set_averages(state.own_values(own.variables))

    def _spread(self, own: ShardedPart, slices: list, present: frozenset[int]) -> None:
        wholes = self._exchange_of(own).gather(own.plan, slices)
        for index in sorted(present & wholes.keys()):
            part = _compat.local_part(own.variables[index])
            value = tf.reshape(wholes[index], part.shape)
            part.assign(tf.cast(value, part.dtype), read_value=False)

    def _part(self, part: Part) -> ShardedPart:
        return self._parts[id(part.optimizer)]

    def _state(self, own: ShardedPart) -> Any:
        return own.replicas[self._replica]


class ShardedFindings:
    """Norms and finite checks from slices: one small collective for all parts.

    Args:
        parts: List of `ShardedPart`.
        sums: List of `ShardedSums`.
        exchange: `Exchange`.
        is_needed: Bool, whether anybody will ask.
    """

    def __init__(
        self,
        parts: list[ShardedPart],
        sums: list[ShardedSums],
        exchange: Exchange,
        *,
        is_needed: bool,
    ) -> None:
        self._parts, self._sums, self._exchange = parts, sums, exchange
        self._facts: list[tf.Tensor] = []
        if is_needed:
            own = [_squares_and_flags(p, s, exchange.owner) for p, s in self._pairs()]
            total = exchange.sum(_joined([fact for pair in own for fact in pair]))
            sizes = [len(p.variables) for p in parts for _ in range(2)]
            self._facts = tf.split(total, sizes)

    def is_finite(self) -> tf.Tensor:
        """Scalar bool tensor, whether no element is infinite or NaN."""
        return tf.reduce_all([tf.reduce_sum(flags) < 1 for flags in self._facts[1::2]])

    def squared_norm(self) -> tf.Tensor:
        """Scalar float32 tensor, the sum of the squares of all elements."""
        norms = [tf.reduce_sum(squares) for squares in self._facts[::2]]
        total = tf.cast(tf.add_n(norms), tf.float32)
        for rows in [rows for sums in self._sums for rows in sums.sparse.values()]:
            # Rows of one index were squared one by one, as clipping wants it.
            one_by_one = tf.cast(_sum_of_squares(rows.values), tf.float32)
            total += squared_norm([rows]) - one_by_one
        return total

    def squared_norms(self, part: ShardedPart) -> tf.Tensor:
        """Tensor `[num_variables]`, that of each variable of a part."""
        return self._facts[2 * self._parts.index(part)]

    def non_finite(self) -> list[tf.Tensor]:
        """Scalar bool tensors, one for each variable that has a gradient."""
        return [
            flags[index] > 0
            for flags, sums in zip(self._facts[1::2], self._sums, strict=True)
            for index in sums.order
        ]

    def _pairs(self) -> Any:
        return zip(self._parts, self._sums, strict=True)


def _squares_and_flags(
    part: ShardedPart, sums: ShardedSums, owner: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """What the own slices add to each variable's squared norm and to its flag."""
    found: dict[int, list[tf.Tensor]] = {}
    for bucket, piece in zip(part.plan.buckets, sums.slices, strict=True):
        if piece is None:
            continue
        begin = 0
        for segment in bucket.rows[owner]:
            elements = piece[begin : begin + segment.size]
            found.setdefault(segment.index, []).append(elements)
            begin += segment.size
    # Every replica has the rows of sparse gradients; one counts them.
    for index, rows in sums.sparse.items() if owner == 0 else ():
        found.setdefault(index, []).append(rows.values)
    none = [tf.zeros([], tf.float32)]
    squares, flags = [], []
    for index in range(len(part.variables)):
        own = found.get(index, [])
        squares.append(_joined_sum([_sum_of_squares(item) for item in own] or none))
        bad = [tf.cast(tf.math.is_finite(item), tf.float32) for item in own]
        flags.append(tf.add_n([tf.reduce_sum(1.0 - item) for item in bad] or none))
    dtype = _dtype_of_norms(part)
    return tf.stack([tf.cast(item, dtype) for item in squares]), tf.stack(flags)


def _dtype_of_norms(part: ShardedPart) -> tf.DType:
    """The same on all replicas, also on one that owns nothing of the widest dtype."""
    dtypes = [tf.as_dtype(bucket.dtype) for bucket in part.plan.buckets]
    return max([tf.float32, *dtypes], key=lambda dtype: dtype.size)


def _sum_of_squares(values: tf.Tensor) -> tf.Tensor:
    if values.dtype.size < tf.float32.size:
        values = tf.cast(values, tf.float32)
    return tf.reduce_sum(tf.square(values))


def _joined_sum(values: list[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(_alike(values))


def _joined(tensors: list[tf.Tensor]) -> tf.Tensor:
    return tf.concat(_alike(tensors), axis=0)


def _alike(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Tensors in the widest of their dtypes."""
    widest = max((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.size)
    return [tf.cast(tensor, widest) for tensor in tensors]


def _clips_by_norm(optimizer: Any) -> bool:
    limits = (optimizer.clipnorm, optimizer.global_clipnorm)
    return any(limit is not None and limit > 0 for limit in limits)


def _factors(norms: tf.Tensor, limit: float) -> tf.Tensor:
    """What `tf.clip_by_norm` multiplies a tensor of each norm with."""
    bound = tf.constant(limit, norms.dtype)
    return bound / tf.maximum(norms, bound)


def _scaled(
    sums: ShardedSums,
    part: ShardedPart,
    owner: int,
    factors: tf.Tensor,
    is_one: bool,
) -> ShardedSums:
    """Each variable's elements times its factor."""
    slices: list[tf.Tensor | None] = []
    for bucket, piece in zip(part.plan.buckets, sums.slices, strict=True):
        row = bucket.rows[owner]
        if piece is None or not row:
            slices.append(piece)
        elif is_one:
            slices.append(piece * tf.cast(factors[0], piece.dtype))
        else:
            own = tf.gather(factors, [segment.index for segment in row])
            own = tf.concat([own, tf.ones([1], own.dtype)], axis=0)
            sizes = [segment.size for segment in row] + [bucket.padding(owner)]
            # All keys of collectives contain the shape, which `repeat` does not know.
            spread = tf.ensure_shape(tf.repeat(own, sizes), piece.shape)
            slices.append(piece * tf.cast(spread, piece.dtype))
    sparse = {
        index: _with_values(rows, rows.values * tf.cast(factors[index], rows.dtype))
        for index, rows in sums.sparse.items()
    }
    return dataclasses.replace(sums, slices=slices, sparse=sparse)


def _without_rows(sums: ShardedSums, part: ShardedPart, owner: int) -> ShardedSums:
    """The same with sparse gradients as elements of the own slices."""
    if not sums.sparse:
        return sums
    whole = {index: tf.convert_to_tensor(rows) for index, rows in sums.sparse.items()}
    slices: list[tf.Tensor | None] = []
    for bucket, piece in zip(part.plan.buckets, sums.slices, strict=True):
        given = sorted(bucket.indices & whole.keys())
        if given:
            row, padding = bucket.rows[owner], bucket.padding(owner)
            own = pack_row(row, padding, whole, whole[given[0]].dtype)
            piece = own if piece is None else piece + own
        slices.append(piece)
    dense = sums.dense | whole.keys()
    return dataclasses.replace(sums, slices=slices, dense=dense, sparse={})


def _with_values(rows: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    return tf.IndexedSlices(values, rows.indices, rows.dense_shape)


def _divided(values: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
    if values.dtype.size < tf.float32.size:
        values = tf.cast(values, tf.float32)
    return values / tf.cast(divisor, values.dtype)
