"""Actions in the graph of a step that depend on a tensor."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


def run_if(
    predicate: tf.Tensor | bool,
    action: Callable[[], None],
    otherwise: Callable[[], None] | None = None,
) -> None:
    """Run an action if a predicate holds, at trace time if that is a Python bool.

    Args:
        predicate: Scalar bool tensor, or bool.
        action: Callable, run if it is true.
        otherwise: Callable, run if it is false, or `None`. Defaults to `None`.
    """
    if isinstance(predicate, bool):
        branch = action if predicate else otherwise
        if branch is not None:
            branch()
        return

    def run(branch: Callable[[], None] | None) -> tf.Tensor:
        """Run a branch, if there is one; return a tensor, as `tf.cond` needs."""
        if branch is not None:
            branch()
        return tf.constant(True)

    tf.cond(predicate, lambda: run(action), lambda: run(otherwise))
