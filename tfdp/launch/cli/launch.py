"""Launch of local workers: their settings, ports, environment, GPUs and log folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

from tfdp.communication.cluster import Cluster, free_ports
from tfdp.communication.cluster.gpus import own_gpus, visible_gpus
from tfdp.communication.cluster.limits import (
    limit_for,
    limit_of_threads,
    needed_threads,
)
from tfdp.ground.base.files import make_private_folder
from tfdp.ground.text import pluralize
from tfdp.launch.bench.machine import num_cores
from tfdp.launch.cli.screen import Screen

_WORKERS_PER_CORE = 64
# Of the launcher: a pipe and a log for each, and what it opens meanwhile.
_FILES_PER_WORKER, _OTHER_FILES = 2, 64


class AutoCount(int):
    """A number of workers that follows from the GPUs or cores of this machine."""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """What the command line says of the workers of this machine."""

    num_workers: int
    devices_per_worker: int | None
    log_dir: str | None
    timeout: float | None
    grace: float
    max_restarts: int
    rebalance: bool
    log_format: str
    forks: bool
    is_module: bool
    script: str
    args: tuple[str, ...]

    @property
    def of_cluster(self) -> dict[str, Any]:
        """Dict of those that are arguments of each worker's `Cluster`."""
        return {
            "devices_per_worker": self.devices_per_worker,
            "rebalance": self.rebalance,
        }

    @property
    def command(self) -> list[str]:
        """List of strings, what every worker runs."""
        module = ["-m"] if self.is_module else []
        return [sys.executable, *module, self.script, *self.args]


def make_clusters(num_workers: int, **settings: Any) -> list[Cluster]:
    """Make the cluster of a job on this machine, as each of its workers sees it.

    Args:
        num_workers: Int, number of processes.
        **settings: Further arguments of each worker's `Cluster`.

    Returns:
        List of `Cluster`, one for each worker, in the order of ranks.
    """
    workers = tuple(f"127.0.0.1:{port}" for port in free_ports(num_workers))
    ranks = range(num_workers)
    return [Cluster(workers, task_index=rank, **settings) for rank in ranks]


def check_num_workers(num_workers: int) -> None:
    """Refuse more workers than this machine can sensibly hold.

    Args:
        num_workers: Int.

    Raises:
        ValueError: If there are too many.
    """
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    each = f"{_WORKERS_PER_CORE} for each of its {pluralize(num_cores(), 'CPU core')}"
    bounds = [(_WORKERS_PER_CORE * num_cores(), each)]
    if open_files != resource.RLIM_INFINITY:
        most = max(1, (open_files - _OTHER_FILES) // _FILES_PER_WORKER)
        reason = f"by its limit of open files, {open_files} (ulimit -n)"
        bounds.append((most, reason))
        connects = not visible_gpus()  # else NCCL does
        needed = limit_for(num_workers, connects=connects)
        while most > 1 and limit_for(most, connects=connects) > open_files:
            most -= 1
        bounds.append((most, f"{reason}: each of {num_workers} needs {needed}"))
    if (threads := limit_of_threads()) is not None:
        needed = needed_threads()
        reason = f"by its limit of threads, {threads} (ulimit -u): each needs {needed}"
        bounds.append((max(1, threads // needed), reason))
    most, reason = min(bounds)
    if num_workers > most:
        raise ValueError(
            f"These are too many workers for this machine, which holds {most}, "
            f"{reason}. Received: -n {num_workers}"
        )


def worker_environment(
    cluster: Cluster,
    slot: int,
    num_slots: int,
    job: str,
    num_local: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Make the environment of one worker.

    Args:
        cluster: The `Cluster` as this worker sees it.
        slot: Int, the worker's place on this machine, with GPUs of its own.
        num_slots: Int, also of those that are left out at the moment.
        job: String, the job's id, by which its processes are found again.
        num_local: Int, workers of this machine, or `None` if all are. Defaults to
            `None`.
        environ: The user's environment; what it says about threads stands.
            Defaults to `os.environ`.

    Returns:
        Dict of environment variables.
    """
    config = json.loads(cluster.to_tf_config())
    config.setdefault("tfdp", {})["job"] = job
    num_threads = str(max(1, num_cores() // (num_local or cluster.num_workers)))
    defaults = {
        "TF_NUM_INTRAOP_THREADS": num_threads,
        "OMP_NUM_THREADS": num_threads,
        # Warnings and errors; see `tfdp.launch.cli.noise` for what comes in spite of
        # it.
        "TF_CPP_MIN_LOG_LEVEL": "1",
        # The launcher reads UTF-8, whatever the locale: bars are not ASCII.
        "PYTHONIOENCODING": "utf-8",
    }
    return {
        **defaults,
        **environ,
        **own_gpus(slot, num_slots, visible_gpus(environ)),
        "TF_CONFIG": json.dumps(config),
        "PYTHONUNBUFFERED": "1",
    }


def warn_of_surroundings(screen: Screen, num_workers: int, devices: int | None) -> None:
    """Warn of a `TF_CONFIG` that is set, and of fewer GPUs than workers."""
    if os.environ.get("TF_CONFIG"):
        screen.warn(
            "tfdp: warning: TF_CONFIG was set already; the workers get another. Under "
            "a cluster manager, run the script without `tfdp run`"
        )
    num_gpus = len(visible_gpus())
    if devices is None and 0 < num_gpus < num_workers:
        screen.warn(
            f"tfdp: warning: there are {num_workers} workers but "
            f"{pluralize(num_gpus, 'GPU')}, and NCCL wants one for each; set "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )


def make_log_dir(path: str | None) -> pathlib.Path:
    """Make the folder for the workers' logs.

    Args:
        path: String, the user's choice, which may exist; or `None` for a new
            folder `tfdp-logs/<date>-<time>`.

    Returns:
        The path of a folder in which files can be written.

    Raises:
        ValueError: If there is no such folder and it cannot be made.
    """
    try:
        if path is not None:
            folder = pathlib.Path(path)
            make_private_folder(folder)
        else:
            folder = _make_new_folder(pathlib.Path("tfdp-logs"))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(0, "no permission to write in it")
    except OSError as error:
        raise ValueError(
            f"The log folder cannot be used: {error.strerror}. Give another one "
            f"with --log-dir. Received: {path or 'tfdp-logs'}"
        ) from error
    return folder


def _make_new_folder(parent: pathlib.Path) -> pathlib.Path:
    name = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        folder = parent / f"{name}{suffix}"
        with contextlib.suppress(FileExistsError):
            make_private_folder(folder, exist_ok=False)
            return folder
    raise FileExistsError(0, "too many jobs were started in one second")
