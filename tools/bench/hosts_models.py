"""Gradients of published models between two hosts: time, payload, share of the link."""

from __future__ import annotations

import statistics
from typing import Any

from tfdp.ground.options import FLAT_ALGORITHMS
from tfdp.launch.bench.nccl_tests import bus_factor
from tfdp.launch.bench.replicas import local_topology
from tfdp.launch.bench.sides import alternate, paired_ratio, started
from tools.bench.gradients import WORKER, Settings
from tools.bench.gradients_report import Row, buckets_text, least_seconds, row_of
from tools.bench.hosts_bed import NUM_HOSTS, TwoHosts
from tools.bench.hosts_sides import (
    RATE_OF_START,
    HostsSide,
    idle_bytes_per_second,
    in_megabytes,
    utilisations,
)
from tools.bench.link_rate import bits_per_second
from tools.bench.published_models import PUBLISHED_MODELS, PublishedModel
from tools.bench.report import Arguments, Figure, Report

MODELS = tuple(PUBLISHED_MODELS)
# What a worker sends of 2 (N - 1) / N times the model, by the plan and on the link.
SLACK = 0.1
_BACKENDS = ("direct", "ring")
# Gradients of a gigabyte keep a slow link busy, and heartbeats waiting, for minutes.
_PATIENCE_SECONDS = 600.0


def run(args: Arguments) -> None:
    """Measure every number of workers on every rate."""
    models = [PUBLISHED_MODELS[name]() for name in args.models]
    setting = {
        "benchmark": "gradients of published models, reduced in the buckets of a "
        "training step, 2 hosts, network namespaces joined by a veth pair with tbf in "
        "each direction, 1 thread each",
        "models": "; ".join(map(str, models)),
        "rates": ", ".join(args.rates),
        "workers per host": ", ".join(map(str, args.workers_per_host)),
        "blocks": args.blocks,
    }
    report = Report(args, setting)
    for workers_per_host in args.workers_per_host:
        settings = _settings(args, models, workers_per_host)
        with TwoHosts(RATE_OF_START) as bed:
            setup = _setup(settings)
            side = HostsSide(bed, "tfdp", WORKER, setup, workers_per_host)
            with started(side):
                for rate in args.rates:
                    bed.set_rate(rate)
                    for model in models:
                        table = Table(bed, side, settings, model)
                        table.measure()
                        table.report(report)
    report.finish()


def _settings(
    args: Arguments, models: list[PublishedModel], workers_per_host: int
) -> Settings:
    """The routes of so many workers: hierarchical only where a host has several."""
    levels = ("hierarchical",) if workers_per_host > 1 else ()
    return Settings(
        models=models,
        algorithms=(*FLAT_ALGORITHMS, *levels),
        backends=_BACKENDS,
        blocks=args.blocks,
        num_workers=NUM_HOSTS * workers_per_host,
        node_size=workers_per_host,
    )


def _setup(settings: Settings) -> dict[str, Any]:
    """Setup of the workers, who are more patient than the default."""
    patient = {"timeout_seconds": _PATIENCE_SECONDS}
    routes = {name: {**route, **patient} for name, route in settings.routes.items()}
    return {**settings.worker_setup, "routes": routes}


class Table:
    """The figures of one model between so many workers on one rate.

    Args:
        bed: `TwoHosts`, set to the rate.
        side: `HostsSide` of the workers.
        settings: `Settings`.
        model: `PublishedModel`.
    """

    def __init__(
        self, bed: TwoHosts, side: HostsSide, settings: Settings, model: PublishedModel
    ) -> None:
        self._bed, self._side, self._model = bed, side, model
        self._settings = settings
        self._names = {route: f"{model.name}/{route}" for route in settings.routes}
        self._topology = local_topology(
            settings.num_workers, None, node_size=settings.node_size
        )
        per_host = self._topology.replicas_per_node
        self._title = f"{NUM_HOSTS} x {per_host}, {bed.rate}, {model.name}"
        self._times: dict[str, list[float]] = {}

    def measure(self) -> None:
        """Run the blocks of all algorithms and backends in turn."""
        variants = [(self._side, name) for name in self._names.values()]
        blocks = self._settings.blocks
        self._times = alternate(variants, blocks=blocks, steps=1, warm_up=1)
        self._idle = idle_bytes_per_second(self._bed)

    def report(self, report: Report) -> None:
        """Print the table and the figures."""
        print(f"\n{self._title}; idle: {self._idle:.0f} bytes/s", flush=True)
        report.add_times({f"{self._title}: {k}": v for k, v in self._times.items()})
        for route in self._names:
            self._report_route(report, route)

    def _report_route(self, report: Report, route: str) -> None:
        name = self._names[route]
        seconds = self._seconds(route)
        sent = self._side.bytes_per_step(name, self._settings.blocks, self._idle)
        counts = self._side.run(f"count {name}", 1)
        row = row_of(
            self._model, route, self._topology, seconds, counts, self._bed.rate
        )
        title = f"{self._title}, {row.algorithm}, {row.backend}"
        report.keep("bucket_bytes", title, row.bucket_bytes)
        report.add(_payload(title, row))
        report.add(self._traffic(title, row, sent))
        bit_rate = bits_per_second(self._bed.rate)
        used = statistics.median(utilisations(sent, seconds, bit_rate))
        least = least_seconds(self._model.num_bytes, NUM_HOSTS, self._bed.rate)
        report.add(
            Figure(
                f"{title}: throughput as a share of the link's bound",
                paired_ratio([least] * len(seconds), seconds),
                note=f"busbw {row.busbw_gb_per_second:.4f} GB/s; utilisation of the "
                f"link {used:.3f}",
            )
        )
        first = next(iter(self._names))
        if route != first:
            ratio = paired_ratio(self._seconds(first), seconds)
            rival = first.replace("/", ", ")
            report.add(Figure(f"{title}: speed relative to {rival}", ratio))

    def _seconds(self, route: str) -> list[float]:
        return self._times[f"{self._side.name}/{self._names[route]}"]

    def _traffic(self, title: str, row: Row, sent: list[float]) -> Figure:
        """What the link carries; a ring passes on what one worker sends."""
        ideal = bus_factor("all_reduce", self._topology.num_replicas)
        is_ring = row.algorithm == "ring"
        return Figure(
            f"{title}: bytes over the link per direction, as a share of the model",
            round(statistics.median(sent) / row.model_bytes, 3),
            at_least=round((1 - SLACK) * ideal, 3) if is_ring else None,
            at_most=round((1 + SLACK) * ideal, 3) if is_ring else None,
            note=f"{in_megabytes(sent)} MB",
        )


def _payload(title: str, row: Row) -> Figure:
    return Figure(
        f"{title}: payload of a worker by the plan / (2 (N - 1) / N times the model)",
        round(row.payload_ratio, 3),
        at_least=1 - SLACK,
        at_most=1 + SLACK,
        note=f"{row.payload_bytes / 2**20:.2f} MB in "
        f"{buckets_text(row.bucket_bytes)}; {row.num_wrong} elements wrong",
    )
