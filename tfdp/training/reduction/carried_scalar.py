"""A scalar that a bucket of gradients carries, so that it needs no collective."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdp.ground.base import step_context
from tfdp.ground.plans.buckets import BucketPlan
from tfdp.training.compression.algorithm_choice import AlgorithmChoice


@dataclasses.dataclass
class CarriedScalar:
    """Scalar, such as a loss, that is appended to a bucket of gradients to be summed.

    Args:
        value: Scalar float32 tensor of this replica.
        total: Scalar tensor, the sum over the replicas, or `None` as long as no bucket
            has carried it. Defaults to `None`.
    """

    value: tf.Tensor
    total: tf.Tensor | None = None


@contextlib.contextmanager
def carrying(value: tf.Tensor | None) -> Iterator[CarriedScalar | None]:
    """Open a context in which a bucket of this thread's gradients also sums a scalar.

    The next all-reduce of gradients appends the scalar to the bucket that `carrier_of`
    chooses, if there is one; all-reduces with a `weight` of gradients do not.

    Args:
        value: Scalar float32 tensor of this replica, or `None` for none.

    Yields:
        `CarriedScalar`, whose `total` is set when a bucket has carried it; or `None` if
        `value` is `None`.
    """
    carried = None if value is None else CarriedScalar(value)
    with step_context.using(carried=carried):
        yield carried


def pending_scalar() -> CarriedScalar | None:
    """Return the scalar that a bucket of gradients has to sum, or `None` without one.

    It is the scalar of the active context `carrying`, until a bucket has summed it.
    """
    carried: CarriedScalar | None = step_context.current().carried
    return carried if carried is not None and carried.total is None else None


def carrier_of(plan: BucketPlan, routes: Sequence[AlgorithmChoice]) -> int | None:
    """Choose the bucket that a scalar is appended to; return its position in the plan.

    A compressed bucket would round the scalar, and Adasum does not sum. The smallest
    bucket of several gradients is preferred, since these are concatenated anyway.

    Args:
        plan: `BucketPlan`.
        routes: Sequence of the `AlgorithmChoice` of each bucket.

    Returns:
        Int; or `None` if every bucket is compressed, combined by Adasum, or of another
        dtype than float32 and float64.
    """
    fit = [
        (len(bucket.indices) == 1, bucket.num_bytes, position)
        for position, (bucket, route) in enumerate(zip(plan, routes, strict=True))
        if bucket.dtype in ("float32", "float64")
        and not route.is_compressed
        and not route.algorithm.is_adasum
    ]
    return min(fit)[-1] if fit else None
