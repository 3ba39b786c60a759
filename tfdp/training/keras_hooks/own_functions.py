"""Check of a function of a step that a model makes itself, not by Keras's method."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import keras_model
from tfdp.ground.base import loops
from tfdp.training.keras_hooks.step_functions import FUNCTION_OF_LOOP


@contextlib.contextmanager
def requiring_strategy_run(model: Any, loop_name: str) -> Iterator[None]:
    """Open a context that checks that a user's `make_train_function` uses all replicas.

    If the model overrides this method, or that of another loop, the first step of its
    result raises a `ValueError` unless it calls `strategy.run`: a function that calls
    `train_step` itself computes the rows of one worker, and returns the results as if
    they were those of the global batch.

    Args:
        model: Keras model of a tfdp strategy.
        loop_name: String, the called method, such as `"fit"` or `"train_on_batch"`.
    """
    function_name = FUNCTION_OF_LOOP[loop_name]
    method, attributes = f"make_{function_name}", vars(model)
    is_checked = method in attributes
    has_one_replica = model.distribute_strategy.num_replicas_in_sync == 1
    if has_one_replica or is_checked or not keras_model.overridden(model, (method,)):
        yield
        return
    make = getattr(model, method)

    @functools.wraps(make)
    def make_checked(*args: Any, **kwargs: Any) -> Any:
        """Call the user's `make_train_function`, and wrap the function that it sets.

        The first step of the wrapped function raises a `ValueError` unless it calls
        `strategy.run`. A function that Keras's method has made, or that is wrapped
        already, stays as it is.

        Returns:
            Result of the model's own method.
        """
        result = make(*args, **kwargs)
        function = getattr(model, function_name)
        # A function that Keras's method has made, or that is wrapped already, has the
        # attribute `made_after` and needs no check.
        if function is not None and not hasattr(function, "made_after"):
            setattr(model, function_name, _checked(model, method, function))
        return result

    # The method is replaced on this model alone, because other models of its class may
    # have no tfdp strategy.
    attributes[method] = make_checked
    try:
        yield
    finally:
        del attributes[method]


def _checked(model: Any, method: str, function: Callable) -> Callable:
    """Wrap a function of a step: raise at the first step without `strategy.run`.

    Later steps are not checked: a traced function calls `strategy.run` only once.

    Args:
        model: Keras model.
        method: String, the method of the model's class that has made the function.
        function: Callable, the function.

    Returns:
        Callable with the arguments of `function`.
    """
    has_run = False

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        """Compute a step; raise a `ValueError` if no replica has run it.

        Returns:
            Result of the function of the step.
        """
        nonlocal has_run
        if has_run:
            return function(*args, **kwargs)
        loop = loops.current()
        assert loop is not None
        try:
            result = function(*args, **kwargs)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except Exception as error:
            if loop.has_run:
                raise
            message = f"{_message(model, method)}. Its error: {error!r}"
            raise ValueError(message) from error
        if not loop.has_run:
            raise ValueError(_message(model, method))
        has_run = True
        return result

    step.made_after = None  # type: ignore[attr-defined]
    return step


def _message(model: Any, method: str) -> str:
    """Return the error text, without a period, for a step without `strategy.run`."""
    step = method.removeprefix("make_").replace("function", "step")
    return (
        f"The function that `{method}` of {model.name!r} has made has not called "
        "`self.distribute_strategy.run`, so that each worker would compute only its "
        f"own rows. Override `{step}` in its place, or call "
        f"`super().{method}(force)` and wrap `self.{method.removeprefix('make_')}`"
    )
