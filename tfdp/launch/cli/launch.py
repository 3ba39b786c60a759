"""Launch of local workers: their settings, ports, environment, GPUs and log folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import shlex
import sys
import time
from collections.abc import Mapping
from typing import Any

from tfdp.communication.cluster import Cluster, free_ports
from tfdp.communication.cluster.gpus import gpu_environment, visible_gpus
from tfdp.communication.cluster.limits import (
    limit_for,
    limit_of_threads,
    needed_threads,
)
from tfdp.communication.coordination.flight_record import FOLDER_KEY
from tfdp.features.goodput.ledger import Launch
from tfdp.ground.base.files import make_private_folder
from tfdp.ground.text import pluralize
from tfdp.launch.bench.machine import num_cores
from tfdp.launch.cli.screen import Screen

# More workers for each CPU core than this are probably a typing error, and would
# exhaust the machine.
_WORKERS_PER_CORE = 64
# The limit of open files bounds the number of workers: the launcher has two files open
# for each (a pipe and a log), and some others.
_FILES_PER_WORKER, _OTHER_FILES = 2, 64


class AutoCount(int):
    """Number of workers that was derived from the GPUs or cores of this machine."""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Values of the options of `tfdp run` for the workers of this machine.

    Args:
        num_workers: Int, number of workers.
        devices_per_worker: Int, logical CPU devices of a worker, or `None` if not
            given.
        log_dir: String, folder of the logs, or `None` for a new one.
        timeout: Float, seconds after which the job is stopped, or `None` for never.
        grace: Float, seconds between asking the workers to stop and killing them.
        max_restarts: Int, largest number of restarts.
        rebalance: Bool, whether batch rows are rebalanced by the workers' speed.
        elastic: Int, least number of workers with which training continues after the
            loss of others, or `None` if it does not.
        log_format: String, `"text"` or `"json"`.
        forks: Bool, whether workers may be forks of a process that has imported
            TensorFlow.
        is_module: Bool, whether the script is the name of a module.
        script: String, path of the script or name of the module.
        args: Tuple of strings, arguments of the script.
    """

    num_workers: int
    devices_per_worker: int | None
    log_dir: str | None
    timeout: float | None
    grace: float
    max_restarts: int
    rebalance: bool
    elastic: int | None
    log_format: str
    forks: bool
    is_module: bool
    script: str
    args: tuple[str, ...]

    @property
    def cluster_options(self) -> dict[str, Any]:
        """Dict of the settings that are arguments of each worker's `Cluster`."""
        return {
            "devices_per_worker": self.devices_per_worker,
            "rebalance": self.rebalance,
            "elastic": self.elastic,
        }

    @property
    def command(self) -> list[str]:
        """List of strings, the command line of each worker."""
        module = ["-m"] if self.is_module else []
        return [sys.executable, *module, self.script, *self.args]


def make_clusters(num_workers: int, **settings: Any) -> list[Cluster]:
    """Create the `Cluster` of each worker of a job on this machine.

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
    """Check that this machine can run a number of workers.

    Args:
        num_workers: Int, number of workers.

    Raises:
        ValueError: If the cores, or the limits of files or threads, allow fewer.
    """
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    each = f"{_WORKERS_PER_CORE} for each of its {pluralize(num_cores(), 'CPU core')}"
    bounds = [(_WORKERS_PER_CORE * num_cores(), each)]
    # Without GPUs, tfdp connects the workers; with GPUs, NCCL needs TensorFlow's
    # server, which takes more threads.
    connects = not visible_gpus()
    if open_files != resource.RLIM_INFINITY:
        most = max(1, (open_files - _OTHER_FILES) // _FILES_PER_WORKER)
        reason = f"by its limit of open files, {open_files} (ulimit -n)"
        bounds.append((most, reason))
        needed = limit_for(num_workers, connects=connects)
        while most > 1 and limit_for(most, connects=connects) > open_files:
            most -= 1
        bounds.append((most, f"{reason}: each of {num_workers} needs {needed}"))
    if (threads := limit_of_threads()) is not None:
        needed = needed_threads(connects=connects)
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
    launch: Launch | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    log_folder: pathlib.Path | None = None,
) -> dict[str, str]:
    """Return the environment variables of one worker.

    Args:
        cluster: `Cluster` of this worker.
        slot: Int, the worker's slot: its share of this machine, with separate GPUs.
        num_slots: Int, number of slots, including those that are currently left out.
        job: String, id of the job, by which its processes are identified.
        num_local: Int, number of workers on this machine, or `None` if all are.
            Defaults to `None`.
        launch: `Launch`, the settings of the ledger of goodput, or `None` for none.
            Defaults to `None`.
        environ: Mapping of the user's environment variables, which override the
            defaults for threads, TensorFlow's log level and the output encoding.
            Defaults to `os.environ`.
        log_folder: `Path` of the folder for the workers' flight records, or `None`.
            Defaults to `None`.

    Returns:
        Dict of environment variables.
    """
    config = json.loads(cluster.to_tf_config())
    config.setdefault("tfdp", {})["job"] = job
    if log_folder is not None:
        config["tfdp"][FOLDER_KEY] = str(log_folder.absolute())
    if launch is not None:
        launch.add_to(config)
    num_threads = str(max(1, num_cores() // (num_local or cluster.num_workers)))
    defaults = {
        "TF_NUM_INTRAOP_THREADS": num_threads,
        "OMP_NUM_THREADS": num_threads,
        # TensorFlow's log level 1 keeps warnings and errors. TensorFlow writes some
        # lines despite the level, which `tfdp.launch.cli.noise` filters.
        "TF_CPP_MIN_LOG_LEVEL": "1",
        # The launcher reads UTF-8 in any locale, since progress bars are not ASCII.
        "PYTHONIOENCODING": "utf-8",
    }
    return {
        **defaults,
        **environ,
        **gpu_environment(slot, num_slots, visible_gpus(environ)),
        "TF_CONFIG": json.dumps(config),
        "PYTHONUNBUFFERED": "1",
    }


def warn_of_environment(screen: Screen, num_workers: int, devices: int | None) -> None:
    """Warn if `TF_CONFIG` is set, or if there are fewer GPUs than workers.

    Args:
        screen: `Screen` for the warnings.
        num_workers: Int, number of workers.
        devices: Int, logical CPU devices of each worker, or `None`.
    """
    if os.environ.get("TF_CONFIG"):
        screen.warn(
            "tfdp: warning: TF_CONFIG is set, and is replaced for the workers. Under a "
            "cluster manager, run the script without `tfdp run`"
        )
    num_gpus = len(visible_gpus())
    if devices is None and 0 < num_gpus < num_workers:
        screen.warn(
            f"tfdp: warning: there are {num_workers} workers but "
            f"{pluralize(num_gpus, 'GPU')}, and NCCL needs one for each; set "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )


def make_log_dir(path: str | None) -> pathlib.Path:
    """Create the folder for the workers' logs.

    Args:
        path: String, path of a folder that may exist; or `None` for a new folder
            `tfdp-logs/<date>-<time>`.

    Returns:
        Path of a folder in which files can be written.

    Raises:
        ValueError: If the folder cannot be created or written to.
    """
    try:
        if path is not None:
            # The folder is created from the string, since an empty one raises an error,
            # while `Path("")` is the current folder.
            make_private_folder(path)
            folder = pathlib.Path(path)
        else:
            folder = _make_new_folder(pathlib.Path("tfdp-logs"))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(0, "no permission to write in it")
    except OSError as error:
        received = "tfdp-logs" if path is None else path
        raise ValueError(
            f"The log folder cannot be used: {error.strerror}. Give another one "
            f"with --log-dir. Received: {shlex.quote(received)}"
        ) from error
    return folder


def _make_new_folder(parent: pathlib.Path) -> pathlib.Path:
    """Create and return a folder named by the time, with a number if that is taken."""
    name = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        folder = parent / f"{name}{suffix}"
        with contextlib.suppress(FileExistsError):
            make_private_folder(folder, exist_ok=False)
            return folder
    raise FileExistsError(0, "too many jobs were started in one second")
