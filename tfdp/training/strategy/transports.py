"""Choice of the transport that carries the bytes of a strategy's collectives."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdp.communication.collectives import (
    ProcessTransport,
    TensorFlowTransport,
    Transport,
)
from tfdp.communication.coordination.watch import Watchdog
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.communication.transport import (
    Communicator,
    Connection,
    Mesh,
    MpiCommunicator,
    TransportError,
    check_job,
    is_mpi_job,
    listening_address,
    new_communicator,
)
from tfdp.ground import _compat, forks, user_code
from tfdp.ground.options import CommunicationOptions

# How long a worker may take to its first collective of a group.
_DEFAULT_CONNECT_SECONDS = 300.0
# Its sockets are Linux's.
_HAS_DIRECT = sys.platform == "linux"
# A process is a worker of one cluster only. By the interfaces of all workers: which of
# them there are must not depend on the worker.
_meshes: dict[tuple[str | None, ...], Mesh] = {}
_transports: weakref.WeakSet[ProcessTransport] = weakref.WeakSet()


def new_transport(
    options: CommunicationOptions,
    devices: Sequence[str],
    worker_group: WorkerGroup,
    host: str,
) -> Transport:
    """Return the transport of a strategy's replicas.

    Args:
        options: `CommunicationOptions`.
        devices: Sequence of strings, the local devices.
        worker_group: `WorkerGroup` between the workers.
        host: String, this worker's host as the cluster names it.

    Raises:
        ValueError: If the backend that is asked for does not fit the devices, or a
            worker has no address for it.
    """
    name = _backend(options, devices, worker_group.num_workers)
    name, interfaces = _agreed(name, options, worker_group, host)
    if name not in ("direct", "mpi"):
        return TensorFlowTransport(name)
    form: Callable[[Sequence[int], str], Communicator] | None = None
    connect: Callable[[int, str], Connection] | None = None
    if name == "mpi":
        timeout_seconds = options.timeout_seconds
        check_job(worker_group.num_workers, worker_group.rank, timeout_seconds)
        form = functools.partial(MpiCommunicator, timeout_seconds=timeout_seconds)
    elif worker_group.num_workers > 1:
        mesh = _mesh(options, worker_group, host, interfaces)
        form, connect = functools.partial(new_communicator, mesh), mesh.connect
    transport = ProcessTransport(name, worker_group.rank, form, connect)
    forks.at_exit(_end)  # before whatever its communicators have registered
    _transports.add(transport)
    return transport


def watch_transports(watchdog: Watchdog) -> None:
    """Close the connections to other workers when one of them is lost."""
    watchdog.closers = [close_transports]
    watchdog.reason_of_failure = reason_of_failure


def reason_of_failure() -> str:
    """Return why a collective between processes has failed, or `""`."""
    reasons = (transport.failure for transport in list(_transports))
    return next(filter(None, reasons), "")


def close_transports(reason: str = "") -> None:
    """End what waits for other workers, for ever.

    Args:
        reason: String, which they are told. Defaults to `""`.
    """
    for transport in list(_transports):
        transport.abort(reason)
    for mesh in list(_meshes.values()):
        mesh.close(reason)


def _end() -> None:
    """End the threads before the interpreter does."""
    close_transports()
    for transport in list(_transports):
        transport.close()


def host_transport(transport: Transport) -> Transport:
    """Return the transport of small values on hosts, beside that of the replicas."""
    return TensorFlowTransport() if transport.name == "nccl" else transport


def _backend(
    options: CommunicationOptions, devices: Sequence[str], num_workers: int
) -> str:
    """The library that moves the bytes, see `CommunicationOptions.backend`."""
    on_gpus = all(_compat.device_type(device) == "GPU" for device in devices)
    if options.backend == "nccl" and not on_gpus:
        raise ValueError(
            '`backend="nccl"` needs a GPU for every replica. Use "auto" or "ring". '
            f"Received: devices={list(devices)}"
        )
    if options.backend == "direct" and not _HAS_DIRECT:
        raise ValueError(
            '`backend="direct"` needs Linux. Use "auto" or "ring". '
            f"Received: a platform {sys.platform!r}"
        )
    if options.backend != "auto":
        return options.backend
    if not on_gpus:
        if num_workers == 1 or not _HAS_DIRECT:
            return "ring"
        return "mpi" if is_mpi_job(num_workers) else "direct"
    physical = tf.config.list_physical_devices("GPU")
    # NCCL cannot run two ranks on one physical GPU.
    one_each = _compat.num_local_devices("GPU") == len(physical)
    return "nccl" if one_each else "ring"


def _agreed(
    name: str, options: CommunicationOptions, worker_group: WorkerGroup, host: str
) -> tuple[str, tuple[str | None, ...]]:
    """Agree on the transport; what one worker alone cannot do is an error of all.

    Returns:
        Tuple of the transport's name and of the interface that each worker asks for.
    """
    error = _address_error(host, options.interface) if name == "direct" else ""
    told = worker_group.all_gather("transport", [name, options.interface, error])
    names, interfaces, errors = zip(*told, strict=True)
    for rank, text in enumerate(errors):
        if text:
            worker_group.leave()
            raise ValueError(f"Worker {rank} cannot be reached: {text}")
    if len(set(names)) > 1:
        # `"auto"` sees MPI, or a GPU for each replica, on some workers only.
        name = "direct" if set(names) <= {"direct", "mpi"} else "ring"
    if name != "direct" and options.interface is not None and worker_group.is_chief:
        user_code.warn(
            '`interface` is for `backend="direct"` only, and is ignored. '
            f"Received: interface={options.interface!r}, with {name!r}"
        )
    return name, tuple(interfaces)


def _address_error(host: str, interface: str | None) -> str:
    try:
        listening_address(host, interface)
    except TransportError as error:
        return str(error)
    return ""


def _mesh(
    options: CommunicationOptions,
    worker_group: WorkerGroup,
    host: str,
    interfaces: tuple[str | None, ...],
) -> Mesh:
    """Return the connections of this process to the others, by these interfaces."""
    if interfaces not in _meshes:
        # The store ends with the first worker.
        with worker_group.guard():
            _meshes[interfaces] = Mesh(
                worker_group.rank,
                worker_group.num_workers,
                _Store(worker_group.new_prefix()),
                host=host,
                interface=options.interface,
                timeout_seconds=options.timeout_seconds or _DEFAULT_CONNECT_SECONDS,
            )
    return _meshes[interfaces]


class _Store:
    """The coordination service's key-value store, a `transport.Store`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def put(self, key: str, text: str) -> None:
        """See `Store`."""
        _compat.set_key_value(f"{self._prefix}/{key}", text)

    def get(self, key: str, timeout_seconds: float) -> str:
        """See `Store`."""
        try:
            return _compat.get_key_value(f"{self._prefix}/{key}", timeout_seconds)
        except tf.errors.DeadlineExceededError:
            raise TimeoutError(key) from None
