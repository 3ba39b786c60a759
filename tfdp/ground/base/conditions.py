"""Actions in the graph of a step that depend on a tensor."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


def run_if(
    predicate: tf.Tensor | bool,
    action: Callable[[], None],
    otherwise: Callable[[], None] | None = None,
) -> None:
    """Run an action if a predicate is true, in a graph by `tf.cond`.

    Args:
        predicate: Scalar bool tensor; or bool, which is evaluated at trace time.
        action: Callable, run if the predicate is true.
        otherwise: Callable, run if the predicate is false, or `None`. Defaults to
            `None`.
    """
    if isinstance(predicate, bool):
        branch = action if predicate else otherwise
        if branch is not None:
            branch()
        return

    def run(branch: Callable[[], None] | None) -> tf.Tensor:
        """Run a branch unless it is `None`; return a tensor, as `tf.cond` needs."""
        if branch is not None:
            branch()
        return tf.constant(True)

    tf.cond(predicate, lambda: run(action), lambda: run(otherwise))
