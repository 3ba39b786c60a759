"""A job whose workers are killed, and may be replaced."""

from __future__ import annotations

import ctypes
import json
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.elastic import training
from tests.harness.fork_server import begin, fork_server
from tests.harness.tf_config import cluster_configs
from tools.bench.hosts_bed import TwoHosts

_NEW_NETWORK = 0x40000000


@dataclass
class Outcome:
    """How a job has ended.

    Args:
        codes: List of ints, the exit code of each process, the replacements last.
        results: Dict from the index of a process to what it has returned.
        output: String, what all have printed.
        folder: Path, see `training.train`.
    """

    codes: list[int]
    results: dict[int, dict[str, Any]]
    output: str
    folder: Path


def run(
    folder: Path,
    num_workers: int,
    devices: int = 1,
    *,
    script: Callable[..., dict[str, Any]] = training.train,
    replacements: int = 0,
    disturb: Callable[[list[Any]], None] = lambda processes: None,
    replaced_by: dict[str, Any] | None = None,
    bed: TwoHosts | None = None,
    hosts: tuple[int, ...] = (),
    deadline_seconds: float = 90.0,
    **arguments: Any,
) -> Outcome:
    """Runs a job until all its processes have ended.

    Args:
        folder: Path of a new folder.
        num_workers: Int.
        devices: Int, logical devices of each worker.
        script: Callable, what each process runs.
        replacements: Int, how many lost workers start again.
        disturb: Callable, called again and again with the processes.
        replaced_by: Dict of arguments that differ for replacements, or `None`.
        bed: `TwoHosts`, or `None` for this machine.
        hosts: Tuple of ints, the host of each worker on a bed.
        deadline_seconds: Float, after which the test fails.
        **arguments: Those of the script.
    """
    context = fork_server()
    folder.mkdir(exist_ok=True)
    names: list[str | None] = [None] * num_workers
    addresses = None
    if bed:
        names = [bed.names[host] for host in hosts]
        every = bed.worker_addresses(len(hosts))
        addresses = [every[host * len(hosts) + i] for i, host in enumerate(hosts)]
    configs = cluster_configs(num_workers, devices, addresses=addresses)
    processes: list[tuple[int, Any]] = []

    def start(rank: int, **more: Any) -> None:
        path = folder / f"process-{len(processes)}"
        job_of = arguments | more
        target = (script, rank, configs[rank], path, str(folder), job_of, names[rank])
        process = context.Process(target=_serve, args=target, daemon=True)
        process.start()
        processes.append((rank, process))

    for rank in range(num_workers):
        start(rank)
    end, left, seen = time.monotonic() + deadline_seconds, replacements, set[int]()
    try:
        while any(process.is_alive() for _, process in processes):
            if time.monotonic() > end:
                break
            for index, (rank, process) in enumerate(processes[:]):
                if process.exitcode and index not in seen and left:
                    seen.add(index)
                    left -= 1
                    start(rank, **{"kill": None, **(replaced_by or {})})
            disturb([process for _, process in processes])
            time.sleep(0.02)
        is_late = any(process.is_alive() for _, process in processes)
    finally:
        for _, process in processes:
            process.kill()
            process.join()
    paths = [folder / f"process-{index}" for index in range(len(processes))]
    output = "\n".join(p.with_suffix(".log").read_text(errors="replace") for p in paths)
    if is_late:
        pytest.fail(f"not done in {deadline_seconds} s:\n{output[-5000:]}")
    results = {
        index: pickle.loads(path.with_suffix(".result").read_bytes())
        for index, path in enumerate(paths)
        if path.with_suffix(".result").exists()
    }
    codes = [process.exitcode for _, process in processes]
    return Outcome(codes, results, output, folder)


def _serve(
    script: Callable[..., dict[str, Any]],
    rank: int,
    config: str | None,
    path: Path,
    folder: str,
    arguments: dict[str, Any],
    host: str | None = None,
) -> None:
    import atexit
    import os
    import sys

    if host is not None:
        with Path(f"/var/run/netns/{host}").open() as file:
            assert ctypes.CDLL(None).setns(file.fileno(), _NEW_NETWORK) == 0
    begin(path.with_suffix(".log"), config)
    code = 0
    try:
        result = script(rank, folder, **arguments)
        path.with_suffix(".result").write_bytes(pickle.dumps(result))
    except SystemExit as error:
        code = int(error.code or 0)
    except Exception:  # noqa: BLE001 the test looks at the output
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares weights and history, and what the callbacks have seen."""
    for own, other in zip(result["weights"], expected["weights"], strict=True):
        scale = max(float(np.abs(other).max()), 1e-3)
        assert float(np.abs(own - other).max()) / scale < 1e-5
    assert result["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(result["history"][name], values, rtol=1e-4)
    evaluated = expected.get("evaluated", ())
    np.testing.assert_allclose(result.get("evaluated", ()), evaluated, rtol=1e-4)


def on_one_device(
    folder: Path,
    *,
    script: Callable[..., dict[str, Any]] = training.train,
    deadline_seconds: float = 60.0,
    **arguments: Any,
) -> dict[str, Any]:
    """What one device makes of the same training."""
    context = fork_server()
    folder.mkdir(exist_ok=True)
    path = folder / "one-device"
    process = context.Process(
        target=_serve,
        args=(script, -1, None, path, str(folder), arguments),
        daemon=True,
    )
    process.start()
    process.join(deadline_seconds)
    process.kill()
    if process.exitcode != 0:
        pytest.fail(path.with_suffix(".log").read_text())
    return pickle.loads(path.with_suffix(".result").read_bytes())


def rows_by_step(folder: Path) -> dict[tuple[int, int], list[int]]:
    """The rows that made each step, in the last cluster that has made it."""
    found: dict[tuple[int, int], dict[int, list[int]]] = {}
    for path in (folder / "rows").iterdir():
        for line in path.read_text().splitlines():
            generation, epoch, batch, rows = json.loads(line)
            of_step = found.setdefault((epoch, batch), {})
            of_step[generation] = of_step.get(generation, []) + rows
    return {step: of_step[max(of_step)] for step, of_step in found.items()}
