"""What is held of a tensor, and what runs whole: rules by their decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfdp.ground._compat import programs
from tfdp.training.program.facts import Fact, Form, static_sizes, with_rows
from tfdp.training.program.plan import Plan, ProgramProperties, make_plan

INPUTS = {
    "x": ([None, 3, 4], tf.float32),
    "y": ([None, 4], tf.float32),
    "v": ([None], tf.float32),
    "k": ([None], tf.int32),
    "b": ([None, 3], tf.bool),
    "u": ([None, None, None], tf.float32),
    "w": ([4, 4], tf.float32),
    "c": ([4], tf.float32),
}
WEIGHTS = ("w", "c")


def plan_of(function: Callable[[dict[str, Any]], Any]) -> tuple[Plan, Any]:
    """Plan a function of the inputs; return the plan and the result."""
    graph, facts = programs.ProgramGraph(), {}
    with graph.as_default():
        given = {
            name: tf.compat.v1.placeholder(dtype, shape)
            for name, (shape, dtype) in INPUTS.items()
        }
        result = function(given)
    for name, tensor in given.items():
        sizes = static_sizes(tensor, is_free=True)
        assert sizes is not None
        if name in WEIGHTS:
            facts[id(tensor)] = Fact(Form.WHOLE, sizes=sizes)
        else:
            facts[id(tensor)] = Fact(Form.ROWS, sizes=with_rows(sizes, 0, 1))
    return make_plan(
        graph, facts, [result], ProgramProperties(lambda _: False, {})
    ), result


def held(function: Callable) -> tuple[str, set[str]]:
    """Return what is held of a result, and the operations that run whole."""
    plan, result = plan_of(function)
    fact = plan.fact(result)
    text = fact.form.value
    if fact.is_rows:
        text += f" {fact.axis}"
    whole = {
        op.type
        for op in plan.live
        if op in plan.decisions and plan.decisions[op].is_whole
    }
    return text, whole


def gradient(function: Callable, name: str) -> Callable:
    """Return a function that computes the gradient of a sum."""

    def compute(given: dict[str, Any]) -> Any:
        return tf.gradients(function(given), given[name])[0]

    return compute


def cudnn(given: dict[str, Any], *, major: bool) -> tf.Tensor:
    """The outputs of an LSTM of cuDNN, as Keras creates it on GPUs; none runs here."""
    inputs, state = given["x"], given["y"][:, tf.newaxis]
    if major:
        inputs, state = tf.transpose(inputs, [1, 0, 2]), given["y"][tf.newaxis]
    return tf.raw_ops.CudnnRNNV3(
        input=inputs,
        input_h=state,
        input_c=state,
        params=given["c"],
        sequence_lengths=given["k"],
        rnn_mode="lstm",
        time_major=major,
    )[0]


N = {"n": lambda g: tf.shape(g["x"])[0]}

DIVIDED = {
    # Elements.
    "one operand": (lambda g: tf.tanh(g["x"]), "rows 0"),
    "rows and a weight": (lambda g: g["x"] + g["c"], "rows 0"),
    "rows along another axis": (lambda g: g["v"] + tf.transpose(g["y"]), "rows 1"),
    "rows and a whole mean": (lambda g: g["v"] - tf.reduce_mean(g["v"]), "rows 0"),
    "conditions": (lambda g: tf.where(g["b"], g["x"][..., 0], 0.0), "rows 0"),
    "a cast": (lambda g: tf.cast(g["k"], tf.float32), "rows 0"),
    "a sum of three": (lambda g: tf.add_n([g["y"]] * 3), "rows 0"),
    # Reductions.
    "a sum over rows": (lambda g: tf.reduce_sum(g["x"], 0), "part"),
    "a sum over all": (lambda g: tf.reduce_sum(g["x"]), "part"),
    "a sum over features": (lambda g: tf.reduce_sum(g["x"], [1, 2]), "rows 0"),
    "a sum before rows": (
        lambda g: tf.reduce_sum(tf.transpose(g["x"], [1, 0, 2]), 0),
        "rows 0",
    ),
    "a mean over rows": (lambda g: tf.reduce_mean(g["x"], [0, 1]), "part"),
    "a maximum over rows": (lambda g: tf.reduce_max(g["x"], 0), "whole"),
    "a maximum over features": (lambda g: tf.reduce_max(g["x"], -1), "rows 0"),
    "an argument of features": (lambda g: tf.argmax(g["x"], 1), "rows 0"),
    "half the sum of squares": (lambda g: tf.nn.l2_loss(g["x"]), "part"),
    # Products of matrices.
    "rows by a weight": (lambda g: g["y"] @ g["w"], "rows 0"),
    "a gradient of a weight": (
        lambda g: tf.matmul(g["y"], g["y"], transpose_a=True),
        "part",
    ),
    "all pairs of rows": (
        lambda g: tf.matmul(g["y"], g["y"], transpose_b=True),
        "rows 0",
    ),
    "batches of matrices": (
        lambda g: tf.matmul(g["x"], g["x"], transpose_b=True),
        "rows 0",
    ),
    "a part by a weight": (lambda g: tf.reduce_sum(g["x"], 0) @ g["w"], "part"),
    "einsum over rows": (lambda g: tf.einsum("btc,bc->tc", g["x"], g["y"]), "part"),
    "einsum that moves rows": (
        lambda g: tf.einsum("btc,cd->dbt", g["x"], g["w"]),
        "rows 1",
    ),
    # Layouts.
    "a transpose": (lambda g: tf.transpose(g["x"], [2, 0, 1]), "rows 1"),
    "an axis put in": (lambda g: g["x"][tf.newaxis], "rows 1"),
    "rows merged with time": (lambda g: tf.reshape(g["x"], [-1, 4]), "rows 0"),
    "rows by their number": (
        lambda g: tf.reshape(g["x"], [tf.shape(g["x"])[0], -1]),
        "rows 0",
    ),
    "rows apart again": (
        lambda g: tf.reshape(tf.reshape(g["x"], [-1, 4]), [-1, 3, 4]),
        "rows 0",
    ),
    "a stack": (lambda g: tf.stack([g["y"], g["y"]], 0), "rows 1"),
    "features side by side": (lambda g: tf.concat([g["y"], g["y"]], 1), "rows 0"),
    "a feature": (lambda g: g["x"][:, 1, ::2], "rows 0"),
    "features unstacked": (lambda g: tf.unstack(g["x"], axis=1)[2], "rows 0"),
    "features split": (lambda g: tf.split(g["y"], 2, 1)[1], "rows 0"),
    "features padded": (lambda g: tf.pad(g["y"], [[0, 0], [1, 0]]), "rows 0"),
    "features reversed": (lambda g: tf.reverse(g["x"], [-1]), "rows 0"),
    "features rolled": (lambda g: tf.roll(g["x"], 1, -1), "rows 0"),
    "features rolled by the rows": (
        lambda g: tf.roll(g["x"], tf.shape(g["x"])[0], -1),
        "rows 0",
    ),
    "features tiled": (lambda g: tf.tile(g["y"], [1, 2]), "rows 0"),
    "a running sum of features": (lambda g: tf.cumsum(g["x"], 1), "rows 0"),
    "a table's rows": (lambda g: tf.gather(g["w"], g["k"]), "rows 0"),
    "a feature of each row": (
        lambda g: tf.gather(g["y"], g["k"], batch_dims=1, axis=1),
        "rows 0",
    ),
    "one-hot vectors": (lambda g: tf.one_hot(g["k"], 5, axis=0), "rows 1"),
    "sums by class": (
        lambda g: tf.math.unsorted_segment_sum(g["y"], g["k"], 3),
        "part",
    ),
    # Of each row.
    "softmax of features": (lambda g: tf.nn.softmax(g["x"]), "rows 0"),
    "the best features": (lambda g: tf.math.top_k(g["y"], 2)[0], "rows 0"),
    "sequences reversed, each of its length": (
        lambda g: tf.reverse_sequence(g["x"], g["k"], seq_axis=1, batch_axis=0),
        "rows 0",
    ),
    "a layer of cuDNN": (lambda g: cudnn(g, major=False), "rows 0"),
    "a layer of cuDNN, time first": (lambda g: cudnn(g, major=True), "rows 1"),
    "the weights' gradient of a layer of cuDNN": (
        gradient(lambda g: cudnn(g, major=False), "c"),
        "part",
    ),
    "the states' gradient of a layer of cuDNN": (
        gradient(lambda g: cudnn(g, major=True), "y"),
        "rows 0",
    ),
    # Sizes.
    "numbers of rows": (lambda g: tf.range(tf.shape(g["x"])[0]), "rows 0"),
    "zeros for each row": (lambda g: tf.zeros([tf.shape(g["x"])[0], 2]), "rows 0"),
    "a weight for each row": (
        lambda g: tf.broadcast_to(g["c"], [tf.shape(g["x"])[0], 4]),
        "rows 0",
    ),
    "a shape": (lambda g: tf.shape(g["x"]), "sizes"),
    "the number of entries": (lambda g: tf.size(g["x"]), "sizes"),
    "a feature's size": (lambda g: tf.shape(g["x"])[1], "whole"),
    "a sum divided by the rows": (
        lambda g: tf.reduce_sum(g["x"]) / tf.cast(tf.shape(g["x"])[0], tf.float32),
        "part",
    ),
    "noise": (
        lambda g: tf.random.stateless_normal(tf.shape(g["x"]), [1, 2]),
        "rows 0",
    ),
    "noise of a generator of its own": (
        lambda g: tf.tanh(tf.random.normal(tf.shape(g["x"]))),
        "rows 0",
    ),
    "rows after rows": (lambda g: tf.tanh(tf.concat([g["y"], g["y"]], 0)), "rows 0"),
    # Gradients.
    "a gradient of features padded": (
        lambda g: tf.gradients(tf.tanh(tf.pad(g["y"], [[0, 0], [1, 2]])), g["y"])[0],
        "rows 0",
    ),
    "the shape of a part": (
        lambda g: tf.shape(
            tf.reshape(tf.reduce_sum(g["y"], 0), tf.cast(g["w"][:2, 0], tf.int32))
        ),
        "whole",
    ),
    "a dense gradient": (gradient(lambda g: tf.tanh(g["y"] @ g["w"]), "w"), "part"),
    "a bias's gradient": (gradient(lambda g: tf.tanh(g["x"] + g["c"]), "c"), "part"),
    "a gradient of rows": (
        gradient(lambda g: tf.reduce_mean(g["x"] ** 2), "x"),
        "rows 0",
    ),
    "a table's gradient": (
        lambda g: tf.convert_to_tensor(
            gradient(lambda h: tf.gather(h["w"], h["k"]) ** 2, "w")(g)
        ),
        "part",
    ),
}

# What has no rule gets its inputs whole.
WHOLE = {
    "softmax along rows": (lambda g: tf.nn.softmax(g["v"]), {"Softmax"}),
    "a running sum of rows": (lambda g: tf.cumsum(g["y"]), {"Cumsum"}),
    "as many columns as rows": (
        lambda g: tf.matmul(g["y"], g["w"])[:, : tf.shape(g["y"])[0]],
        {"StridedSlice"},
    ),
    "as many columns as rows, by their number": (
        lambda g: tf.slice(g["y"], [0, 0], [-1, tf.shape(g["y"])[0]]),
        {"Slice"},
    ),
    "rows reversed": (lambda g: tf.reverse(g["y"], [0]), {"ReverseV2"}),
    "rows rolled": (lambda g: tf.roll(g["y"], 1, 0), {"Roll"}),
    "the best rows": (lambda g: tf.math.top_k(g["v"], 2)[0], {"TopKV2"}),
    "the first row": (lambda g: g["y"][0], {"StridedSlice"}),
    "every other row": (lambda g: g["y"][::2], {"StridedSlice"}),
    "rows padded": (lambda g: tf.pad(g["y"], [[1, 0], [0, 0]]), {"Pad"}),
    "rows tiled": (lambda g: tf.tile(g["y"], [2, 1]), {"Tile"}),
    "the best row": (lambda g: tf.argmax(g["y"], 0), {"ArgMax"}),
    "rows in another order": (
        lambda g: tf.gather(g["y"], g["k"] % tf.shape(g["y"])[0]),
        {"GatherV2"},
    ),
    "entries of two rows, perhaps": (
        lambda g: tf.reshape(g["u"], [-1, 2]),
        {"Reshape"},
    ),
    "as many columns as another tensor has": (
        lambda g: tf.reshape(g["y"], [-1, tf.shape(g["u"])[1]]),
        {"Reshape"},
    ),
    "axes that need not be equal": (
        lambda g: tf.reshape(
            tf.transpose(g["u"], [1, 0, 2]), tf.gather(tf.shape(g["u"]), [2, 0, 1])
        ),
        {"Reshape"},
    ),
    "classes that are rows": (
        lambda g: tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.zeros([4], tf.int32), tf.transpose(g["y"])
        ),
        {"SparseSoftmaxCrossEntropyWithLogits"},
    ),
    "a matrix for all rows": (
        lambda g: tf.linalg.triangular_solve(g["w"], g["y"][:, :, tf.newaxis]),
        {"MatrixTriangularSolve"},
    ),
    "entries of two rows": (lambda g: tf.reshape(g["b"], [-1, 2]), {"Reshape"}),
    "rows behind features": (
        lambda g: tf.reshape(g["y"], [4, tf.shape(g["y"])[0]]),
        {"Reshape"},
    ),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_an_operation_with_a_rule_is_divided(name):
    function, result = DIVIDED[name]
    assert held(function) == (result, set())


@pytest.mark.parametrize("name", WHOLE)
def test_an_operation_without_a_rule_runs_whole(name):
    function, operations = WHOLE[name]
    assert held(function) == ("whole", operations)


def test_half_of_the_rows_is_no_multiple_of_them():
    def half(given):
        count = tf.cast(tf.shape(given["x"])[0], tf.float32) * 0.5
        return tf.zeros([tf.cast(count, tf.int32)])

    assert held(half)[0] == "whole"


@pytest.mark.parametrize(
    "function",
    [
        lambda g: tf.gather(tf.shape(g["x"]), -1),  # is 0 with XLA
        lambda g: tf.slice(tf.shape(g["x"]), [2], [2]) * [2, 2],
        lambda g: tf.slice(tf.shape(g["x"]), [2], tf.shape(g["x"])[1:2] * 0 + 2),
    ],
)
def test_nothing_is_known_of_an_operation_that_would_fail(function):
    """It may lie in a branch that never runs."""
    plan, result = plan_of(function)
    assert plan.fact(result).value is None


def test_the_sizes_of_a_list_are_not_those_of_its_items():
    plan, result = plan_of(lambda g: tf.scan(lambda a, row: a + row, g["y"]))
    fact = plan.fact(result)
    assert fact.form is Form.WHOLE
    assert fact.rank in (None, 2)


def test_a_part_that_is_repeated_for_each_row_is_summed_before():
    plan, result = plan_of(
        lambda g: tf.tile(tf.reshape(tf.reduce_sum(g["v"]), [1]), [tf.shape(g["v"])[0]])
    )
    assert plan.fact(result).form is Form.ROWS
    assert plan.sums
    (size,) = plan.fact(result).sizes
    assert (size.kind, size.number) == ("rows", 1)


def test_a_loop_that_sums_over_rows_runs_whole_as_it_has_no_collectives_inside():
    def loop(given):
        return tf.while_loop(
            lambda i, total: i < 3,
            lambda i, total: (i + 1, total * 0.5 + tf.reduce_max(given["x"])),
            [0, tf.zeros([])],
        )[1]

    assert held(loop)[0] == "whole"


def test_a_loop_keeps_no_shapes_that_follow_from_the_number_of_rows():
    def loop(given):
        return tf.while_loop(
            lambda i, _: i < 3,
            lambda i, state: (i + 1, tf.tanh(state) * given["y"]),
            [0, given["y"]],
        )[1]

    plan, _ = plan_of(gradient(loop, "y"))
    bodies = [plan.decisions[op].plans[1] for op in plan.live if "While" in op.type]
    kept = {
        op.inputs[1].dtype
        for body in bodies
        for op in body.live
        if op.type == "TensorListPushBack"
    }
    assert kept == {tf.float32}
