"""Gradients of published models, reduced as training does: `models`."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp.communication.transport import is_mpi_job
from tfdp.ground.plans.topology import Topology
from tfdp.launch.bench import output
from tfdp.launch.bench.local_replicas import check_topology, local_topology
from tfdp.launch.bench.sides import Runner, Side, alternate_for, started
from tools.bench.gradients_report import COLUMNS, Row, cells, notes, plot, row_of
from tools.bench.published_models import PublishedModel
from tools.bench.report import PROGRAM

BACKENDS = ("direct", "ring", "mpi")
WORKER = "tools.bench.gradients_worker"
_BLOCK_SECONDS = 0.1
_WHAT = "gradients of published models"
Times = dict[str, list[float]]
Found = tuple[list[Row], Times, Topology, bool]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the measurement.

    Args:
        models: Sequence of `PublishedModel`.
        algorithms: Sequence of strings, of the all-reduce.
        backends: Sequence of strings, of `BACKENDS`.
        blocks: Int, turns of each algorithm on each backend.
        bucket_mb: Float, largest size of a bucket, or `None`, as training chooses
            it. Defaults to `None`.
        num_workers: Int, local processes, or `None` for the cluster that this
            process is in. Defaults to `None`.
        devices_per_worker: Int, logical CPU devices of each, or `None`. Defaults
            to `None`.
        node_size: Int, replicas that count as one node, or `None`. Defaults to
            `None`.
        link_rate: String, rate of a node's link in each direction, such as
            `"1gbit"`, or `None`. Defaults to `None`.
    """

    models: Sequence[PublishedModel]
    algorithms: Sequence[str]
    backends: Sequence[str]
    blocks: int
    bucket_mb: float | None = None
    num_workers: int | None = None
    devices_per_worker: int | None = None
    node_size: int | None = None
    link_rate: str | None = None

    @property
    def routes(self) -> dict[str, dict[str, Any]]:
        """Dict from `algorithm/backend` to its `CommunicationOptions`."""
        common: dict[str, Any] = {"node_size": self.node_size}
        if self.bucket_mb is not None:
            common["bucket_mb"] = self.bucket_mb
        return {
            f"{algorithm}/{backend}": {
                "algorithm": algorithm,
                "backend": backend,
                **common,
            }
            for algorithm in self.algorithms
            for backend in self.backends
        }

    @property
    def worker_setup(self) -> dict[str, Any]:
        """Setup of a worker."""
        return {
            "strategy": "tfdp" if (self.num_workers or 0) > 1 else "auto",
            "devices": self.devices_per_worker,
            "addresses": [],  # of local workers they are told by their side
            "routes": self.routes,
            "models": {model.name: model.shapes for model in self.models},
        }

    def check(self, topology: Topology) -> None:
        """Check that all that is asked for can be run.

        Args:
            topology: `Topology` of the replicas.

        Raises:
            ValueError: If not.
        """
        check_topology(topology, self.algorithms)
        if self.link_rate and topology.num_nodes == 1:
            raise ValueError(
                "A rate is that of the link between nodes, and all replicas are on "
                "one; --node-size says how many count as one. "
                f"Received: --link-rate {self.link_rate}"
            )

    def check_mpi(self) -> None:
        """Check that MPI has started what it is to connect.

        Raises:
            ValueError: If not.
        """
        if "mpi" in self.backends and (self.num_workers or not is_mpi_job()):
            raise ValueError(
                "The backend mpi needs processes that MPI has started, and mpi4py: "
                "mpiexec -n 2 python -m tools.bench models --backends mpi, without "
                f"-n of its own. Received: --backends {' '.join(self.backends)}"
            )


def measure(
    settings: Settings,
    runner: Runner,
    topology: Topology,
    on_turn: Callable[[], Any] = lambda: None,
) -> tuple[list[Row], Times]:
    """Run everything; the algorithms and backends of one model take turns.

    Args:
        settings: `Settings`.
        runner: A `Side` of `tools.bench.gradients_worker`, or `ClusterRunner`.
        topology: `Topology` of the replicas.
        on_turn: Callable, called after each block. Defaults to nothing.

    Returns:
        Tuple of the rows, and the seconds of each block by name.
    """
    rows: list[Row] = []
    all_times: Times = {}
    for model in settings.models:
        names = {route: f"{model.name}/{route}" for route in settings.routes}
        arms = [(runner, name) for name in names.values()]
        times = alternate_for(
            _BLOCK_SECONDS, arms, blocks=settings.blocks, on_turn=on_turn
        )
        for route, name in names.items():
            all_times[name] = times[f"{runner.name}/{name}"]
            counted = runner.run(f"count {name}", 1)
            rows.append(
                row_of(
                    model,
                    route,
                    topology,
                    all_times[name],
                    counted,
                    settings.link_rate,
                )
            )
    return rows, all_times


def run(settings: Settings, files: output.Files) -> int:
    """Measure, print the table and write the files.

    Args:
        settings: `Settings`.
        files: `Files` to write.

    Returns:
        Int, how many elements were wrong in all.

    Raises:
        ValueError: If what is asked for cannot be run.
        RuntimeError: If a worker fails.
    """
    settings.check_mpi()
    content = _about(settings)
    measured = _measure_here if settings.num_workers is None else _measure_on_workers
    rows, times, topology, is_chief = measured(settings)
    if is_chief:
        console = output.new_console()
        console.print(f"{_WHAT} between {topology.num_replicas} replicas")
        content |= {
            "num_replicas": topology.num_replicas,
            "nodes": topology.nodes,
            "rows": [dataclasses.asdict(row) for row in rows],
            "seconds": times,
        }
        output.report(
            console,
            content,
            files,
            table=output.Table(COLUMNS, [cells(row) for row in rows]),
            notes=notes(settings.models, rows, settings.link_rate),
            draw=functools.partial(plot, rows, topology.num_replicas),
        )
    return sum(row.num_wrong for row in rows)


def _about(settings: Settings) -> dict[str, Any]:
    """The first part of the JSON, with the models layer by layer."""
    asked: Mapping[str, Any] = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
    }
    names = [model.name for model in settings.models]
    about = output.about("models", {**asked, "models": names}, PROGRAM)
    about["models"] = {
        model.name: {
            "parameters": model.num_parameters,
            "published_parameters": model.published_parameters,
            "layers": {layer.name: layer.num_parameters for layer in model.layers},
        }
        for model in settings.models
    }
    return about


def _num_turns(settings: Settings) -> int:
    return len(settings.models) * len(settings.routes) * settings.blocks


def _measure_on_workers(settings: Settings) -> Found:
    topology = local_topology(
        settings.num_workers, settings.devices_per_worker, settings.node_size
    )
    settings.check(topology)
    side = Side("workers", WORKER, settings.worker_setup, settings.num_workers or 1)
    with (
        output.progress_bar(_WHAT, _num_turns(settings)) as on_turn,
        started(side),
    ):
        rows, times = measure(settings, side, topology, on_turn)
    return rows, times, topology, True


def _measure_here(settings: Settings) -> Found:
    """Measure on the cluster of this process; the first worker reports."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfdp.launch.bench.collectives_worker import ClusterRunner
    from tools.bench.gradients_worker import GradientArms

    arms = GradientArms(settings.worker_setup, settings.check)
    extended = arms.strategy.extended
    runner = ClusterRunner(arms.strategy, arms)
    topology = extended.algorithm_selector.topology
    with output.progress_bar(_WHAT, _num_turns(settings)) as on_turn:
        rows, times = measure(settings, runner, topology, on_turn)
    return rows, times, topology, extended.worker_group.is_chief
