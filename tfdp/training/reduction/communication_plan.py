"""Communication plan of a training step, printable as a table."""

from __future__ import annotations

import dataclasses
import html
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfdp.ground.base.wrappers import is_sharded
from tfdp.ground.plans.buckets import Bucket, BucketPlan
from tfdp.ground.plans.gathers import StepGathers
from tfdp.ground.plans.memory import MemoryReport
from tfdp.ground.plans.sharding import ShardingOptions
from tfdp.ground.text import pluralize
from tfdp.training.compression.algorithm_choice import AlgorithmChoice
from tfdp.training.reduction.fusion import make_plan, wide_dtype

# Columns of a printed communication plan. Sizes and times are aligned to the right, so
# that their magnitudes can be compared.
_COLUMNS: dict[str, Literal["left", "right"]] = {
    "order": "left",
    "dtype": "left",
    "bytes": "right",
    "algorithm": "left",
    "ms": "right",
    "variables": "left",
}


@dataclasses.dataclass(frozen=True)
class CommunicationPlan:
    """Communication plan of a training step: its buckets, in order of reduction.

    Args:
        buckets: Tuple of `tfdp.ground.plans.buckets.Bucket`: entries (name, shape,
            dtype), dtype and bytes.
        sparse: Tuple of strings, variables whose gradients are sent as rows.
        num_replicas: Int, number of replicas on all workers.
        backend: String, `"nccl"`, `"ring"`, `"direct"` or `"mpi"`.
        routes: Tuple of `AlgorithmChoice`, one for each bucket: algorithm, wire formats
            and predicted seconds.
        node_size: Int, number of replicas of a node.
        traced: Bool, whether this is the plan of a traced step, or a prediction from
            the backward pass of the model.
        sharding: String. `"none"`: each bucket is all-reduced. `"optimizer"` or
            `"gradients"`: each is reduce-scattered, and the updated parameters are
            all-gathered. `"parameters"`: each is reduce-scattered, and a step
            all-gathers parameters for the forward and again for the backward pass, by
            units of one or several layers. Defaults to `"none"`.
        memory: `MemoryReport` of the training state, or `None` if not known. Defaults
            to `None`.
        is_compiled: Bool, whether XLA compiles the forward and backward pass of each
            replica in one cluster, after which buckets are reduced. Defaults to
            `False`.
        gather_ratio: Float, ratio of the bytes that a gather of parameters sends to
            those of the parameters. Defaults to 1.
        gain: String, description of the gain of tuned buckets over the default, which
            is printed; or `""`. Defaults to `""`.
        gathers: Dict from the name of a loop, such as `"fit"`, to `StepGathers`, the
            tensors that its step gathers or sums for operations on the global batch. It
            has no entry for a loop whose step was not traced. Defaults to empty.
    """

    buckets: tuple[Bucket, ...]
    sparse: tuple[str, ...]
    num_replicas: int
    backend: str
    routes: tuple[AlgorithmChoice, ...]
    node_size: int
    traced: bool
    sharding: str = "none"
    memory: MemoryReport | None = None
    is_compiled: bool = False
    gather_ratio: float = 1.0
    gain: str = ""
    gathers: Mapping[str, StepGathers] = dataclasses.field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the dense gradients that a step reduces."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def wire_bytes(self) -> int:
        """Number of bytes that a replica sends in a step, the mean of all replicas.

        Every algorithm sends 2 (N - 1) / N times the data, or less by compression.
        Source: Patarasuk and Yuan 2009.
        """
        pairs = zip(self.buckets, self.routes, strict=True)
        return round(
            sum(
                self._wire_bytes(bucket, route, self._gathers_of(order))
                for order, (bucket, route) in enumerate(pairs)
            )
        )

    @property
    def predicted_seconds(self) -> float:
        """Sum of the predicted times of all buckets, in seconds."""
        return sum(route.seconds for route in self.routes)

    @property
    def _sharding(self) -> ShardingOptions:
        """`ShardingOptions` of the string `sharding`, which say what is sharded."""
        return ShardingOptions(self.sharding)

    def _gathers_of(self, order: int) -> int:
        """Return how often a step gathers the parameters of a bucket.

        `order` is the position of the bucket in the plan, from 0.

        Sharded parameters are gathered for the forward and for the backward pass. Those
        of the first bucket are gathered once: they are those of the last layers, with
        which the backward pass begins.
        """
        return 2 if self._sharding.shards_parameters and order else 1

    def _wire_bytes(
        self, bucket: Bucket, route: AlgorithmChoice, num_gathers: int
    ) -> float:
        """Return the number of bytes that a replica sends for a bucket.

        Args:
            bucket: `Bucket`.
            route: `AlgorithmChoice` of the bucket.
            num_gathers: Int, how often a step gathers the parameters of the bucket.
        """
        itemsize = tf.as_dtype(bucket.dtype).size
        num_replicas, node_size = self.num_replicas, self.node_size
        if not route.algorithm.is_hierarchical:
            node_size = num_replicas
        inner = 1 - 1 / node_size
        outer = (1 - node_size / num_replicas) / node_size
        factor = inner * route.inner.byte_ratio(itemsize)
        factor += outer * route.outer.byte_ratio(itemsize)
        if not self._sharding.shards_state:
            return 2 * factor * bucket.num_bytes
        # A reduce-scatter of gradients sends half the bytes of an all-reduce. Gathers
        # of parameters do not use wire formats.
        scatter = factor * (2 if route.needs_whole_bucket else 1)
        gathers = num_gathers * self.gather_ratio * (inner + outer)
        return (scatter + gathers) * bucket.num_bytes

    @property
    def _title(self) -> str:
        """Title of the printed plan: collectives, bytes, replicas and backend."""
        count = len(self.buckets)
        what = pluralize(count, "all-reduce")
        if self._sharding.shards_state:
            gathers = sum(map(self._gathers_of, range(count)))
            is_whole = any(route.needs_whole_bucket for route in self.routes)
            reduction = "all-reduce" if is_whole else "reduce-scatter"
            what = (
                f"{pluralize(count, reduction)} and "
                + ("up to " if gathers > count else "")
                + pluralize(gathers, "all-gather")
            )
        after = ", after one XLA cluster" if self.is_compiled else ""
        return (
            f"{what} of {pluralize(self.num_bytes, 'byte')} over "
            f"{pluralize(self.num_replicas, 'replica')} ({self.backend}){after}"
            f"{self.gain and f'; tuned: {self.gain}'}"
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Yield rows of cells to print: one for each bucket and sparse gradient."""
        for order, bucket in enumerate(self.buckets):
            route = self.routes[order]
            yield (
                str(order),
                bucket.dtype,
                f"{bucket.num_bytes:,}",
                str(route),
                f"{1000 * route.seconds:.3g}",
                ", ".join(entry.name for entry in bucket.entries),
            )
        for name in self.sparse:
            yield "-", "rows", "as touched", "all-gather", "", name

    def __str__(self) -> str:
        table = Table(title=self._title)
        for name, side in _COLUMNS.items():
            table.add_column(name, justify=side)
        for row in self._rows():
            table.add_row(*map(escape, row))
        text = io.StringIO()
        Console(file=text, width=100, force_jupyter=False).print(table)
        for part in self._appendices():
            text.write(f"{part}\n")
        return text.getvalue()

    def _appendices(self) -> Iterator[str]:
        """Yield texts on gathered tensors and on memory, printed after the table."""
        for loop, step in self.gathers.items():
            if step.gathers:
                yield f"Gathered in a step of `{loop}`\n{step}\n"
        if self.memory is not None:
            yield str(self.memory)

    def _repr_html_(self) -> str:
        """Return the plan as an HTML table for a notebook.

        It has the colors of the notebook, light or dark, and scrolls if it is long.
        """
        head = "".join(_cell("th", name, side) for name, side in _COLUMNS.items())
        body = "".join(
            f"<tr>{''.join(map(_cell, itertools.repeat('td'), row, _COLUMNS.values()))}"
            "</tr>"
            for row in self._rows()
        )
        caption = f"<caption>{html.escape(self._title)}</caption>"
        table = (
            '<div style="max-height: 40em; overflow: auto"><table>'
            f"{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )
        parts = "".join(
            f"<pre>{html.escape(part)}</pre>" for part in self._appendices()
        )
        return table + parts


def _cell(tag: str, text: str, side: str) -> str:
    """Return a cell of an HTML table, aligned to a side.

    `tag` is `"td"` or `"th"`, `side` is `"left"` or `"right"`.
    """
    style = f"text-align: {side}; vertical-align: top"
    return f'<{tag} style="{style}">{html.escape(text)}</{tag}>'


def communication_plan(strategy: Any, model: Any) -> CommunicationPlan:
    """Create the `CommunicationPlan` of a model's step under a tfdp strategy.

    It describes the latest traced step, or a prediction if no step was traced.

    Raises:
        ValueError: If the model is not built.
    """
    if not model.built:
        raise ValueError(
            "The model has no variables yet. Call `model.build(input_shape)` or "
            f"train it first. Received: {model.name!r}, not built"
        )
    extended, variables = strategy.extended, model.trainable_variables
    reducer = extended.reducer
    optimizer: Any = getattr(model, "optimizer", None)
    others: dict[str, Any] = {}
    sparse: list[str] = []
    if is_sharded(optimizer):
        # The plan shows every bucket of the shards, since they do not record which
        # buckets a step skips because no variable in them has a gradient.
        plan, traced = BucketPlan(optimizer.shards.buckets), optimizer.was_traced
        routes = reducer.routes_of(plan)
        others["sharding"] = optimizer.sharding
        others["gather_ratio"] = optimizer.shards.compression_ratio
    else:
        plan, routes, sparse, traced = _plan_of(reducer, model)
    if hasattr(optimizer, "memory_report") and optimizer.built:
        others["memory"] = optimizer.memory_report()
    tuned = reducer.tuned_of(variables)
    return CommunicationPlan(
        plan.buckets,
        tuple(sparse),
        strategy.num_replicas_in_sync,
        extended.group.backend,
        routes,
        extended.algorithm_selector.topology.replicas_per_node,
        traced=traced,
        is_compiled=model in extended.compiled_models,
        gain="" if tuned is None else tuned.gain,
        gathers=dict(extended.step_gathers.get(model, {})),
        **others,
    )


def _plan_of(
    reducer: Any, model: Any
) -> tuple[BucketPlan, tuple[AlgorithmChoice, ...], list[str], bool]:
    """Return the buckets of a model's latest traced step, or else predicted ones.

    Args:
        reducer: `Reducer` of the strategy.
        model: Keras model whose optimizer is not sharded.

    Returns:
        Tuple of the `BucketPlan`, the `AlgorithmChoice` of each bucket, the paths of
        variables whose gradients are sent as rows, and whether a step was traced.
    """
    variables = model.trainable_variables
    for trained, plan, routes in reducer.plans.plans_of_subsets(variables):
        if plan.buckets:
            dense = {e.name for bucket in plan for e in bucket.entries}
            return plan, routes, [v.path for v in trained if v.path not in dense], True
    optimizer = getattr(model, "optimizer", None)
    plan, sparse = plan_of_backward_pass(
        model,
        reducer.options_of(variables),
        makes_dense=reducer.combines_means,
        accumulates=getattr(optimizer, "accumulation_steps", 1) > 1,
    )
    return plan, reducer.routes_of(plan, variables=variables), sparse, False


def gradients_of_outputs(model: Any, batch: Sequence[tf.Tensor]) -> list[Any]:
    """Return the gradients of the sum of a model's outputs by its variables.

    Args:
        model: Keras model with symbolic inputs.
        batch: Sequence of tensors, the inputs of the model in a flat order.

    Returns:
        List of tensors, `tf.IndexedSlices` or `None`, one for each trainable variable.
    """
    like = model.input if len(batch) > 1 else model.inputs[0]
    with tf.GradientTape() as tape:
        structure = tf.nest.pack_sequence_as(like, list(batch))
        outputs = tf.nest.flatten(model(structure, training=True))
        total = tf.add_n([tf.reduce_sum(tf.cast(o, tf.float32)) for o in outputs])
    return tape.gradient(total, [v.value for v in model.trainable_variables])


def plan_of_backward_pass(
    model: Any, options: Any, *, makes_dense: bool = False, accumulates: bool = False
) -> tuple[BucketPlan, list[str]]:
    """Plan buckets from a traced backward pass of the model, without running it.

    Args:
        model: Keras model with symbolic inputs.
        options: `CommunicationOptions`, with the sizes of buckets.
        makes_dense: Bool, whether sparse gradients are converted to dense ones, as for
            Adasum. Defaults to `False`.
        accumulates: Bool, whether gradients are accumulated over micro-batches. Then
            their sums are reduced, which are dense, in float32 or a wider dtype, and
            in the order of the variables. Defaults to `False`.

    Returns:
        Tuple of a `BucketPlan` and a list of strings, variables whose gradients are
        sent as rows.

    Raises:
        ValueError: If the model has no symbolic inputs.
    """
    if not getattr(model, "inputs", None):
        raise ValueError(
            "The plan needs the order of the backward pass, and this model has no "
            "symbolic inputs to trace it with. Train one step first. "
            f"Received: {model.name!r}"
        )
    variables = model.trainable_variables
    plans: list[BucketPlan] = []
    sparse: list[str] = []

    def backward(*batch: tf.Tensor) -> None:
        """Trace a backward pass, and append its `BucketPlan` to the outer list `plans`.

        Paths of variables with sparse gradients are appended to the outer list
        `sparse`. `batch` has the inputs of the model, in a flat order.
        """
        dense, names = [], []
        gradients = gradients_of_outputs(model, batch)
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None:
                continue
            if accumulates:
                dense.append(tf.zeros(variable.shape, wide_dtype(variable.dtype)))
            elif isinstance(gradient, tf.IndexedSlices) and not makes_dense:
                sparse.append(variable.path)
                continue
            else:
                dense.append(tf.convert_to_tensor(gradient))
                dense[-1].set_shape(variable.shape)
            names.append(variable.path)
        plans.append(make_plan(dense, names, options))

    specs = [tf.TensorSpec(x.shape, x.dtype) for x in tf.nest.flatten(model.inputs)]
    tf.function(backward, autograph=False).get_concrete_function(*specs)
    return plans[-1], sparse
