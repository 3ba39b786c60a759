"""Forked processes: connections, finalizers and exit functions act in their owner only.

A forked process has the memory and the open files of its parent, but only the thread
that forked it. So it must neither wait for the parent's threads, nor keep the parent's
connections open, nor run the parent's exit functions. tfdp therefore opens connections
and registers exit functions through this module. Nothing here takes a lock: a lock that
another thread held at the fork is never released in the forked process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

_Function = TypeVar("_Function", bound=Callable[[], Any])


class _Closable(Protocol):
    """Object with a method `close`, such as a socket."""

    def close(self) -> None:
        """Close the descriptor of the object."""


_Open = TypeVar("_Open", bound=_Closable)

_hooks: list[Callable[[], Any]] = []
_exit_functions: list[Callable[[], Any]] = []
_open_connections: weakref.WeakSet[Any] = weakref.WeakSet()
# Objects that forked processes must not delete, since their deletion waits for threads.
# The keys are `id`s, since some of the objects redefine equality, and a set would
# confuse them.
_never_deleted: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_server_ports: set[int] = set()


class Owner:
    """Process in which this object was created, to recognize its forks.

    Example:

    >>> Owner().is_current
    True
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Bool, false in a process that was forked after the object was created."""
        return os.getpid() == self._pid

    def check(self, call: str) -> None:
        """Raise in a process that was forked after the object was created.

        Args:
            call: String, the name of a call that works in the owner only.

        Raises:
            RuntimeError: In a forked process.
        """
        if not self.is_current:
            raise RuntimeError(
                f"{call} was called in process {os.getpid()}, which was forked from "
                f"process {self._pid} after TensorFlow and tfdp had started there: it "
                "has neither their threads nor their connections. Call it in process "
                f"{self._pid}, or start the other one by "
                '`multiprocessing.get_context("spawn")`.'
            )


def at_exit(function: _Function) -> _Function:
    """Call a function when this process exits, before functions registered earlier.

    Args:
        function: Callable; if it is registered already, it moves to the front.

    Returns:
        The function.
    """
    atexit.unregister(function)
    atexit.register(function)
    if function not in _exit_functions:
        _exit_functions.append(function)
    return function


def in_forks(function: _Function) -> _Function:
    """Call a function in each process that this one forks, before any other code.

    Args:
        function: Callable, which must not take a lock that other threads hold.

    Returns:
        The function.
    """
    _hooks.append(function)
    return function


def close_in_forks(opened: _Open) -> _Open:
    """Close a socket or connection in each process that this one forks.

    Args:
        opened: Object whose `close` closes a descriptor, and does nothing else.

    Returns:
        The object.
    """
    _open_connections.add(opened)
    return opened


def close_port_in_forks(port: int) -> None:
    """Close a server of TensorFlow in each process that this one forks.

    Args:
        port: Int, the port that the server listens on.
    """
    _server_ports.add(port)


def keep_in_forks(owner_of_threads: Any) -> None:
    """Never delete an object in the processes that this one forks.

    TensorFlow's iterators join their threads when they are deleted. A forked process
    does not have these threads and would wait indefinitely.

    Args:
        owner_of_threads: Object whose deletion waits for threads.
    """
    _never_deleted[id(owner_of_threads)] = owner_of_threads


def finalize(
    owned_by: Any, function: Callable, *args: Any, at_exit: bool = False, **kwargs: Any
) -> weakref.finalize:
    """Call a function once an object is deleted, in this process only.

    Args:
        owned_by: Object whose deletion triggers the call.
        function: Callable, which does not refer to the object.
        *args: Arguments of the function.
        at_exit: Bool, whether the function is also called when the process exits.
            Defaults to `False`.
        **kwargs: Keyword arguments of the function.

    Returns:
        `weakref.finalize`.
    """
    finalizer = weakref.finalize(
        owned_by, _call_in_owner, Owner(), function, args, kwargs
    )
    finalizer.atexit = at_exit
    return finalizer


class TemporaryDirectory:
    """Folder that is deleted with this object or process, but not by forked processes.

    Args:
        prefix: String, prefix of the folder's name. Defaults to `"tfdp-"`.

    Attributes:
        name: String, the path of the folder.

    Example:

    >>> with TemporaryDirectory() as folder:
    ...     os.path.isdir(folder)
    True
    """

    def __init__(self, prefix: str = "tfdp-") -> None:
        self.name = tempfile.mkdtemp(prefix=prefix)
        self._finalizer = finalize(
            self, shutil.rmtree, self.name, ignore_errors=True, at_exit=True
        )

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *args: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Delete the folder, if it was not deleted before."""
        self._finalizer()


def _call_in_owner(owner: Owner, function: Callable, args: tuple, kwargs: dict) -> None:
    """Call a function if this process is the owner; a forked process does nothing."""
    if owner.is_current:
        function(*args, **kwargs)


def _enter_fork() -> None:
    """Prepare a forked process, before any other code runs in it.

    The parent's exit functions and connections are discarded. Then the functions run
    that were passed to `in_forks`, in that order.
    """
    # The forked process never collects the parent's garbage, since deleting a function
    # of TensorFlow needs threads that do not exist in a forked process.
    gc.freeze()
    for function in _exit_functions:
        atexit.unregister(function)
    _exit_functions.clear()
    for kept in list(_never_deleted.values()):
        # A forked process lacks the threads for which the deletion of `kept` would
        # wait. An extra reference that is never released prevents the deletion, even at
        # exit.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    for opened in list(_open_connections):
        with contextlib.suppress(OSError):
            opened.close()
    _open_connections.clear()
    if _server_ports:
        # Without /dev/fd, the descriptors of servers cannot be found, so they stay
        # open.
        with contextlib.suppress(OSError):
            _close_servers(_server_ports)
    _server_ports.clear()
    for function in _hooks:
        function()


def _close_servers(ports: set[int]) -> None:
    """Redirect descriptors of servers to /dev/null, so that their numbers stay in use.

    `ports` are the servers' ports. A connection that a server has accepted has the same
    port, so it is closed, too.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/dev/fd"):
        # A descriptor that is not a socket, or that `listdir` has used and closed
        # itself, raises an error, and is skipped.
        with contextlib.suppress(OSError):
            descriptor = int(name)
            if _local_port(descriptor) in ports:
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _local_port(descriptor: int) -> int | None:
    """Return the local port of an internet socket, `None` for other sockets.

    Raise `OSError` for a descriptor that is not a socket.
    """
    sock = socket.socket(fileno=descriptor)
    try:
        is_internet = sock.family in (socket.AF_INET, socket.AF_INET6)
        return sock.getsockname()[1] if is_internet else None
    finally:
        sock.detach()


os.register_at_fork(after_in_child=_enter_fork)
