"""Process that imports TensorFlow once, and forks a worker for each request.

Python imports a module of this name at its start, before it runs the script. Each
worker is a fork that returns from this module: Python then runs the script as in a
separate process, with the usual `__main__`, arguments, tracebacks and exit code. The
process that forks never returns: it exits when the launcher closes the connection.

This module runs before any code of the user, and therefore uses only the standard
library.
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

# `import tfdp` alone does not import TensorFlow, so the modules of tfdp that most
# scripts use are also imported in advance.
_TFDP_MODULES = ("tfdp.training.strategy.strategy", "tfdp.callbacks")
# TensorFlow and its libraries read variables with these prefixes only when they are
# imported, so a script that changes one after the early import gets a warning.
_READ_AT_IMPORT = (
    *("TF_", "KERAS_", "XLA_", "CUDA_", "NVIDIA_", "ONEDNN_", "DNNL_"),
    *("OMP_", "KMP_", "OPENBLAS_", "MKL_"),
)
# A process id is positive and an error negative, so 0 is free to report to the launcher
# that all packages are imported.
_READY = 0


def main() -> None:
    """Import the packages that the launcher names, then fork a worker on each request.

    It returns in the workers only. The process that forks exits at an error, and when
    the launcher closes the connection.
    """
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    _import_user_sitecustomize()
    connection = socket.socket(fileno=os.dup(0))  # stdin is the launcher's socket
    environment = dict(os.environ)
    try:
        packages = json.loads(_receive(connection)[0])
        _import(packages)
        # A fork has only the thread that called `fork`. If the imports have started
        # other threads, this process exits, since the forks would lack these threads.
        if threading.active_count() > 1 or _is_shadowed(sys.argv[0]):
            os._exit(1)
        preloaded = _Preloaded(packages, environment)
        _send(connection, _READY)
        while not _fork(connection, *_receive(connection)):
            pass
        preloaded.install()
    except BaseException:  # noqa: BLE001 Python would run the script otherwise
        os._exit(1)


def _import_user_sitecustomize() -> None:
    """Import the `sitecustomize` of the user, which this module hides."""
    this_module = sys.modules.pop(__name__)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(__name__)
    sys.modules.setdefault(__name__, this_module)


def _import(packages: list[str]) -> None:
    """Import packages, and the main modules of tfdp, with garbage collection off."""
    # Imported modules are permanent. Collecting garbage during the imports would take a
    # tenth of the time, and later collections would write to pages that forks share.
    gc.disable()
    tfdp_modules = _TFDP_MODULES if "tfdp" in packages else ()
    for name in (*packages, *tfdp_modules):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _is_shadowed(script: str) -> bool:
    """Return whether a module in the script's folder hides an imported one."""
    folder = os.path.dirname(os.path.abspath(script))
    for entry in os.scandir(folder):
        name = entry.name.removesuffix(".py")
        is_package = os.path.isfile(os.path.join(entry.path, "__init__.py"))
        if name in sys.modules and (is_package or name != entry.name):
            imported_file = getattr(sys.modules[name], "__file__", None) or ""
            if not os.path.abspath(imported_file).startswith(entry.path):
                return True
    return False


def _fork(connection: socket.socket, environment: bytes, output: int) -> bool:
    """Fork a worker in a separate session; return whether this process is the worker.

    The worker is a fork of a fork that has exited: the kernel then makes it a child of
    the launcher, which reaps it like any process that it has started.

    Args:
        connection: Socket to the launcher.
        environment: Bytes, JSON of the worker's environment variables.
        output: Int, descriptor for the worker's stdout and stderr.
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
    """Fork without the warning about threads, and return as `os.fork` does."""
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork with several threads. NumPy's BLAS has some, but
        # recreates them in the fork, so the warning is suppressed.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become_worker(environment: dict[str, str], output: int) -> None:
    """Set up the worker's streams, environment and random state.

    Args:
        environment: Dict of all environment variables of the worker.
        output: Int, descriptor for the worker's stdout and stderr.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    if (numpy := sys.modules.get("numpy")) is not None:
        # NumPy's generator does not reseed itself in a fork, while `random` does:
        # without this call all workers would draw the same numbers.
        numpy.random.seed()


class _Preloaded:
    """Import finder that returns preloaded packages when a script imports them.

    Until then the packages are absent from `sys.modules`, and the output and the
    environment variables of their import are withheld, as in a separate process.

    Args:
        packages: List of strings, names of the preloaded packages.
        environment: Dict of environment variables before the imports.
    """

    def __init__(self, packages: list[str], environment: dict[str, str]) -> None:
        # The keys of `_modules` are only packages, without their modules. Python
        # imports `keras` first, also for `from keras.layers import Dense`, and the
        # import of `keras` puts all of its modules back.
        self._modules: dict[str, dict[str, Any]] = {name: {} for name in packages}
        for name, module in sys.modules.items():
            if (package := name.partition(".")[0]) in self._modules:
                self._modules[package][name] = module
        self._specs = {name: sys.modules[name].__spec__ for name in packages}
        self._environment = environment
        self._variables = dict(os.environ.items() - environment.items())
        self._output = os.pread(1, os.fstat(1).st_size, 0)
        self._is_used = False

    def install(self) -> None:
        """Remove the packages from `sys.modules`, and register this finder."""
        for modules in self._modules.values():
            for name in modules:
                del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec of a preloaded package, or `None` for any other module.

        Python calls it as an import finder. Before the first spec, the output and
        variables of the preloading import are replayed.
        """
        del path, target
        if name not in self._modules:
            return None
        if not self._is_used:
            self._is_used = True
            self._replay_import()
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        """Return the preloaded package of a spec instead of a new module."""
        return self._modules[spec.name][spec.name]

    def exec_module(self, module: Any) -> None:
        """Put a preloaded package and all of its modules back into `sys.modules`."""
        name = module.__spec__.name
        module.__spec__ = self._specs[name]
        sys.modules.update(self._modules.pop(name))
        if name == "tfdp":
            # Experiment trackers are disabled by the rank of a worker. The process that
            # imports tfdp in advance has no rank, so they are disabled here.
            importlib.import_module("tfdp.features.tracking.watch").disable_trackers()
        if not self._modules:
            sys.meta_path.remove(self)

    def _replay_import(self) -> None:
        """Print what the preloading import printed, and set the variables that it set.

        Warn of environment variables that TensorFlow reads when it is imported, and
        that the script has changed since the import.
        """
        changed = [
            name
            for name in sorted(self._environment.keys() | os.environ.keys())
            if self._environment.get(name) != os.environ.get(name)
            and name.startswith(_READ_AT_IMPORT)
            and name != "TF_CONFIG"
        ]
        for name, value in self._variables.items():
            os.environ.setdefault(name, value)
        while self._output:
            self._output = self._output[os.write(2, self._output) :]
        if changed:
            warnings.warn(
                f"`tfdp run` imported TensorFlow before the script set "
                f"{', '.join(changed)}, which may have no effect. Set it in the shell, "
                "or give `--no-fork` to `tfdp run`.",
                stacklevel=3,
            )


def _send(connection: socket.socket, number: int) -> None:
    """Send a number as 8 bytes: a process id, 0 for "ready", or a negative `errno`."""
    connection.sendall(number.to_bytes(8, "little", signed=True))


def _receive(connection: socket.socket) -> tuple[bytes, int]:
    """Receive a message; exit the process if the launcher has closed the connection.

    Returns:
        Tuple of the text, as bytes, and of the file descriptor, or -1 if the message
        has none.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 1)
    text, size = b"", int.from_bytes(head, "little")
    while len(text) < size and (part := connection.recv(size - len(text))):
        text += part
    if len(head) < 8 or len(text) < size:
        os._exit(0)
    return text, descriptors[0] if descriptors else -1


main()
