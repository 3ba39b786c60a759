"""`tfdp doctor`: what this machine and this cluster look like to tfdp."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from types import ModuleType
from typing import Any

import click
from rich.console import Console

from tfdp.cli.topology import describe_unevenness, draw_topology, port_states
from tfdp.cluster import Cluster, topology_of

_PACKAGES = ("tfdp", "tensorflow", "keras", "numpy")
_TRUST = (
    "TensorFlow's server listens on all interfaces, also when the cluster names "
    "only localhost, and runs any graph that it is sent. It asks nobody who they "
    "are: train on a trusted network only. Close the workers' ports to everybody "
    "else by a firewall, a NetworkPolicy of Kubernetes, or a network namespace."
)


@click.command()
def doctor() -> None:
    """Prints versions, devices, NCCL, the cluster, and whether its ports answer."""
    try:
        cluster = Cluster.from_environment()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    console = Console(highlight=False, markup=False, soft_wrap=True)
    _title(console, "Versions")
    for name, version in _versions().items():
        console.print(f"  {name:<12}{version}")
    tensorflow = _import_tensorflow(console)
    devices = _show_devices(console, tensorflow) if tensorflow else ["CPU:0"]
    _show_cluster(console, cluster, devices)
    _title(console, "Warning", style="bold yellow")
    console.print(f"  {_TRUST}")
    if tensorflow is None:
        raise click.exceptions.Exit(1)


def _title(console: Console, text: str, style: str = "bold") -> None:
    console.print(f"\n{text}", style=style)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _import_tensorflow(console: Console) -> ModuleType | None:
    """Imports TensorFlow, here and not above: it takes seconds."""
    # Warnings stay: they say which CUDA library is missing.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    try:
        import tensorflow
    except Exception as error:  # noqa: BLE001  (a broken one raises anything)
        _title(console, "TensorFlow cannot be imported", style="bold red")
        console.print(f"  {type(error).__name__}: {error}")
        return None
    return tensorflow


def _show_devices(console: Console, tf: Any) -> list[str]:
    """Prints the devices; returns those on which one worker would train."""
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        # Looking at a GPU must not take its memory from a training that runs.
        tf.config.experimental.set_memory_growth(gpu, True)
    _title(console, "Devices")
    for kind, found in (
        ("physical", tf.config.list_physical_devices()),
        ("logical", tf.config.list_logical_devices()),
    ):
        names = ", ".join(device.name.split("device:")[-1] for device in found)
        console.print(f"  {kind:<12}{names}")
    _title(console, "NCCL")
    console.print(f"  {_describe_nccl(tf, len(gpus))}")
    return [f"GPU:{index}" for index in range(len(gpus))] or ["CPU:0"]


def _describe_nccl(tf: Any, num_gpus: int) -> str:
    if not tf.test.is_built_with_cuda():
        return (
            "not available: this TensorFlow is built without CUDA; all-reduce uses "
            "TensorFlow's ring"
        )
    cuda = tf.sysconfig.get_build_info().get("cuda_version", "of unknown version")
    if num_gpus == 0:
        return (
            f"not available: this TensorFlow is built with CUDA {cuda}, but sees no "
            "GPU; all-reduce uses TensorFlow's ring"
        )
    return f"available: built with CUDA {cuda}, {num_gpus} GPUs"


def _show_cluster(
    console: Console, cluster: Cluster | None, devices: list[str]
) -> None:
    _title(console, "Cluster")
    if cluster is None:
        console.print(
            "  none: neither TF_CONFIG nor a Slurm step of several tasks is set, so "
            "this is a single machine"
        )
        console.print(f"  1 worker, {len(devices)} replicas: {', '.join(devices)}")
        return
    source = "TF_CONFIG" if _is_from_tf_config() else "Slurm"
    console.print(f"  from {source}; this process is {_describe_task(cluster)}")
    if cluster.devices_per_worker is not None:
        devices = [f"CPU:{index}" for index in range(cluster.devices_per_worker)]
    _title(console, "Topology")
    topology = topology_of(cluster.hosts, len(devices))
    console.print(draw_topology(cluster, devices, port_states(cluster), topology))
    if (warning := describe_unevenness(topology)) is not None:
        console.print(f"  {warning}")


def _is_from_tf_config() -> bool:
    """Tells whether `TF_CONFIG` names a cluster; Slurm is asked only if not."""
    return Cluster.from_tf_config(os.environ.get("TF_CONFIG", "")) is not None


def _describe_task(cluster: Cluster) -> str:
    if cluster.is_evaluator:
        return "the evaluator, which takes no part in training"
    chief = ", the chief" if cluster.is_chief else ""
    return f"worker {cluster.rank} of {cluster.num_workers}{chief}"
