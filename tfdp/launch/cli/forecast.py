"""Output of `tfdp plan`: the forecast, and its assumptions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from tfdp.ground.links import Link, Links
from tfdp.ground.plans.buckets import Bucket
from tfdp.ground.plans.gathers import StepGathers
from tfdp.ground.plans.memory import ReplicaMemory
from tfdp.ground.plans.prediction import BucketPrediction, StepPrediction
from tfdp.ground.plans.topology import Topology
from tfdp.ground.text import pluralize
from tfdp.launch.cli.screen import new_console

if TYPE_CHECKING:  # `algorithm_choice` imports TensorFlow, which takes seconds
    from tfdp.training.compression.algorithm_choice import AlgorithmChoice

# Attributes of `ReplicaMemory`, which are also the headings of the memory table, so
# both must be changed together.
_SIZES = ("parameters", "gradients", "accumulators", "slots", "gathered", "total")


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Prediction of a training step on a cluster, and its inputs.

    Args:
        model: String, path of the model.
        buckets: Tuple of `Bucket`, the gradient buckets.
        sparse: Tuple of strings, names of the variables with sparse gradients.
        topology: `Topology` of the cluster.
        links: `Links` of the cluster.
        backend: String, the communication backend, which has default links.
        is_given: Bool, whether the user has given both latency and bandwidth.
        compression: String, value of the option `--compression`.
        routes: Tuple of `AlgorithmChoice`, the choice for each bucket.
        ring: Tuple of `AlgorithmChoice`, the flat ring for each bucket.
        warned: Tuple of strings, warnings about options without effect.
        compute_seconds: Float, duration of a step on one replica, or `None` if it is
            not known.
        overlap: Float, last fraction of a step's compute during which gradients become
            ready.
        optimizer: String, name of the optimizer whose slots are counted. Defaults to
            `""`.
        memory: Tuple of pairs of a kind of sharding and its `ReplicaMemory`. Defaults
            to `()`.
        gathers: `StepGathers`, the all-gathers of the model's own layers. Defaults to
            none.
    """

    model: str
    buckets: tuple[Bucket, ...]
    sparse: tuple[str, ...]
    topology: Topology
    links: Links
    backend: str
    is_given: bool
    compression: str
    routes: tuple[AlgorithmChoice, ...]
    ring: tuple[AlgorithmChoice, ...]
    warned: tuple[str, ...]
    compute_seconds: float | None
    overlap: float
    optimizer: str = ""
    memory: tuple[tuple[str, ReplicaMemory], ...] = ()
    gathers: StepGathers = dataclasses.field(default_factory=StepGathers)

    @property
    def num_bytes(self) -> int:
        """Int, size of all dense gradients of a step in bytes."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def communication_seconds(self) -> float:
        """Float, predicted seconds of all collectives of a step."""
        return sum(route.seconds for route in self.routes)

    @property
    def ring_seconds(self) -> float:
        """Float, predicted seconds of all collectives by the flat ring alone."""
        return sum(route.seconds for route in self.ring)

    @property
    def step(self) -> StepPrediction | None:
        """`StepPrediction`, or `None` if the duration of the compute is not known."""
        if self.compute_seconds is None:
            return None
        predicted = tuple(
            BucketPrediction(bucket.num_bytes, route.seconds)
            for bucket, route in zip(self.buckets, self.routes, strict=True)
        )
        return StepPrediction(predicted, self.compute_seconds, self.overlap)


def show(forecast: Forecast, *, as_json: bool) -> None:
    """Print a forecast.

    Args:
        forecast: `Forecast` to print.
        as_json: Bool, whether to print JSON instead of a table.
    """
    if as_json:
        click.echo(json.dumps(_to_dict(forecast), indent=2))
        return
    console = new_console()
    console.print(_headline(forecast))
    console.print(_table(forecast))
    for line in _totals(forecast):
        console.print(line)
    if forecast.memory:
        console.print(_memory_table(forecast))
    if forecast.gathers.gathers:
        console.print("\nGathered in a step", style="bold")
        console.print(str(forecast.gathers))
    console.print("\nAssumed", style="bold")
    for sentence in _assumptions(forecast):
        console.print(f"  - {sentence}")


def _headline(forecast: Forecast) -> str:
    """Return the first line: the model, its gradients and the cluster."""
    topology = forecast.topology
    return (
        f"{forecast.model}: {forecast.num_bytes:,} bytes of gradients in "
        f"{pluralize(len(forecast.buckets), 'bucket')}, on "
        f"{pluralize(topology.num_replicas, 'replica')} "
        f"({pluralize(topology.num_nodes, 'node')} of {topology.replicas_per_node})"
    )


def _table(forecast: Forecast) -> Table:
    """Return the table of buckets, with predicted milliseconds."""
    table = Table()
    for name in ("bucket", "variables", "MB", "algorithm", "ms", "ring, ms"):
        is_number = name != "algorithm"
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=is_number
        )
    rows = zip(forecast.buckets, forecast.routes, forecast.ring, strict=True)
    for order, (bucket, route, ring) in enumerate(rows):
        table.add_row(
            str(order),
            str(len(bucket.entries)),
            f"{bucket.num_bytes / 2**20:.2f}",
            str(route),
            f"{1e3 * route.seconds:.3f}",
            f"{1e3 * ring.seconds:.3f}",
        )
    return table


def _memory_table(forecast: Forecast) -> Table:
    """Return the table of memory in MB, with a row for each kind of sharding."""
    table = Table("sharding", title="memory on the replica that holds most, MB")
    for name in _SIZES:
        table.add_column(name, justify="right")
    for title, memory in forecast.memory:
        sizes = [f"{getattr(memory, name) / 2**20:,.2f}" for name in _SIZES]
        table.add_row(title, *sizes)
    return table


def _totals(forecast: Forecast) -> Iterator[str]:
    """Yield the lines below the table: communication, step and efficiency."""
    yield (
        f"communication       {1e3 * forecast.communication_seconds:.2f} ms a step; "
        f"by the flat ring alone {1e3 * forecast.ring_seconds:.2f} ms"
    )
    step = forecast.step
    if step is None:
        yield "scaling efficiency  unknown: give the time of a step by --step-ms"
        return
    yield f"not hidden          {1e3 * step.exposed_seconds:.2f} ms"
    yield (
        f"step                {1e3 * step.step_seconds:.2f} ms; on one replica "
        f"{1e3 * step.compute_seconds:.2f} ms"
    )
    yield f"scaling efficiency  {100 * step.efficiency:.1f} %"


def _assumptions(forecast: Forecast) -> Iterator[str]:
    """Yield the assumptions of a forecast as sentences."""
    yield from _link_assumptions(forecast)
    topology = forecast.topology
    yield (
        "All nodes are alike, no replica is late, nothing else uses the network, and "
        "the switches carry all links at full speed."
    )
    lasting = "lasts as long as its slowest message"
    if forecast.links.is_inside_shared:
        lasting = (
            "takes its messages inside a node one after the other, as they share its "
            "cores, and then those across"
        )
    yield (
        f"Each exchange of an algorithm {lasting}; ranks are dense on nodes; adding "
        "up, copying and casting cost nothing."
    )
    yield "Buckets are those of tfdp, and are reduced one after the other."
    yield from forecast.warned
    is_flat = topology.replicas_per_node == 1
    if is_flat and any(r.algorithm.is_hierarchical for r in forecast.routes):
        yield "There is one level only: hierarchical works as a flat algorithm."
    if forecast.step is not None:
        yield (
            f"Gradients become ready over the last {100 * forecast.overlap:.0f} % of "
            "the step's compute, evenly by bytes, and communication does not slow "
            "the compute down."
        )
        yield (
            "Efficiency is the time of one replica over the time of all, each with "
            "the same batch of its own (weak scaling); reading data is part of the "
            "compute."
        )
    if forecast.compression != "none":
        is_int8 = forecast.compression.endswith("int8")
        bits = "8 bits, and a scale for each block," if is_int8 else "16 bits"
        yield (
            f"Compression is {forecast.compression}: {bits} an element on "
            "the wire; a flat algorithm compresses all or nothing, and a bucket that "
            "would gain less than a tenth of its time travels as it is."
        )
    if forecast.memory:
        yield (
            "Memory is that of the parameters, trained or frozen, and of "
            f"{forecast.optimizer}'s slots, with reduced gradients; activations, what "
            "the model keeps besides, and TensorFlow itself come on top."
        )
    if forecast.sparse:
        names = ", ".join(forecast.sparse)
        yield f"Rows of sparse gradients are left out: {names}."


def _link_assumptions(forecast: Forecast) -> Iterator[str]:
    """Yield the assumptions about the latency and bandwidth of links, as sentences."""
    links, topology = forecast.links, forecast.topology
    each = topology.replicas_per_node
    shared = f", which its {each:,} replicas share" if each > 1 else ""
    source = f"what was not given is a default for {forecast.backend}, not measured"
    if forecast.is_given:
        source = "as given"
    yield (
        f"A message inside a node takes {_describe(links.inside)}; one across nodes "
        f"{_describe(links.across)} of the one link of a node{shared} ({source})."
    )
    sharing = "share one" if links.is_inside_shared else "each have their own"
    yield (
        f"With {forecast.backend}, starting an operation takes "
        f"{1e6 * links.operation_seconds:g} us, and links inside a node: its replicas "
        f"{sharing}."
    )


def _describe(link: Link) -> str:
    """Describe a link's message time, such as "50 us and its bytes at 10 GB/s"."""
    microseconds = f"{1e6 * link.alpha_seconds:g} us"
    if not link.seconds_per_byte:
        return f"{microseconds} whatever its size"
    return f"{microseconds} and its bytes at {1e-9 / link.seconds_per_byte:g} GB/s"


def _to_dict(forecast: Forecast) -> dict[str, Any]:
    """Return a forecast as JSON values: predictions, buckets and assumptions."""
    rows = zip(forecast.buckets, forecast.routes, forecast.ring, strict=True)
    return {
        **_attributes(forecast, "model compression num_bytes communication_seconds"),
        **_attributes(forecast, "ring_seconds compute_seconds optimizer"),
        **_attributes(forecast.topology, "num_nodes replicas_per_node num_replicas"),
        **_attributes(forecast.step, "overlap exposed_seconds step_seconds efficiency"),
        "links": dataclasses.asdict(forecast.links),
        "buckets": [
            {
                "num_bytes": bucket.num_bytes,
                "dtype": bucket.dtype,
                "variables": [entry.name for entry in bucket.entries],
                "algorithm": str(route.algorithm),
                "inner_wire": route.wire_formats[0] or bucket.dtype,
                "outer_wire": route.wire_formats[1] or bucket.dtype,
                "seconds": route.seconds,
                "ring_seconds": ring.seconds,
            }
            for bucket, route, ring in rows
        ],
        "sparse": list(forecast.sparse),
        "memory": {
            title: dataclasses.asdict(memory) for title, memory in forecast.memory
        },
        "gathers": [dataclasses.asdict(g) for g in forecast.gathers.gathers],
        "assumptions": list(_assumptions(forecast)),
    }


def _attributes(source: object, names: str) -> dict[str, Any]:
    """Return the named attributes of `source` as a dict, all `None` if it is `None`.

    Args:
        source: Any object, or `None`.
        names: String, names of the attributes, separated by spaces.
    """
    return {
        name: None if source is None else getattr(source, name)
        for name in names.split()
    }
