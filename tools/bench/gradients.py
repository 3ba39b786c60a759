"""Gradients of published models, reduced as training does: `models`."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from tfdp.communication.transport import is_mpi_job
from tfdp.ground.plans.topology import Topology
from tfdp.launch.bench import output
from tfdp.launch.bench.replicas import ReplicaSettings, ready_replicas
from tfdp.launch.bench.sides import Runner, alternate_for
from tfdp.launch.cli import bench as options
from tfdp.launch.cli import parameter_types as types
from tools.bench.gradients_report import COLUMNS, Row, notes, plot, row_of
from tools.bench.link_rate import LINK_RATE
from tools.bench.published_models import PUBLISHED_MODELS, PublishedModel
from tools.bench.report import PROGRAM

BACKENDS = ("direct", "ring", "mpi")
WORKER = "tools.bench.gradients_worker"
_BLOCK_SECONDS = 0.1
_WHAT = "gradients of published models"
Times = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Settings(ReplicaSettings):
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
        models = {model.name: model.shapes for model in self.models}
        return {**super().worker_setup, "routes": self.routes, "models": models}

    def check(self, topology: Topology) -> None:
        """Check that all that is asked for can be run.

        Args:
            topology: `Topology` of the replicas.

        Raises:
            ValueError: If not.
        """
        super().check(topology)
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
    on_block: Callable[[], Any] = lambda: None,
) -> tuple[list[Row], Times]:
    """Run everything; the algorithms and backends of one model take turns.

    Args:
        settings: `Settings`.
        runner: A `Side` of `tools.bench.gradients_worker`, or `ClusterRunner`.
        topology: `Topology` of the replicas.
        on_block: Callable, called after each block. Defaults to nothing.

    Returns:
        Tuple of the rows, and the seconds of each block by name.
    """
    rows: list[Row] = []
    all_times: Times = {}
    for model in settings.models:
        names = {route: f"{model.name}/{route}" for route in settings.routes}
        variants = [(runner, name) for name in names.values()]
        times = alternate_for(
            _BLOCK_SECONDS, variants, blocks=settings.blocks, on_block=on_block
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
    num_blocks = len(settings.models) * len(settings.routes) * settings.blocks
    with (
        output.progress_bar(_WHAT, num_blocks) as on_block,
        ready_replicas(settings, WORKER) as replicas,
    ):
        topology = replicas.topology
        rows, times = measure(settings, replicas.runner, topology, on_block)
    if replicas.is_chief:
        count = topology.num_replicas
        about = {"num_replicas": count, "nodes": topology.nodes, "seconds": times}
        output.report(
            {**content, **about},
            files,
            rows,
            COLUMNS,
            functools.partial(plot, count),
            heading=f"{_WHAT} between {count} replicas",
            notes=notes(settings.models, rows, settings.link_rate),
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


@click.command(cls=types.ManyValues)
@options.workers
@click.option(
    "--models",
    metavar="NAME...",
    multiple=True,
    type=click.Choice(tuple(PUBLISHED_MODELS)),
    default=tuple(PUBLISHED_MODELS),
    show_default=True,
    help=f"Of {', '.join(PUBLISHED_MODELS)}.",
)
@options.algorithms
@click.option(
    "--backends",
    metavar="NAME...",
    multiple=True,
    type=click.Choice(BACKENDS),
    default=("direct", "ring"),
    show_default=True,
    help="What carries the bytes: direct (shared memory and TCP), ring (TensorFlow's "
    "own, over gRPC), or mpi, in a job of MPI.",
)
@click.option(
    "--bucket-mb",
    metavar="MB",
    type=types.POSITIVE,
    help="Largest size of a bucket. Default: as in training, 25 MB or an eighth of "
    "the gradients.",
)
@options.node_size
@click.option(
    "--link-rate",
    metavar="RATE",
    type=LINK_RATE,
    help="Rate of each node's link in each direction, such as 10gbit: the share of "
    "its bound is shown.",
)
@options.blocks(10)
@options.files
def models(**given: Any) -> None:
    """Reduce the gradients of ResNet-50, VGG-16 and BERT-large.

    Gradients of the shapes of each model are all-reduced in the buckets of a training
    step, by each algorithm on each backend, which take turns: time, payload against
    2 (N - 1) / N times the model, and bandwidth. Every sum is checked. BERT-large
    takes 4 GB of memory in each worker.
    """
    given["models"] = [PUBLISHED_MODELS[name]() for name in given["models"]]
    options.run_benchmark("models", sys.modules[__name__], given)
