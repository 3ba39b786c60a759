"""Compressed sums are those of their definition in NumPy, step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.compression import numpy_definitions as definitions
from tests.harness import registry
from tests.harness.env import Env
from tests.reduction.cases_selection import SLOW, routed
from tfdp.compression import BlockQuantized, Compressor, PowerSGD, TopK

STEPS = 6


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Gradients of each replica and step, and how they are to be reduced.

    Args:
        options: Dict, those of the communication.
        define: Callable that returns the definition, of the replicas' number.
        shapes: Tuple of the variables' shapes.
        tolerance: Float, the largest error of a sum, relative to the largest one.
    """

    options: dict[str, Any]
    define: Callable[[int], Any]
    shapes: tuple[tuple[int, ...], ...] = ((1000,),)
    tolerance: float = 2e-6

    def gradients(self, num_replicas: int) -> np.ndarray:
        """Normal numbers of shape `[STEPS, num_replicas, elements]`."""
        size = sum(int(np.prod(shape)) for shape in self.shapes)
        draw = np.random.default_rng(size)
        scale = 10.0 ** draw.uniform(-3, 1, size=size)
        return (draw.normal(size=(STEPS, num_replicas, size)) * scale).astype("float32")


def sums_of(env: Env, reduction: Reduction) -> np.ndarray:
    """What the replicas get in each step, from an optimizer that applies it."""
    given = reduction.gradients(env.num_replicas)
    sizes = [int(np.prod(shape)) for shape in reduction.shapes]
    with routed(env, links=SLOW, **reduction.options):
        with env.scope():
            variables = [keras.Variable(tf.zeros(shape)) for shape in reduction.shapes]
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build(variables)

        @tf.function
        def step(number: tf.Tensor) -> None:
            def replica() -> None:
                rank = tf.distribute.get_replica_context().replica_id_in_sync_group
                parts = tf.split(tf.constant(given)[number, rank], sizes)
                # The order in which a backward pass makes them.
                gradients = [
                    tf.reshape(part, shape)
                    for part, shape in zip(parts, reduction.shapes, strict=True)
                ]
                optimizer.apply(gradients, variables)

            env.strategy.run(replica)

        found = []
        for number in range(STEPS):
            for variable in variables:
                variable.assign(tf.zeros_like(variable))
            step(tf.constant(number))
            for variable in variables:
                values = env.local_values(variable.value)
                assert all(np.array_equal(values[0], value) for value in values)
            found.append(np.concatenate([-np.ravel(v.numpy()) for v in variables]))
    return np.stack(found)


def check(env: Env, reduction: Reduction) -> dict:
    """Compares the sums with the definition's; they come from all workers alike."""
    if env.is_reference:
        return {}
    definition = reduction.define(env.num_replicas)
    given = reduction.gradients(env.num_replicas)
    wanted = np.stack([definition.reduced(vectors) for vectors in given])
    found = sums_of(env, reduction)
    exact = given.sum(axis=1)
    allowed = reduction.tolerance * abs(wanted).max()
    assert abs(wanted - exact).max() > 100 * allowed, "it is not compressed"
    np.testing.assert_allclose(found, wanted, rtol=0, atol=allowed)
    return {"sums": found}


def _quantized(bits: int) -> Reduction:
    return Reduction(
        {"algorithm": "ring", "compression": BlockQuantized(bits=bits, block=32)},
        lambda _: definitions.Quantized(bits, 32),
    )


def _in_levels(bits: int, *, inner: bool) -> Reduction:
    compressor = BlockQuantized(bits=bits, block=32)
    return Reduction(
        {
            "algorithm": "hierarchical",
            "compression": compressor if inner else {"outer": compressor},
        },
        # Half of the replicas are a node: of two, each is one.
        lambda size: (
            definitions.QuantizedInLevels(bits, 32, inner=inner)
            if size == 4
            else definitions.Quantized(bits, 32)
        ),
    )


class _NodeSums:
    """A definition over the sums of nodes of two members, where there are four."""

    def __init__(self, definition: Any) -> None:
        self._definition = definition

    def reduced(self, vectors: np.ndarray) -> np.ndarray:
        if len(vectors) == 4:
            vectors = vectors.reshape(2, 2, -1).sum(axis=1)
        return self._definition.reduced(vectors)


def _low_rank(**options: Any) -> Reduction:
    is_outer = isinstance(options["compression"], dict)
    compressor = options["compression"]["outer"] if is_outer else options["compression"]
    kept = _NodeSums if is_outer else lambda definition: definition
    return Reduction(
        options,
        lambda _: kept(
            definitions.LowRank((40, 30), compressor.rank, compressor.start_step)
        ),
        # The first is cut as the matrix of 40 rows that it is closest to.
        ((40, 5, 6), (30,)),
        2e-5,
    )


class Halves(Compressor):
    """A compressor of one's own: the first half in one step, the second in the next."""

    def state(self, bucket):
        return {"odd": tf.zeros([], tf.bool), "waiting": tf.zeros([bucket.size])}

    def reduce(self, bucket, state, group):
        wanted = bucket.flat + state["waiting"]
        is_second = tf.range(bucket.size) >= bucket.size // 2
        sent = tf.where(is_second == state["odd"], wanted, 0.0)
        total = group.all_reduce(sent)
        return total, {"odd": ~state["odd"], "waiting": wanted - sent}


class _HalvesInNumpy:
    odd, waiting = False, 0.0

    def reduced(self, vectors):
        wanted = vectors + self.waiting
        is_second = np.arange(vectors.shape[1]) >= vectors.shape[1] // 2
        sent = np.where(is_second == self.odd, wanted, 0)
        self.odd, self.waiting = not self.odd, wanted - sent
        return sent.sum(axis=0)


REDUCTIONS = {
    "8_bits": _quantized(8),
    "4_bits": _quantized(4),
    "8_bits_across_nodes": _in_levels(8, inner=False),
    "4_bits_in_levels": _in_levels(4, inner=True),
    "low_rank": _low_rank(compression=PowerSGD(rank=2, start_step=2)),
    "low_rank_across_nodes": _low_rank(
        algorithm="hierarchical",
        compression={"outer": PowerSGD(rank=3, start_step=0)},
    ),
    "largest_elements_across_nodes": Reduction(
        {"algorithm": "hierarchical", "compression": {"outer": TopK(ratio=0.1)}},
        lambda size: (
            definitions.LargestAcrossNodes(0.1)
            if size == 4
            else definitions.Largest(0.1)
        ),
    ),
    "largest_elements_with_momentum": Reduction(
        {"algorithm": "ring", "compression": TopK(ratio=0.05, momentum=0.9)},
        lambda _: definitions.Largest(0.05, 0.9),
    ),
    "halves": Reduction({"compression": Halves()}, lambda _: _HalvesInNumpy()),
}
SAME_AS = {
    "4_bits": "4_bits_in_levels",
    "8_bits_across_nodes": "4_bits_in_levels",
    "low_rank_across_nodes": "low_rank",
    "largest_elements_across_nodes": "largest_elements_with_momentum",
    "halves": "8_bits",
}


def _register(name: str, reduction: Reduction) -> None:
    registry.register(
        f"compressed_sums_of_{name}",
        lambda env: check(env, reduction),
        f"sums of gradients in {name.replace('_', ' ')}, as NumPy defines them",
        quick_setup="two_by_two" if "nodes" in name or "levels" in name else "",
        same_as=f"compressed_sums_of_{SAME_AS[name]}" if name in SAME_AS else "",
        compare=False,
    )


for _name, _reduction in REDUCTIONS.items():
    _register(_name, _reduction)
