"""Forked processes: what this process has made is inert in the processes it forks.

A forked process has the memory and the open files of its parent, but only the thread
that forked it. So it must neither wait for the parent's threads, nor keep the parent's
connections open, nor run what the parent registered for its own end. All that tfdp
registers or opens is therefore made through this module. Nothing here takes a lock: one
that another thread held at the fork is never released in the forked process.
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
    def close(self) -> None: ...


_Open = TypeVar("_Open", bound=_Closable)

_hooks: list[Callable[[], Any]] = []
_exits: list[Callable[[], Any]] = []
_open: weakref.WeakSet[Any] = weakref.WeakSet()
# By id: some of these define equality in a way of their own.
_kept: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_server_ports: set[int] = set()


class Owner:
    """The process that has made an object.

    Example:

    >>> Owner().is_current
    True
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Bool, false in a process that was forked after the object was made."""
        return os.getpid() == self._pid

    def check(self, call: str) -> None:
        """Raise in a process that was forked after the object was made.

        Args:
            call: String, the call that works in the owner only.

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
    """Call a function at the end of this process, before those registered earlier.

    Args:
        function: Callable; one that is registered already is moved to the front.

    Returns:
        The same.
    """
    atexit.unregister(function)
    atexit.register(function)
    if function not in _exits:
        _exits.append(function)
    return function


def in_forks(function: _Function) -> _Function:
    """Call a function in each process that this one forks, before any other code.

    Args:
        function: Callable, which must not take a lock that other threads hold.

    Returns:
        The same.
    """
    _hooks.append(function)
    return function


def close_in_forks(opened: _Open) -> _Open:
    """Close a socket or connection in each process that this one forks.

    Args:
        opened: Object whose `close` closes a descriptor, and does nothing else.

    Returns:
        The same.
    """
    _open.add(opened)
    return opened


def close_port_in_forks(port: int) -> None:
    """Close a server that TensorFlow has opened in each process that this one forks.

    Args:
        port: Int, the one that the server listens on.
    """
    _server_ports.add(port)


def keep_in_forks(owner_of_threads: Any) -> None:
    """Never delete an object in the processes that this one forks.

    TensorFlow's iterators end their threads when they are deleted, and a forked process
    would wait indefinitely for threads that it does not have.

    Args:
        owner_of_threads: Object.
    """
    _kept[id(owner_of_threads)] = owner_of_threads


def finalize(
    owned_by: Any, function: Callable, *args: Any, at_exit: bool = False, **kwargs: Any
) -> weakref.finalize:
    """Call a function once an object is deleted, in this process only.

    Args:
        owned_by: Object.
        function: Callable.
        *args: Its arguments.
        at_exit: Bool, whether it is also called at the end of the process. Defaults to
            `False`.
        **kwargs: Its keyword arguments.

    Returns:
        `weakref.finalize`.
    """
    finalizer = weakref.finalize(owned_by, _call, Owner(), function, args, kwargs)
    finalizer.atexit = at_exit
    return finalizer


class TemporaryDirectory:
    """Folder that is deleted with this object or process, and not by a forked process.

    Args:
        prefix: String, begin of its name. Defaults to `"tfdp-"`.

    Attributes:
        name: String, the path.

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
        """Delete the folder, once."""
        self._finalizer()


def _call(owner: Owner, function: Callable, args: tuple, kwargs: dict) -> None:
    if owner.is_current:
        function(*args, **kwargs)


def _enter_fork() -> None:
    """Make all that the parent has registered or opened inert."""
    # Garbage of the parent, too: to delete a function of TensorFlow's needs threads.
    gc.freeze()
    for function in _exits:
        atexit.unregister(function)
    _exits.clear()
    for kept in list(_kept.values()):
        # One reference that nobody gives back, not even the interpreter's end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    for opened in list(_open):
        with contextlib.suppress(OSError):
            opened.close()
    _open.clear()
    if _server_ports:
        # Where the system lists no descriptors, they stay open.
        with contextlib.suppress(OSError):
            _close_servers(_server_ports)
    _server_ports.clear()
    for function in _hooks:
        function()


def _close_servers(ports: set[int]) -> None:
    """Replace the descriptors of servers: their numbers must not be given again.

    A connection that a server has accepted has the server's port, too.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # no socket, or the listing's own descriptor
            descriptor = int(name)
            if _local_port(descriptor) in ports:
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _local_port(descriptor: int) -> int | None:
    sock = socket.socket(fileno=descriptor)
    try:
        is_internet = sock.family in (socket.AF_INET, socket.AF_INET6)
        return sock.getsockname()[1] if is_internet else None
    finally:
        sock.detach()


os.register_at_fork(after_in_child=_enter_fork)
