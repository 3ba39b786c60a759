"""What the graph of a number tells about the rows of a batch."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from tfdp.losses.row_forms.form import Form, Kind
from tfdp.losses.row_forms.forms import Forms

ops = keras.ops
crossentropy = keras.losses.sparse_categorical_crossentropy
WEIGHTS = tf.constant([[1.0, 2.0], [3.0, 4.0]])


def summed(x):
    return tf.reduce_sum(x, 1)


def num_rows(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


MEANS = {
    "mean in a function in a function": tf.function(
        lambda x: tf.function(tf.reduce_mean)(x * WEIGHTS[0])
    ),
    "mean": tf.reduce_mean,
    "mean of sums": lambda x: tf.reduce_mean(summed(x)),
    "keras mean": lambda x: ops.mean(ops.square(x)),
    "mean twice": lambda x: tf.reduce_mean(tf.reduce_mean(x, 0)),
    "sum by rows": lambda x: tf.reduce_sum(x) / num_rows(x),
    "sum by size": lambda x: tf.math.divide_no_nan(
        tf.reduce_sum(x), tf.cast(tf.size(x), tf.float32)
    ),
    "squares of a layer by rows": lambda x: (
        tf.reduce_sum(tf.square(x @ WEIGHTS)) / num_rows(x)
    ),
    "rows by number, added": lambda x: tf.reduce_sum(summed(x) / num_rows(x)),
    "scaled": lambda x: 3.0 - 0.5 * tf.reduce_mean(x),
    "sum of means": lambda x: ops.sum([tf.reduce_mean(x), tf.reduce_mean(x @ WEIGHTS)]),
    "with a penalty": lambda x: tf.reduce_mean(x) + tf.nn.l2_loss(WEIGHTS),
    "flattened": lambda x: tf.reduce_mean(tf.reshape(x, [-1])),
    "transposed": lambda x: tf.reduce_mean(tf.transpose(x), axis=[0, 1]),
    "along the axis of rows": lambda x: tf.reduce_mean(tf.reduce_mean(x, axis=0)),
    "a length counted over rows": lambda x: tf.reduce_mean(
        x * tf.cast(tf.sequence_mask(tf.cast(x[:, 0], tf.int32)), tf.float32)[:, :2]
    ),
    "noise as long as the batch": lambda x: tf.reduce_mean(
        tf.random.normal([tf.shape(x)[0], 3])
    ),
    "ones as long as the batch": lambda x: ops.mean(ops.ones((ops.shape(x)[0], 1))),
    "two batches in one": lambda x: tf.reduce_mean(tf.concat([x, 2 * x], 0)),
    "a reduction of rows alone": lambda x: tf.reduce_mean(tf.norm(x, axis=1)),
    "attention": lambda x: tf.reduce_mean(
        tf.matmul(
            tf.nn.softmax(tf.matmul(x[..., None], x[..., None], transpose_b=True)),
            x[..., None],
        )
    ),
    "a factor before the rows": lambda x: tf.reduce_mean(0.5 * x * tf.sin(x)),
    "einsum": lambda x: tf.reduce_mean(tf.einsum("bi,ij->bj", x, WEIGHTS)),
    "labels": lambda x: tf.reduce_mean(crossentropy(tf.ones_like(x[:, 0]), x)),
}
SUMS = {
    "sum in a function": tf.function(tf.reduce_sum),
    "sum in either branch": lambda x: tf.cond(
        x[0, 0] > 0, lambda: tf.reduce_sum(x), lambda: tf.reduce_sum(x * x)
    ),
    "sum": tf.reduce_sum,
    "keras sum": lambda x: ops.sum(ops.abs(x)),
    "sum over a constant": lambda x: tf.reduce_sum(x) / 64.0,
    "sum in two steps": lambda x: tf.reduce_sum(tf.reduce_sum(x, axis=0)),
    "half of squares": tf.nn.l2_loss,
    "mean times rows": lambda x: tf.reduce_mean(summed(x)) * num_rows(x),
    "sum of sums": lambda x: tf.add_n([tf.reduce_sum(x), tf.reduce_sum(x * x)]),
    "einsum to a number": lambda x: tf.einsum("bi->", x),
    "sum of what an unknown axis has": lambda x: tf.reduce_sum(
        tf.while_loop(lambda i, _: i < 2, lambda i, s: (i + 1, s + x), [0, x])[1]
    ),
}
STATISTICS = {
    "root of a mean": lambda x: tf.sqrt(tf.reduce_mean(x)),
    "ratio of sums": lambda x: tf.reduce_sum(x) / tf.reduce_sum(x * x),
    "largest": tf.reduce_max,
    "cross-correlation": lambda x: tf.reduce_sum(
        tf.square(tf.matmul(x, x, transpose_a=True) / num_rows(x))
    ),
}
PAIRS = {
    "less their mean": lambda x: tf.reduce_mean((x - tf.reduce_mean(x, 0)) ** 2),
    "variance": lambda x: tf.reduce_sum(tf.math.reduce_variance(x, 0)),
    "similarities": lambda x: tf.reduce_mean(tf.matmul(x, x, transpose_b=True)),
    "similarities by a transpose": lambda x: ops.mean(ops.matmul(x, ops.transpose(x))),
    "similarities by einsum": lambda x: tf.reduce_mean(tf.einsum("id,jd->ij", x, x)),
    "distances": lambda x: tf.reduce_mean(
        tf.square(tf.expand_dims(x, 0) - tf.expand_dims(x, 1))
    ),
    "in-batch negatives": lambda x: tf.reduce_mean(
        crossentropy(tf.range(tf.shape(x)[0]), tf.matmul(x, x, transpose_b=True))
    ),
}
TERMS = {
    "mean and sum": lambda x: tf.reduce_mean(x) + tf.reduce_sum(x),
    "sum and penalty": lambda x: ops.sum([tf.reduce_sum(x), tf.nn.l2_loss(WEIGHTS)]),
}
EXPECTED = {
    **{name: (f, Form(Kind.TOTAL)) for name, f in MEANS.items()},
    **{name: (f, Form(Kind.TOTAL, 1)) for name, f in SUMS.items()},
    **{name: (f, Form(Kind.STATISTIC)) for name, f in STATISTICS.items()},
    **{name: (f, Form(Kind.PAIRS)) for name, f in PAIRS.items()},
    **{name: (f, Form(Kind.TERMS)) for name, f in TERMS.items()},
    "penalty of weights": (lambda x: tf.nn.l2_loss(WEIGHTS), Form(Kind.COUNT)),
    "number of rows": (num_rows, Form(Kind.COUNT, 1)),
    "another form in each branch": (
        lambda x: tf.cond(
            x[0, 0] > 0, lambda: tf.reduce_sum(x), lambda: tf.reduce_mean(x)
        ),
        Form(Kind.UNKNOWN),
    ),
}


NUMBERS = ("mean times rows", "number of rows", "ones as long as the batch")


def form_of(function, rows):
    found = []

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([rows, 2])])
    def trace(x):
        found.append(Forms([x], num_replicas=2).of(function(x)))

    trace.get_concrete_function()
    form = found[0]
    # An unknown part of the noise of a statistic is its degree.
    is_number = form.kind in (Kind.TOTAL, Kind.COUNT)
    return Form(form.kind, form.degree if is_number else 0)


@pytest.mark.parametrize("rows", [None, 7], ids=["any", "seven"])
@pytest.mark.parametrize("name", EXPECTED)
def test_the_graph_tells_how_a_number_depends_on_rows(name, rows):
    if rows and name in NUMBERS:
        pytest.skip("the number of rows is a constant like any other")
    function, expected = EXPECTED[name]
    assert form_of(function, rows) == expected
