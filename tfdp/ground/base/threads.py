"""Calls on threads that do not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def run_on_thread(name: str, function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function on a new daemon thread.

    Args:
        name: String, name of the thread.
        function: Callable.
        *args: Arguments of the function.

    Returns:
        `Future` of the result, or of the error that the function raises.

    Example:

    >>> run_on_thread("adder", sum, [1, 2]).result()
    3
    """
    future: Future[Any] = Future()

    def run() -> None:
        """Call the function, and set its result or its error in the future."""
        try:
            future.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001  `Future.result` raises it
            future.set_exception(error)

    start_thread(name, run)
    return future


def start_thread(
    name: str, function: Callable[..., Any], *args: Any
) -> threading.Thread:
    """Start a daemon thread that calls a function, and return it.

    Args:
        name: String, name of the thread.
        function: Callable, which handles its own errors.
        *args: Arguments of the function.

    Raises:
        RuntimeError: If the interpreter is shutting down.
    """
    thread = threading.Thread(target=function, args=args, name=name, daemon=True)
    thread.start()
    return thread
