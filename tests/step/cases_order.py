"""The order of reads and writes of a variable in the graph that is executed."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.eager import context

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.step.cases_accumulation import Switches, _penalized, sgd

# A bucket for each variable, so that none waits for the gradients of another.
TINY = tfdp.CommunicationOptions(bucket_mb=1e-6, first_bucket_mb=1e-6)
# Ops that hand a variable's handle on.
HAND_ON = ("Identity", "Switch", "Enter")


def _name(edge: str) -> str:
    return edge.lstrip("^").split(":")[0]


def unordered(graph: tf.compat.v1.GraphDef) -> list[tuple[str, str]]:
    """Returns the writes of a graph that nothing orders with another access.

    Args:
        graph: An optimized graph, without loops.

    Returns:
        Pairs of ops that access one variable, one of which writes, without a path
        from either to the other.
    """
    nodes = {node.name: node for node in graph.node}
    before: dict[str, set[str]] = {}

    def ancestors(name: str) -> set[str]:
        if name not in before:
            inputs = {_name(edge) for edge in nodes[name].input} & nodes.keys()
            before[name] = inputs.union(*map(ancestors, inputs))
        return before[name]

    def variable(name: str) -> str:
        node = nodes[name]
        return variable(_name(node.input[0])) if node.op in HAND_ON else name

    accesses = defaultdict(list)
    for node in graph.node:
        if _is_read(node) or _is_write(node):
            accesses[variable(_name(node.input[0]))].append(node)
    return [
        (first.name, second.name)
        for ops in accesses.values()
        for index, first in enumerate(ops)
        for second in ops[index + 1 :]
        if (_is_write(first) or _is_write(second))
        and not _exclusive(first.name, second.name)
        and first.name not in ancestors(second.name)
        and second.name not in ancestors(first.name)
    ]


def _exclusive(first: str, second: str) -> bool:
    """Whether two ops are in the two branches of one `tf.cond`."""
    scopes = zip(first.split("/"), second.split("/"), strict=False)
    return next(({a, b} for a, b in scopes if a != b), None) == {"then", "else"}


def _is_read(node) -> bool:
    return node.op == "ReadVariableOp"


def _is_write(node) -> bool:
    return node.op.startswith("Assign") and node.op.endswith("VariableOp")


@contextlib.contextmanager
def optimized_graphs() -> Iterator[list]:
    """Collects the graphs of the functions that are first executed inside."""
    graphs: list = []
    context.enable_run_metadata()
    try:
        yield graphs
        found = context.export_run_metadata().function_graphs
        graphs += [entry.post_optimization_graph for entry in found]
    finally:
        context.disable_run_metadata()


def _unordered_of_fit(env: Env, switches: Switches, *more: object) -> list:
    strategy = env.strategy
    if strategy is not None:
        strategy = tfdp.MirroredStrategy(["CPU:0", "CPU:1"], communication=TINY)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = common.compiled(_penalized(), sgd())
    data = common.regression_data(32)
    callbacks = [*switches.callbacks(env), *more]
    with optimized_graphs() as graphs:
        common.fit(model, *data, callbacks=callbacks)
    num_writes = max(sum(map(_is_write, graph.node)) for graph in graphs)
    assert num_writes >= len(model.trainable_variables)
    return [pair for graph in graphs for pair in unordered(graph)]


@registry.case(
    "Each update comes after the reads of its step",
    setups=("mirrored",),
)
def no_update_passes_a_read_of_its_variable(env: Env) -> dict:
    if env.is_reference:
        return {}
    assert _unordered_of_fit(env, Switches(2, scale=16.0)) == []
    return {}


@registry.case(
    "Each update comes after the reads of its step, with sharded state",
    setups=("mirrored",),
)
@registry.same_as("no_update_passes_a_read_of_its_variable")
def no_update_of_sharded_state_passes_a_read_of_its_variable(env: Env) -> dict:
    if env.is_reference:
        _see_the_fault_of_tensorflow(env)
        return {}
    sharded = tfdp.callbacks.ShardedOptimizer
    assert _unordered_of_fit(env, Switches()) == []
    assert _unordered_of_fit(env, Switches(), sharded()) == []
    assert _unordered_of_fit(env, Switches(2), sharded(stage=2)) == []
    assert _unordered_of_fit(env, Switches(), sharded(stage=3)) == []
    return {}


def _see_the_fault_of_tensorflow(env: Env) -> None:
    """Checks that the test sees what plain Keras meets (docs/reports/exactness.md)."""
    assert _unordered_of_fit(env, Switches()) == []
    options = tf.config.optimizer.get_experimental_options()
    # References run without Grappler.
    grappler = {"disable_meta_optimizer": False, "dependency_optimization": True}
    tf.config.optimizer.set_experimental_options(grappler)
    try:
        ((read, write),) = _unordered_of_fit(env, Switches())
    finally:
        tf.config.optimizer.set_experimental_options(options)
    assert "scaled_penalty" in read
    assert "Assign" in write
