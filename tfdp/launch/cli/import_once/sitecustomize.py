"""Process that imports TensorFlow once, and forks a worker for each request.

Python imports a module of this name when it starts, before it runs the script. Each
worker is a fork that returns from here: Python then goes on as in a process of its own,
so that the script finds its `__main__`, arguments, tracebacks and exit code. The
process that forks never returns: it ends when the launcher closes the connection.

It runs before anything of the user's, and therefore needs the standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.machinery
import json
import os
import socket
import sys
import threading
import time
import warnings
from typing import Any

# Imported where the launcher asks for their package.
_ROOMS_OF_TFDP = ("tfdp.training.strategy.strategy", "tfdp.callbacks")
# What TensorFlow and its libraries may read when they are imported.
_READ_AT_IMPORT = (
    *("TF_", "KERAS_", "XLA_", "CUDA_", "NVIDIA_", "ONEDNN_", "DNNL_"),
    *("OMP_", "KMP_", "OPENBLAS_", "MKL_"),
)
_READY = 0


def main() -> None:
    """Import, then fork on request; return in the forks only."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    _import_users_own()
    connection = socket.socket(fileno=os.dup(0))  # the standard input
    environment = dict(os.environ)
    try:
        packages = json.loads(_receive(connection)[0])
        _import(packages)
        # A fork has only the thread that forks it.
        if threading.active_count() > 1 or _is_shadowed(sys.argv[0]):
            os._exit(1)
        preloaded = _Preloaded(packages, environment)
        _send(connection, _READY)
        while not _fork(connection, *_receive(connection)):
            pass
        preloaded.install()
    except BaseException:  # noqa: BLE001 Python would go on with the script
        os._exit(1)


def _import_users_own() -> None:
    """Import the `sitecustomize` that this one stands before."""
    own = sys.modules.pop(__name__)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(__name__)
    sys.modules.setdefault(__name__, own)


def _import(packages: list[str]) -> None:
    # What is imported stays: to collect garbage meanwhile takes a tenth of the time,
    # and would write to the pages that forks share later.
    gc.disable()
    rooms = _ROOMS_OF_TFDP if "tfdp" in packages else ()
    for name in (*packages, *rooms):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _is_shadowed(script: str) -> bool:
    """Return whether the script's folder holds other modules of these names."""
    folder = os.path.dirname(os.path.abspath(script))
    for entry in os.scandir(folder):
        name = entry.name.removesuffix(".py")
        is_package = os.path.isfile(os.path.join(entry.path, "__init__.py"))
        if name in sys.modules and (is_package or name != entry.name):
            own = getattr(sys.modules[name], "__file__", None) or ""
            if not os.path.abspath(own).startswith(entry.path):
                return True
    return False


def _fork(connection: socket.socket, environment: bytes, output: int) -> bool:
    """Fork a worker, in a session of its own; return whether this is the worker.

    It is a fork of a fork that has ended: the kernel then makes it a child of the
    launcher, which waits for it as for one that it has started.
    """
    if child := _quiet_fork():
        _, status = os.waitpid(child, 0)
        if status:
            _send(connection, -abs(os.waitstatus_to_exitcode(status)))
        os.close(output)
        return False
    try:
        middle = os.getpid()
        if _quiet_fork():
            os._exit(0)
    except OSError as error:
        os._exit(error.errno or 1)
    while os.getppid() == middle:
        time.sleep(0.0002)
    os.setsid()
    _send(connection, os.getpid())
    connection.close()
    _become_worker(json.loads(environment), output)
    return True


def _quiet_fork() -> int:
    with warnings.catch_warnings():
        # Of Python 3.12, about threads: NumPy's BLAS has some, which it makes again.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become_worker(environment: dict[str, str], output: int) -> None:
    """Take the worker's streams and environment, and random states of its own."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's own generator seeds itself in each fork


class _Preloaded:
    """Finder that gives a script the preloaded packages when it imports them.

    Until then `sys.modules` lacks them, and nothing is seen of what their import has
    written and set in the environment, as in a process of its own.

    Args:
        packages: List of strings.
        environment: Dict of the variables with which they were imported.
    """

    def __init__(self, packages: list[str], environment: dict[str, str]) -> None:
        # With their modules: `from keras.layers import Dense` imports `keras`, too.
        self._modules: dict[str, dict[str, Any]] = {name: {} for name in packages}
        for name, module in sys.modules.items():
            if (package := name.partition(".")[0]) in self._modules:
                self._modules[package][name] = module
        self._specs = {name: sys.modules[name].__spec__ for name in packages}
        self._environment = environment
        self._set = dict(os.environ.items() - environment.items())
        self._written = os.pread(1, os.fstat(1).st_size, 0)
        self._is_seen = False

    def install(self) -> None:
        """Take the packages out of `sys.modules`, and find them from now on."""
        for modules in self._modules.values():
            for name in modules:
                del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        del path, target
        if name not in self._modules:
            return None
        if not self._is_seen:
            self._is_seen = True
            self._follow_up()
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        return self._modules[spec.name][spec.name]

    def exec_module(self, module: Any) -> None:
        name = module.__spec__.name
        module.__spec__ = self._specs[name]
        sys.modules.update(self._modules.pop(name))
        if name == "tfdp":
            # By the rank, which only a worker has.
            importlib.import_module("tfdp.features.tracking.watch").watch_trackers()
        if not self._modules:
            sys.meta_path.remove(self)

    def _follow_up(self) -> None:
        """Do what the import has done, and warn of what it could not know."""
        changed = [
            name
            for name in sorted(self._environment.keys() | os.environ.keys())
            if self._environment.get(name) != os.environ.get(name)
            and name.startswith(_READ_AT_IMPORT)
            and name != "TF_CONFIG"
        ]
        for name, value in self._set.items():
            os.environ.setdefault(name, value)
        while self._written:
            self._written = self._written[os.write(2, self._written) :]
        if changed:
            warnings.warn(
                f"`tfdp run` imported TensorFlow before the script set "
                f"{', '.join(changed)}, which may have no effect. Set it in the shell, "
                "or give `--no-fork` to `tfdp run`.",
                stacklevel=3,
            )


def _send(connection: socket.socket, number: int) -> None:
    connection.sendall(number.to_bytes(8, "little", signed=True))


def _receive(connection: socket.socket) -> tuple[bytes, int]:
    """Receive a text, and a descriptor, or -1; exit where the launcher has ended."""
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 1)
    text, size = b"", int.from_bytes(head, "little")
    while len(text) < size and (part := connection.recv(size - len(text))):
        text += part
    if len(head) < 8 or len(text) < size:
        os._exit(0)
    return text, descriptors[0] if descriptors else -1


main()
