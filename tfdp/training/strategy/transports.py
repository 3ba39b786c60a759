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
from tfdp.communication.store import Store
from tfdp.communication.transport import (
    Communicator,
    Connection,
    Mesh,
    MpiCommunicator,
    TransportError,
    is_mpi_job,
    listening_address,
    new_communicator,
    start_and_check_job,
)
from tfdp.ground import forks, user_code
from tfdp.ground._compat import runtime
from tfdp.ground.options import CommunicationOptions

# Workers connect in the first collective of a group, before which some may trace a step
# for minutes. So by default they wait this many seconds for each other.
_DEFAULT_CONNECT_SECONDS = 300.0
# The direct transport uses socket features that only Linux has.
_HAS_DIRECT = sys.platform == "linux"
# Strategies of a process share a mesh. All workers must choose the same mesh, so the
# key has only what all of them know: the cluster's store and the workers' interfaces.
_meshes: dict[tuple[Store, tuple[str | None, ...]], Mesh] = {}
_transports: weakref.WeakSet[ProcessTransport] = weakref.WeakSet()
# Communicators of `connect_workers` belong to no transport. They are kept here, so that
# they can be closed together with the transports.
_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


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
        ValueError: If the requested backend does not support the devices, or a worker
            has no address for it.
    """
    name = _backend(options, devices, worker_group.num_workers)
    name, interfaces = _agree_on_transport(name, options, worker_group, host)
    if name not in ("direct", "mpi"):
        return TensorFlowTransport(name)
    new_group: Callable[[Sequence[int], str], Communicator] | None = None
    connect: Callable[[int, str], Connection] | None = None
    if name == "mpi":
        timeout_seconds = options.timeout_seconds
        start_and_check_job(
            worker_group.num_workers, worker_group.rank, timeout_seconds
        )
        new_group = functools.partial(MpiCommunicator, timeout_seconds=timeout_seconds)
    elif worker_group.num_workers > 1:
        mesh = _mesh(options, worker_group, host, interfaces)
        new_group, connect = functools.partial(new_communicator, mesh), mesh.connect
    transport = ProcessTransport(name, worker_group.rank, new_group, connect)
    # `close_all` is registered again for each transport, so that transports are closed
    # before the exit functions of their communicators run.
    forks.at_exit(close_all)
    _transports.add(transport)
    return transport


def watch_transports(watchdog: Watchdog) -> None:
    """Let a watchdog close this process's transports after the loss of a worker.

    They are closed, too, when this worker leaves the job. The watchdog reports why a
    collective has failed by `reason_of_failure`.

    Args:
        watchdog: `Watchdog` of this worker.
    """
    if not watchdog.closers:
        watchdog.closers = [close_transports]
        watchdog.membership.leaving.append(close_transports)
    watchdog.reason_of_failure = reason_of_failure


def reason_of_failure() -> str:
    """Return why a collective of this process has failed; `""` if none has."""
    reasons = (transport.failure for transport in list(_transports))
    return next(filter(None, reasons), "")


def close_transports(reason: str = "") -> None:
    """Abort collectives that wait for other workers, and close all connections.

    Args:
        reason: String, the reason sent to the other workers. Defaults to `""`.
    """
    for transport in list(_transports):
        transport.abort(reason)
    for communicator in list(_communicators):
        communicator.close(reason)
    for mesh in list(_meshes.values()):
        mesh.close(reason)


def close_all() -> None:
    """Close and forget all transports of this process, with their threads."""
    close_transports()
    for transport in list(_transports):
        transport.close()
    _meshes.clear()
    _transports.clear()
    _communicators.clear()


def connect_workers(
    transport: Transport,
    options: CommunicationOptions,
    worker_group: WorkerGroup,
    host: str,
    name: str,
) -> Communicator:
    """Connect all workers for arrays that are sent independently of the steps.

    All workers call this together. Where the steps use NCCL or TensorFlow's
    collectives, the connections are those of `backend="direct"`.

    Args:
        transport: `Transport` of the steps.
        options: `CommunicationOptions`.
        worker_group: `WorkerGroup` between the workers.
        host: String, this worker's host as the cluster names it.
        name: String, the same on all workers, and different at each call.

    Raises:
        ValueError: On every worker, if a worker has no address for its connections.
        RuntimeError: If another worker is lost, or does not connect in time.
    """
    if isinstance(transport, ProcessTransport) and transport.new_communicator:
        new_group = transport.new_communicator
    else:
        own = [options.interface, _address_error(host, options.interface)]
        interfaces, errors = zip(
            *worker_group.all_gather("connections beside", own), strict=True
        )
        _raise_first(errors)
        mesh = _mesh(options, worker_group, host, interfaces)
        new_group = functools.partial(new_communicator, mesh)
    communicator = new_group(range(worker_group.num_workers), name)
    _communicators.add(communicator)
    return communicator


def host_transport(transport: Transport) -> Transport:
    """Return the transport of host tensors: TensorFlow's for NCCL, else the same."""
    return TensorFlowTransport() if transport.name == "nccl" else transport


def _backend(
    options: CommunicationOptions, devices: Sequence[str], num_workers: int
) -> str:
    """Choose the library that moves the bytes, see `CommunicationOptions.backend`.

    Args:
        options: `CommunicationOptions`.
        devices: Sequence of strings, the local devices.
        num_workers: Int, number of workers.

    Returns:
        String, the name of a backend, such as `"direct"`; never `"auto"`.

    Raises:
        ValueError: If the requested backend does not support devices or platform.
    """
    on_gpus = all(runtime.device_type(device) == "GPU" for device in devices)
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
    gpus = tf.config.get_visible_devices("GPU")
    # NCCL cannot run two ranks on one physical GPU.
    return "nccl" if runtime.num_local_devices("GPU") == len(gpus) else "ring"


def _agree_on_transport(
    name: str, options: CommunicationOptions, worker_group: WorkerGroup, host: str
) -> tuple[str, tuple[str | None, ...]]:
    """Agree on the transport; raise on every worker if one worker has no address.

    Workers that have chosen `"direct"` and `"mpi"` use `"direct"`; with other
    differences all use `"ring"`.

    Args:
        name: String, the backend that this worker has chosen.
        options: `CommunicationOptions`.
        worker_group: `WorkerGroup` between the workers.
        host: String, this worker's host as the cluster names it.

    Returns:
        Tuple of the transport's name and the tuple of all workers' interfaces, by rank:
        the option `interface`, or `None` for a worker that has not set it.
    """
    error = _address_error(host, options.interface) if name == "direct" else ""
    gathered = worker_group.all_gather("transport", [name, options.interface, error])
    names, interfaces, errors = zip(*gathered, strict=True)
    _raise_first(errors)
    if len(set(names)) > 1:
        # With `"auto"` workers choose differently if only some of them run under MPI or
        # have a GPU for each replica.
        name = "direct" if set(names) <= {"direct", "mpi"} else "ring"
    if name != "direct" and options.interface is not None and worker_group.is_chief:
        user_code.warn(
            '`interface` is for `backend="direct"` only, and is ignored. '
            f"Received: interface={options.interface!r}, with {name!r}"
        )
    return name, tuple(interfaces)


def _raise_first(errors: Sequence[str]) -> None:
    """Raise a `ValueError` with the first error of a worker; `""` stands for none."""
    for rank, text in enumerate(errors):
        if text:
            raise ValueError(f"Worker {rank} cannot be reached: {text}")


def _address_error(host: str, interface: str | None) -> str:
    """Return why this worker has no address to listen on; `""` if it has one."""
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
    """Return the mesh of connections to all workers, created on first use.

    Args:
        options: `CommunicationOptions`.
        worker_group: `WorkerGroup` between the workers.
        host: String, this worker's host as the cluster names it.
        interfaces: Tuple of all workers' interfaces, strings or `None`, by rank.
    """
    key = worker_group.store, interfaces
    if key not in _meshes:
        # Workers exchange addresses through the store, which is lost if the first
        # worker exits. The guard translates the resulting error.
        with worker_group.guard():
            _meshes[key] = Mesh(
                worker_group.rank,
                worker_group.num_workers,
                worker_group.store,
                host=host,
                interface=options.interface,
                timeout_seconds=options.timeout_seconds or _DEFAULT_CONNECT_SECONDS,
                prefix=worker_group.new_prefix(),
            )
    return _meshes[key]
