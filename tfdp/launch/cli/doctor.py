"""`tfdp doctor`: versions, devices, cluster and topology as tfdp sees them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from rich.console import Console

from tfdp.communication.cluster import (
    Cluster,
    find_cluster,
    topology_of,
    unconnected_processes,
)
from tfdp.communication.cluster.address import split_address
from tfdp.communication.cluster.mpi_start import current_job
from tfdp.communication.cluster.ports import addresses_to_listen_on
from tfdp.communication.cluster.spec import SOURCES
from tfdp.communication.store import Admission
from tfdp.ground.text import pluralize
from tfdp.launch.bench.machine import version_of
from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.doctor_input import check_input
from tfdp.launch.cli.doctor_records import show_records
from tfdp.launch.cli.errors import usage_errors
from tfdp.launch.cli.noise import quiet_stderr
from tfdp.launch.cli.screen import new_console
from tfdp.launch.cli.topology_tree import (
    describe_unevenness,
    draw_topology,
    port_states,
)

# `doctor` applies the defaults of `--steps` and `--timeout` (seconds) itself: it
# refuses the options without `--input`, so it must know whether they were given.
_STEPS, _TIMEOUT_SECONDS = 60, 120.0
# A process of an MPI job may hang or be missing, so `tfdp doctor` waits for the others
# at most this many seconds.
_MPI_SECONDS = 60.0
_NO_INPUT = "This is an option of --input, which was not given"
_PACKAGES = ("tfdp", "tensorflow", "keras", "numpy")
_SERVER = (
    'With GPUs or backend="ring", TensorFlow\'s server listens on a free port of all '
    "interfaces and runs any graph that it receives: let only the workers reach it, by "
    "a firewall, a NetworkPolicy of Kubernetes, or a network namespace."
)


_EXAMPLES = """\b
Examples:
  tfdp doctor                          on this machine
  srun tfdp doctor                     in each task of a Slurm step
  mpiexec -n 2 tfdp doctor             in each process of an MPI job
  tfdp doctor --input train.py         does training wait for its data?
  tfdp doctor -n 2 --input train.py    the same with two workers
  tfdp doctor tfdp-logs/20261127-1405  who was where when a job failed

Options stand before SCRIPT; all that follows it is the script's own.
"""


# Interspersed arguments are off, so that options after the script belong to the script.
@click.command(epilog=_EXAMPLES, context_settings={"allow_interspersed_args": False})
@types.option(
    "--input",
    "Run SCRIPT for a few steps of `fit`, and show how long each worker waits for "
    "its data, and what to do about it.",
    name="measures_input",
)
@types.count_option("-n --num-workers N", "With --input: local workers. Default: 1.")
@types.count_option(
    "--steps S", "With --input: steps after which the script is ended. Default: 60."
)
@types.seconds_option(
    "--timeout S",
    "With --input: seconds after which it is ended in any case. Default: 120.",
)
@types.output_option(
    "--trace FILE",
    "With folders of logs: write the flight records as a trace for Perfetto.",
)
@click.argument("script", metavar="[SCRIPT | DIR...]", required=False, type=types.FILE)
@click.argument("args", nargs=-1, type=types.FILE)
def doctor(
    measures_input: bool = False,
    num_workers: int | None = None,
    steps: int | None = None,
    timeout: float | None = None,
    trace: Path | None = None,
    script: str | None = None,
    args: tuple[str, ...] = (),
) -> None:
    """Print versions, devices, NCCL, the cluster and its ports.

    It shows what a script in the same environment sees: the replicas of
    `tfdp.auto_strategy()`, the cluster of TF_CONFIG, Slurm, a cloud or MPI as a
    tree, and which workers answer.

    With --input it runs SCRIPT on this machine instead, and shows how long each worker
    waits for its data. After a few steps of `fit` the script ends, as by `sys.exit()`.
    Callbacks that write files are left out.

    With folders of logs it merges the flight records that workers have written there,
    and says in one sentence where each was when a worker was lost, late or differed.
    """
    options = {"-n": num_workers, "--steps": steps, "--timeout": timeout}
    given = [
        f"{name} {value:g}" for name, value in options.items() if value is not None
    ]
    if not measures_input and script is not None and os.path.isdir(script):
        if given:
            raise click.UsageError(f"{_NO_INPUT}. Received: {', '.join(given)}")
        show_records((script, *args), trace)
        return
    if trace is not None:
        raise click.UsageError(
            "--trace needs folders with flight records, such as the folder of logs. "
            f"Received: {script or 'no folder'}"
        )
    if measures_input and script is not None:
        timeout = _TIMEOUT_SECONDS if timeout is None else timeout
        check_input(script, args, num_workers or 1, steps or _STEPS, timeout)
        return
    if measures_input:
        raise click.UsageError("Give the script to run. Received: --input")
    if script is not None:
        raise click.UsageError(
            "A script needs --input, which measures how long it waits for its data; a "
            f"folder of logs must exist. Received: {script}"
        )
    if given:
        raise click.UsageError(f"{_NO_INPUT}. Received: {', '.join(given)}")
    _show_set_up()


def _show_set_up() -> None:
    """Print the report of `tfdp doctor` without `--input`: this machine's set-up."""
    with usage_errors(ValueError, TimeoutError):
        cluster = find_cluster(_MPI_SECONDS)
    console = new_console()
    _title(console, "Versions")
    console.print(f"  {'python':<12}{platform.python_version()}")
    for name in _PACKAGES:
        console.print(f"  {name:<12}{version_of(name)}")
    devices: list[str] = []
    with quiet_stderr():
        tensorflow = _import_tensorflow(console)
        if tensorflow:
            devices = local_devices(tensorflow, cluster)
    if tensorflow:
        _show_devices(console, tensorflow)
    _show_cluster(console, cluster, devices)
    if cluster is not None and cluster.num_workers > 1:
        _title(console, "Network")
        for line in _describe_network(cluster):
            console.print(f"  {line}")
    if tensorflow is None:
        raise click.exceptions.Exit(1)


def _title(console: Console, text: str, style: str = "bold") -> None:
    """Print the title of a section, after an empty line."""
    console.print(f"\n{text}", style=style)


def _import_tensorflow(console: Console) -> ModuleType | None:
    """Import TensorFlow; print the error and return `None` if that fails.

    The import takes seconds, and must not delay other commands.
    """
    # TensorFlow's log level 1 keeps warnings, which name a missing CUDA library.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    try:
        import tensorflow
    except Exception as error:  # noqa: BLE001  (a broken package raises anything)
        _title(console, "TensorFlow cannot be imported", style="bold red")
        console.print(f"  {type(error).__name__}: {error}")
        return None
    return tensorflow


def local_devices(tf: Any, cluster: Cluster | None) -> list[str]:
    """Initialize TensorFlow's devices as `tfdp.auto_strategy` does, and list them.

    Args:
        tf: The module `tensorflow`.
        cluster: `Cluster` of this process, or `None` if there is none.

    Returns:
        List of strings, the devices of one worker's replicas.
    """
    # `devices` is imported late, since it imports TensorFlow, which takes seconds.
    from tfdp.communication.cluster import devices

    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        # Without memory growth, TensorFlow would allocate the whole memory of a GPU
        # that a training job that is running may need.
        tf.config.experimental.set_memory_growth(gpu, True)
    count = cluster.devices_per_worker if cluster else None
    has_one_worker = cluster is None or cluster.num_workers == 1
    if not gpus and (has_one_worker or count is not None):
        devices.create_default_cpus(count)
    return devices.local_devices()


def _show_devices(console: Console, tf: Any) -> None:
    """Print physical and logical devices, the CPU kernels, and NCCL's availability."""
    # `cpu_kernels` is imported late, since it imports TensorFlow, which takes seconds.
    from tfdp.communication.cluster import cpu_kernels

    num_gpus = len(tf.config.list_physical_devices("GPU"))
    _title(console, "Devices")
    for kind, devices in (
        ("physical", tf.config.list_physical_devices()),
        ("logical", tf.config.list_logical_devices()),
    ):
        names = ", ".join(device.name.split("device:")[-1] for device in devices)
        console.print(f"  {kind:<12}{names}")
    if num_gpus == 0:
        console.print(f"  {'kernels':<12}{cpu_kernels.describe()}")
    _title(console, "NCCL")
    console.print(f"  {_describe_nccl(tf, num_gpus)}")


def _describe_nccl(tf: Any, num_gpus: int) -> str:
    """Return the line about NCCL: whether it is available, and why or why not."""
    why = "is built without CUDA"
    if tf.test.is_built_with_cuda():
        cuda = tf.sysconfig.get_build_info().get("cuda_version", "of unknown version")
        if num_gpus:
            return f"available: built with CUDA {cuda}, {pluralize(num_gpus, 'GPU')}"
        why = f"is built with CUDA {cuda}, but sees no GPU"
    return f"not available: this TensorFlow {why}"


def _show_cluster(
    console: Console, cluster: Cluster | None, devices: list[str]
) -> None:
    """Print the cluster and its topology, or that there is none.

    Args:
        console: The `rich` console.
        cluster: `Cluster` of this process, or `None`.
        devices: List of strings, the local devices, such as `"CPU:0"`; empty if
            TensorFlow cannot be imported.
    """
    _title(console, "Cluster")
    if cluster is None:
        console.print(
            "  none: neither TF_CONFIG nor a Slurm step of several tasks is set, so "
            "this is a single machine"
        )
        if apart := unconnected_processes():
            console.print(
                f"  {apart}, which do not know of each other: set TF_CONFIG or, for "
                "MPI, install mpi4py (pip install tfdp[mpi])"
            )
        if devices:
            replicas = pluralize(len(devices), "replica")
            console.print(f"  1 worker, {replicas}: {', '.join(devices)}")
        return
    console.print(f"  from {_source()}; this process is {_describe_task(cluster)}")
    # If TensorFlow cannot be imported, `devices` is empty. The tree still shows the
    # replicas, since the cluster has the number of devices of a worker.
    devices = devices or [f"CPU:{i}" for i in range(cluster.devices_per_worker or 1)]
    _title(console, "Topology")
    topology = topology_of(cluster.hosts, len(devices))
    states = _states_in_mpi if current_job() else port_states
    console.print(draw_topology(cluster, devices, states(cluster), topology))
    if (warning := describe_unevenness(topology)) is not None:
        console.print(f"  {warning}")


def _describe_network(cluster: Cluster) -> Iterator[str]:
    """Yield lines on the addresses where workers listen, and who may connect."""
    with usage_errors(ValueError):
        admission = Admission.of(cluster)
    who = (
        "processes that know the workers' addresses: no secret is set, see SECURITY.md"
    )
    if admission.is_local:
        who = "processes of this user"
    elif admission.is_safe:
        who = "processes with the job's secret"
    if not cluster.is_evaluator:
        yield _describe_listening(cluster, is_local=admission.is_local)
    yield (
        f"worker 0 serves the job's store to {who}; if it is lost, the worker with the "
        "copy does"
    )
    yield (
        "between CPUs, a further port that the system chooses and a Unix socket carry "
        "the data, for processes with a secret from the store"
    )
    yield _SERVER


def _describe_listening(cluster: Cluster, *, is_local: bool) -> str:
    """Return the line with the interfaces and the port at which this worker listens.

    Args:
        cluster: `Cluster`, of which this process is a worker.
        is_local: Bool, whether the workers connect by Unix sockets.
    """
    worker = cluster.workers[cluster.rank]
    host, port = split_address(worker)
    where = " and ".join(addresses_to_listen_on(host)) or "all interfaces"
    where += ", a free port" if current_job() else f", port {port}"
    if is_local:
        where += ", and on its Unix socket"
    return f"this worker listens on {where}"


def _source() -> str:
    """Return the name of what defines the cluster, such as "TF_CONFIG" or "Slurm"."""
    if job := current_job():
        return job.library
    sources = (name for name, read in SOURCES.items() if read(os.environ))
    return next(sources, "the environment")


def _states_in_mpi(cluster: Cluster) -> list[str]:
    """Describe each worker's port under MPI, by rank: always a free one."""
    states = ["a free port"] * cluster.num_workers
    states[cluster.rank] = "this task, a free port"
    return states


def _describe_task(cluster: Cluster) -> str:
    """Describe this process, such as "worker 0 of 2, the chief"."""
    if cluster.is_evaluator:
        return "the evaluator, which takes no part in training"
    chief = ", the chief" if cluster.is_chief else ""
    return f"worker {cluster.rank} of {cluster.num_workers}{chief}"
