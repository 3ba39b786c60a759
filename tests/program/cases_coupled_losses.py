"""Losses of users that are no mean over rows: each gives one device's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tests.exactness.cases_exactness import precision
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.program.heads import MORE_ROWS, labels, train_heads

ops = keras.ops
Loss = Callable[[Any, Any], Any]


def squares(y: Any, p: Any) -> Any:
    return ops.square(y - p)  # [rows, columns]


def num_rows(y: Any) -> tf.Tensor:
    return tf.cast(tf.shape(y)[0], y.dtype)


def same(rows: Any) -> Any:
    return rows


def mean_or_zero(values: tf.Tensor) -> tf.Tensor:
    """Return the mean, and 0 of no values."""
    count = tf.cast(tf.size(values), values.dtype)
    return tf.math.divide_no_nan(tf.reduce_sum(values), count)


# Vectors, with an entry for each class or column.


def dice_of_classes(y: Any, p: Any) -> Any:
    overlap = ops.sum(y * p, axis=0)
    return 1 - (2 * overlap + 1) / (ops.sum(y, axis=0) + ops.sum(p, axis=0) + 1)


def tversky_of_classes(y: Any, p: Any) -> Any:
    hits = ops.sum(y * p, axis=0)
    misses = ops.sum(y * (1 - p), axis=0)
    false = ops.sum((1 - y) * p, axis=0)
    return 1 - (hits + 1) / (hits + 0.3 * misses + 0.7 * false + 1)


def class_weights_of_batch(y: Any, p: Any) -> Any:
    frequencies = ops.mean(y, axis=0)
    weights = 1 / (frequencies + 0.1)
    return ops.mean(ops.sum(-weights * y * ops.log(p + 0.01), axis=-1))


def class_weights_of_labels(y: Any, p: Any) -> Any:
    kinds = tf.argmax(y, 1)
    counts = tf.math.bincount(tf.cast(kinds, tf.int32), minlength=3, dtype=y.dtype)
    weights = num_rows(y) / (3 * tf.gather(counts, kinds))
    return weights * keras.losses.categorical_crossentropy(y, p)


VECTORS: dict[str, Loss] = {
    "means_of_columns": lambda y, p: ops.mean(squares(y, p), axis=0),
    "sums_of_columns": lambda y, p: ops.sum(squares(y, p), axis=0),
    "column_weights": lambda y, p: ops.sum(squares(y, p), axis=0) * ops.arange(3.0),
    "root_of_columns": lambda y, p: ops.sqrt(ops.mean(squares(y, p), axis=0)),
    "dice_of_classes": dice_of_classes,
    "mean_dice": lambda y, p: ops.mean(dice_of_classes(y, p)),
    "tversky": tversky_of_classes,
    "focal_tversky": lambda y, p: ops.power(tversky_of_classes(y, p), 0.75),
    "jaccard": lambda y, p: (
        1 - (ops.sum(y * p) + 1) / (ops.sum(y + p) - ops.sum(y * p) + 1)
    ),
    "class_weights_of_batch": class_weights_of_batch,
    "class_weights_of_labels": class_weights_of_labels,
    "largest_column": lambda y, p: ops.max(ops.mean(squares(y, p), axis=0)),
    "columns_kept": lambda y, p: ops.mean(squares(y, p), axis=0, keepdims=True),
    "normalized_columns": lambda y, p: (
        squares(y, p) / (ops.sum(squares(y, p), axis=0, keepdims=True) + 1)
    ),
}

# Numbers of a batch that are no mean: sums, products, roots, functions of sums.

NUMBERS: dict[str, Loss] = {
    "sum": lambda y, p: ops.sum(squares(y, p)),
    "sum_of_columns": lambda y, p: ops.sum(ops.mean(squares(y, p), axis=0)),
    "sum_by_rows": lambda y, p: ops.sum(squares(y, p)) / num_rows(y),
    "sum_by_constant": lambda y, p: ops.sum(squares(y, p)) / 16.0,
    "sum_of_rows_by_root": lambda y, p: ops.sum(squares(y, p)) / ops.sqrt(num_rows(y)),
    "mean_times_rows": lambda y, p: ops.mean(squares(y, p)) * num_rows(y),
    "mean_by_rows": lambda y, p: ops.mean(squares(y, p)) / num_rows(y),
    "means_of_rows_by_rows": lambda y, p: (
        ops.sum(ops.mean(squares(y, p), axis=-1)) / num_rows(y) / num_rows(y)
    ),
    "rows_times_rows": lambda y, p: ops.mean(squares(y, p), axis=-1) * num_rows(y),
    "root_of_mean": lambda y, p: ops.sqrt(ops.mean(squares(y, p))),
    "root_of_sum": lambda y, p: ops.sqrt(ops.sum(squares(y, p))),
    "norm": lambda y, p: tf.norm(y - p),
    "log_of_mean": lambda y, p: ops.log(ops.mean(squares(y, p)) + 0.1),
    "half_of_squares": lambda y, p: tf.nn.l2_loss(y - p),
    "product_of_means": lambda y, p: ops.mean(squares(y, p)) * ops.mean(ops.abs(y + p)),
    "square_of_mean": lambda y, p: ops.square(ops.mean(y - p)),
    "mean_and_sum": lambda y, p: (
        ops.mean(squares(y, p)) + 0.01 * ops.sum(ops.abs(y - p))
    ),
    "huber_summed": lambda y, p: tf.reduce_sum(
        tf.where(abs(y - p) < 0.3, squares(y, p) / 2, 0.3 * abs(y - p) - 0.045)
    ),
    "largest": lambda y, p: ops.max(squares(y, p)),
    "smooth_maximum": lambda y, p: ops.logsumexp(squares(y, p)),
    "smooth_maximum_of_columns": lambda y, p: ops.logsumexp(squares(y, p), axis=0),
    "product": lambda y, p: ops.mean(ops.prod(1 - 0.5 * squares(y, p), axis=0)),
    "weighted_by_sum": lambda y, p: ops.sum(y * squares(y, p)) / (ops.sum(y) + 1e-3),
    "mean_of_selected": lambda y, p: mean_or_zero(
        tf.boolean_mask(squares(y, p), y[:, 0] > 0.5)
    ),
    "conditional": lambda y, p: tf.cond(
        tf.reduce_mean(p) > 0.5,
        lambda: tf.reduce_sum(squares(y, p)),
        lambda: tf.reduce_mean(abs(y - p)),
    ),
}


# Statistics of all rows.


def pearson(y: Any, p: Any) -> Any:
    a, b = y - ops.mean(y), p - ops.mean(p)
    return 1 - ops.sum(a * b) / ops.sqrt(ops.sum(a * a) * ops.sum(b * b) + 1e-6)


def concordance(y: Any, p: Any) -> Any:
    covariance = ops.mean((y - ops.mean(y)) * (p - ops.mean(p)))
    gap = ops.square(ops.mean(y) - ops.mean(p))
    return 1 - 2 * covariance / (ops.var(y) + ops.var(p) + gap + 1e-6)


def cross_correlation(y: Any, p: Any) -> Any:
    """Barlow Twins: Zbontar et al. 2021, https://arxiv.org/abs/2103.03230."""
    found = tf.matmul(y, p, transpose_a=True) / num_rows(y)
    return tf.reduce_sum(tf.square(found - tf.eye(3, dtype=y.dtype)))


def covariance(y: Any, p: Any) -> Any:
    """VICReg: Bardes et al. 2022, https://arxiv.org/abs/2105.04906."""
    centred = p - ops.mean(p, axis=0)
    found = ops.matmul(ops.transpose(centred), centred) / num_rows(p)
    spread = ops.mean(ops.relu(1 - ops.sqrt(ops.var(p, axis=0) + 1e-4)))
    return spread + ops.sum(found**2) - ops.sum(ops.diagonal(found) ** 2)


def cox(y: Any, p: Any) -> Any:
    """Negative partial likelihood: times in the first column, events by the second."""
    order = tf.argsort(-y[:, 0])
    risk = tf.gather(p[:, 0], order)
    event = tf.gather(tf.cast(y[:, 1] > 0.4, y.dtype), order)
    found = tf.reduce_sum((tf.math.log(tf.cumsum(tf.exp(risk))) - risk) * event)
    return found / (tf.reduce_sum(event) + 1)


def cox_of_pairs(y: Any, p: Any) -> Any:
    """The same by a matrix of who is at risk when."""
    at_risk = tf.cast(y[:, 0][tf.newaxis] >= y[:, 0][:, tf.newaxis], y.dtype)
    total = tf.reduce_sum(tf.exp(p[:, 0])[tf.newaxis] * at_risk, axis=1)
    return tf.reduce_sum(tf.math.log(total) - p[:, 0]) / num_rows(y)


def kernel_distance(y: Any, p: Any) -> Any:
    def kernel(a: Any, b: Any) -> Any:
        gaps = ops.expand_dims(a, 1) - ops.expand_dims(b, 0)
        return ops.mean(ops.exp(-ops.sum(gaps**2, axis=-1)))

    return kernel(y, y) + kernel(p, p) - 2 * kernel(y, p)


STATISTICS: dict[str, Loss] = {
    "pearson": pearson,
    "concordance": concordance,
    "cross_correlation": cross_correlation,
    "covariance": covariance,
    "variance": lambda y, p: ops.var(y - p),
    "deviation": lambda y, p: tf.math.reduce_std(y - p, axis=0) + tf.reduce_mean(p),
    "explained": lambda y, p: (
        ops.sum(squares(y, p)) / (ops.sum(squares(y, ops.mean(y, axis=0))) + 1e-3)
    ),
    "scale_invariant": lambda y, p: (
        ops.mean((y - p) ** 2) - 0.5 * ops.square(ops.mean(y - p))
    ),
    "gap_of_means": lambda y, p: ops.sum((ops.mean(y, 0) - ops.mean(p, 0)) ** 2),
    "divergence_of_means": lambda y, p: ops.sum(
        ops.mean(y, 0) * ops.log(ops.mean(y, 0) / ops.mean(p, 0))
    ),
    "cox": cox,
    "cox_of_pairs": cox_of_pairs,
    "kernel_distance": kernel_distance,
    "log_determinant": lambda y, p: (
        -tf.linalg.logdet(tf.matmul(p, p, transpose_a=True) + tf.eye(3, dtype=p.dtype))
    ),
    "singular_values": lambda y, p: tf.reduce_sum(
        tf.linalg.svd(p, compute_uv=False)[:1]
    ),
    "einsum": lambda y, p: tf.einsum("ni,nj,ij->", y, p, tf.eye(3, dtype=y.dtype)),
}


# What goes along the batch.


def triplets_of_rows(y: Any, p: Any) -> Any:
    count = tf.shape(p)[0] // 3
    anchor, positive, negative = (p[i::3][:count] for i in range(3))
    near = tf.reduce_sum((anchor - positive) ** 2, 1)
    far = tf.reduce_sum((anchor - negative) ** 2, 1)
    return mean_or_zero(tf.nn.relu(near - far + 0.5)) + 0.1 * tf.reduce_mean(y * p)


def partitioned(y: Any, p: Any) -> Any:
    low, high = tf.dynamic_partition(p, tf.cast(y[:, 0] > 0.5, tf.int32), 2)
    return (mean_or_zero(low) - mean_or_zero(high) + 1) ** 2


def halved(y: Any, p: Any) -> Any:
    half = tf.shape(p)[0] // 2
    return mean_or_zero((p[:half] - y[-half:] if half is None else p[:half]) ** 2)


def first_against_second_half(y: Any, p: Any) -> Any:
    half = tf.shape(p)[0] // 2
    return mean_or_zero((p[:half] - y[half : 2 * half]) ** 2)


def centres_of_classes(y: Any, p: Any) -> Any:
    kinds = tf.argmax(y, 1)
    centres = tf.math.unsorted_segment_mean(p, kinds, 3)
    return tf.reduce_mean((p - tf.gather(centres, kinds)) ** 2)


def shuffled_by_key(y: Any, p: Any) -> Any:
    return squares(y, tf.gather(p, tf.argsort(y[:, 2])))


def selected_hard(y: Any, p: Any) -> Any:
    error = ops.mean(squares(y, p), axis=-1)
    is_hard = ops.cast(error > ops.mean(error), error.dtype)
    return ops.sum(error * is_hard) / (ops.sum(is_hard) + 1)


def recurrence(y: Any, p: Any) -> Any:
    found = tf.scan(lambda state, row: 0.5 * state + row, squares(y, p))
    return tf.reduce_mean(found)


def loop_over_rows(y: Any, p: Any) -> Any:
    found = tf.while_loop(
        lambda i, _: i < tf.shape(p)[0],
        lambda i, total: (i + 1, total + tf.reduce_sum((p[i] - y[0]) ** 2)),
        (0, tf.zeros([], p.dtype)),
    )
    return found[1]


def spectrum(y: Any, p: Any) -> Any:
    """Complex numbers along the batch, gathered, and sums of them."""
    found = tf.transpose(p - y)
    errors = tf.complex(found, 0.5 * found)
    twisted = errors * tf.exp(errors)
    mean = tf.reduce_mean(twisted, axis=1)
    return tf.reduce_mean(tf.abs(tf.signal.fft(errors))) + tf.reduce_sum(tf.abs(mean))


MOVED_ROWS: dict[str, Loss] = {
    "spectrum": spectrum,
    "softmax": lambda y, p: ops.mean(
        -ops.softmax(y, axis=0) * ops.log_softmax(p, axis=0)
    ),
    "sorted": lambda y, p: ops.mean(squares(ops.sort(y, axis=0), ops.sort(p, axis=0))),
    "ranks": lambda y, p: tf.reduce_mean(
        tf.cast(tf.argsort(tf.argsort(y[:, 0])), p.dtype) * p[:, 0]
    ),
    "top_k": lambda y, p: tf.reduce_mean(
        tf.math.top_k(tf.reduce_mean(squares(y, p), 1), (tf.shape(y)[0] + 1) // 2)[0]
    ),
    "above_mean": selected_hard,
    "reversed": lambda y, p: ops.mean(squares(y, ops.flip(p, axis=0))),
    "reversed_by_slice": lambda y, p: tf.reduce_mean(squares(y, p[::-1])),
    "rolled": lambda y, p: ops.mean(squares(y, ops.roll(p, 1, axis=0))),
    "features_rolled_by_rows": lambda y, p: ops.mean(
        squares(y, tf.roll(p, tf.shape(p)[0], -1))
    ),
    "halved": halved,
    "halves": first_against_second_half,
    "differenced": lambda y, p: mean_or_zero((p[1:] - p[:-1]) ** 2),
}
SELECTED_ROWS: dict[str, Loss] = {
    "every_second": lambda y, p: tf.reduce_mean(squares(y, p)[::2]),
    "all_but_first": lambda y, p: mean_or_zero(squares(y, p)[1:]),
    "first_row": lambda y, p: ops.mean(squares(y[:1], p)),
    "last_row": lambda y, p: ops.mean(squares(y, p[-1])),
    "triplets_of_rows": triplets_of_rows,
    "partitioned": partitioned,
    "summed_up": lambda y, p: ops.mean(squares(ops.cumsum(y, 0), ops.cumsum(p, 0))),
    "centres": centres_of_classes,
    "shuffled_by_key": shuffled_by_key,
    "recurrence": recurrence,
    "loop_over_rows": loop_over_rows,
    "position": lambda y, p: tf.reduce_mean(
        squares(y, p) * tf.range(num_rows(y), dtype=y.dtype)[:, tf.newaxis]
    ),
    "flat": lambda y, p: ops.mean(squares(ops.reshape(y, (-1,)), ops.reshape(p, -1))),
    "transposed": lambda y, p: ops.mean(squares(ops.transpose(y), ops.transpose(p))),
    "doubled": lambda y, p: ops.mean(
        ops.concatenate([squares(y, p), ops.abs(y - p)], axis=0)
    ),
    "repeated": lambda y, p: ops.mean(ops.repeat(squares(y, p), 2, axis=0)),
    "tiled": lambda y, p: ops.mean(ops.tile(squares(y, p), (2, 1))),
}


# Pairs of rows.


def similarities(p: Any) -> Any:
    unit = ops.normalize(p, axis=-1)
    return ops.matmul(unit, ops.transpose(unit))


def in_batch_negatives(y: Any, p: Any) -> Any:
    scores = ops.matmul(p, ops.transpose(y)) / 0.5
    return keras.losses.sparse_categorical_crossentropy(
        ops.arange(ops.shape(p)[0]), scores, from_logits=True
    )


def clip(y: Any, p: Any) -> Any:
    """Radford et al. 2021, https://arxiv.org/abs/2103.00020."""
    scores = tf.matmul(p, y, transpose_b=True)
    positions = tf.range(tf.shape(p)[0])
    loss = keras.losses.sparse_categorical_crossentropy
    rows = loss(positions, scores, from_logits=True)
    return (rows + loss(positions, tf.transpose(scores), from_logits=True)) / 2


def two_views(y: Any, p: Any) -> Any:
    """SimCLR: Chen et al. 2020, https://arxiv.org/abs/2002.05709."""
    both = tf.math.l2_normalize(tf.concat([p, y], 0), axis=1)
    count = tf.shape(p)[0]
    scores = tf.matmul(both, both, transpose_b=True)
    scores -= 1e3 * tf.eye(2 * count, dtype=p.dtype)
    positions = tf.concat([tf.range(count) + count, tf.range(count)], 0)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(positions, scores)
    )


def supervised_pairs(y: Any, p: Any) -> Any:
    alike = ops.cast(ops.matmul(y, ops.transpose(y)) > 0.5, p.dtype)
    return ops.mean(squares(alike, similarities(p)))


def distances_of_pairs(y: Any, p: Any) -> Any:
    def distances(x: Any) -> Any:
        return ops.sum((x[:, None] - x[None]) ** 2, axis=-1)

    return ops.mean(squares(distances(y), distances(p)))


def ranked_pairs(y: Any, p: Any) -> Any:
    gaps = p[:, :1] - ops.transpose(p[:, :1])
    above = ops.cast(y[:, :1] > ops.transpose(y[:, :1]), p.dtype)
    return ops.sum(above * ops.softplus(-gaps)) / (ops.sum(above) + 1)


def hardest_of_batch(y: Any, p: Any) -> Any:
    """Hermans et al. 2017, https://arxiv.org/abs/1703.07737."""
    squared = tf.reduce_sum((p[:, tf.newaxis] - p[tf.newaxis]) ** 2, -1)
    alike = tf.cast(tf.matmul(y, y, transpose_b=True) > 0.5, p.dtype)
    far = tf.reduce_max(squared * alike, axis=1)
    near = tf.reduce_min(squared + 10 * alike, axis=1)
    return tf.reduce_mean(tf.nn.softplus(far - near))


PAIRS: dict[str, Loss] = {
    "similarities": lambda y, p: ops.mean(squares(similarities(y), similarities(p))),
    "gram_by_einsum": lambda y, p: ops.mean(
        squares(ops.einsum("id,jd->ij", y, y), ops.einsum("id,jd->ij", p, p))
    ),
    "in_batch_negatives": in_batch_negatives,
    "clip": clip,
    "two_views": two_views,
    "supervised_pairs": supervised_pairs,
    "distances_of_pairs": distances_of_pairs,
    "ranked_pairs": ranked_pairs,
    "hardest_of_batch": hardest_of_batch,
    "circle_of_rows": lambda y, p: ops.mean(ops.logsumexp(similarities(p) * 3, axis=1)),
    "all_pairs_summed": lambda y, p: ops.sum(ops.matmul(p, ops.transpose(p))) / 64,
    "eigenvalue": lambda y, p: tf.reduce_max(
        tf.linalg.eigvalsh(tf.matmul(p, p, transpose_b=True))
    ),
}


def _trained(env: Env, losses: dict[str, Loss], **options: Any) -> dict:
    # In float64 a fault is no rounding error, however many rows a loss couples.
    with precision("float64"):
        return train_heads(env, losses, **options)


_CASE: dict[str, Any] = {"tol": 1e-9, "deadline_seconds": 300.0}
# One of each way to couple rows, all of them finite for a single row.
QUICK: dict[str, Loss] = {
    **{name: NUMBERS[name] for name in ("root_of_mean", "mean_of_selected")},
    "sorted": MOVED_ROWS["sorted"],
    "clip": PAIRS["clip"],
}


@case("Losses that couple the rows of a batch, one of each kind", **_CASE)
def losses_that_couple_rows(env: Env) -> dict:
    return _trained(env, QUICK, rate=0.005)


@case("Losses with an entry for each class or column", **_CASE)
@same_as("losses_that_couple_rows")
def losses_of_columns(env: Env) -> dict:
    return _trained(env, VECTORS, targets=labels)


@case("Losses that are sums, products, roots and functions of sums", **_CASE)
@same_as("losses_that_couple_rows")
def losses_that_are_no_means(env: Env) -> dict:
    return _trained(env, NUMBERS, rate=0.005)


@case("Losses of statistics of all rows", **_CASE)
@same_as("losses_that_couple_rows")
def losses_of_statistics(env: Env) -> dict:
    return _trained(env, STATISTICS, batch_rows=MORE_ROWS)


# As one case, the two would pass the deadline on a slow machine.
@case("Losses that sort or move the rows of a batch", **_CASE)
@same_as("losses_that_couple_rows")
def losses_that_move_rows(env: Env) -> dict:
    return _trained(env, MOVED_ROWS)


@case("Losses that select, follow or repeat the rows of a batch", **_CASE)
@same_as("losses_that_couple_rows")
def losses_that_select_rows(env: Env) -> dict:
    return _trained(env, SELECTED_ROWS)


@case("Losses of pairs of rows", **_CASE)
@same_as("losses_that_couple_rows")
def losses_of_pairs_of_rows(env: Env) -> dict:
    return _trained(env, PAIRS, batch_rows=MORE_ROWS)
