"""Worker of `models`: gradients that are reduced, timed and counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import ProcessGroup
from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.topology import Topology
from tfdp.launch.bench.channel import OnDemand, Variant, timed, work
from tfdp.launch.bench.training import make_strategy
from tfdp.training.reduction.communication_plan import CommunicationPlan
from tfdp.training.strategy.strategy import auto_strategy
from tools.bench.barrier import barrier
from tools.bench.meters import tcp_bytes_sent
from tools.bench.published_models import Shape

COUNT = "count "
# Until the other end has confirmed what has arrived.
_CONFIRMED_SECONDS = 0.1
Gradients = list[list[tf.Variable]]


class GradientVariants:
    """Reductions of a model's gradients by name, made when they are first run.

    The variant `resnet50/ring/direct` takes a number of steps and returns the seconds
    of one; `count resnet50/ring/direct` returns what one step sends, in which buckets,
    and how many elements of its sums are wrong here.

    Args:
        setup: Dict as for `make_strategy`, with `routes`, the `CommunicationOptions`
            of each, and `models`, of each the shapes of its variables.
        check: Callable that is given the `Topology` of the replicas before anything is
            made of a second route, and raises if it does not fit. Defaults to
            nothing.
    """

    def __init__(
        self,
        setup: Mapping[str, Any],
        check: Callable[[Topology], None] = lambda topology: None,
    ) -> None:
        self._models = setup["models"]
        self._strategies: dict[str, Any] = {}
        # TensorFlow's server has to start before TensorFlow itself, so the strategies
        # that use it, those of `backend="ring"`, are created first.
        routes = setup["routes"].items()
        for route, options in sorted(routes, key=lambda r: r[1]["backend"] != "ring"):
            if self._strategies:
                communication = CommunicationOptions(**options)
                made = auto_strategy(communication=communication)
            else:  # the process has no server yet, and its own number of threads
                made = make_strategy({**setup, "communication": options})
                check(made.extended.algorithm_selector.topology)
            self._strategies[route] = made
        self._meet = barrier(self.strategy)
        # All routes of a model take turns, and share its gradients.
        self._gradients = OnDemand(self._make_gradients, lambda model: model)
        self._cases = OnDemand(self._make, lambda name: name.partition("/")[0])

    @property
    def strategy(self) -> Any:
        """The strategy of the first route."""
        return next(iter(self._strategies.values()))

    def __getitem__(self, name: str) -> Variant:
        case = self._cases[name.removeprefix(COUNT)]
        return case.counts if name.startswith(COUNT) else case.seconds

    def _make(self, name: str) -> GradientReduction:
        model, _, route = name.partition("/")
        gradients = self._gradients[model]
        return GradientReduction(self._strategies[route], gradients, self._meet)

    def _make_gradients(self, model: str) -> Gradients:
        return make_gradients(self.strategy.extended.group, self._models[model])


def make_gradients(group: ProcessGroup, shapes: Mapping[str, Shape]) -> Gradients:
    """Gradients of the local replicas, each full of the replica's place, from one on.

    Args:
        group: `ProcessGroup` of the replicas.
        shapes: Mapping from the names of variables to their shapes, in the order of
            the forward pass.

    Returns:
        List of lists of float32 variables, one for each local replica.
    """
    gradients = []
    for replica, device in enumerate(group.devices):
        value = float(group.position(replica) + 1)
        with tf.device(device):
            gradients.append(
                [
                    tf.Variable(tf.fill(shape, value), name=name, trainable=False)
                    for name, shape in shapes.items()
                ]
            )
    return gradients


class GradientReduction:
    """Gradients of one model, reduced by one strategy.

    Args:
        strategy: A strategy of tfdp.
        gradients: List of lists of variables, of `make_gradients`.
        meet: Callable that returns a tensor when all workers have called it.
    """

    def __init__(
        self, strategy: Any, gradients: Gradients, meet: Callable[[], Any]
    ) -> None:
        self._extended = strategy.extended
        self._gradients = gradients
        self._meet = meet
        # One element of each sum tells that it is there.
        step = reduction_step(strategy, gradients, lambda total: total[0])
        self.seconds = timed(step, self._meet)
        self._num_wrong = reduction_step(strategy, gradients, self._count_wrong)

    def counts(self, steps: int) -> dict[str, Any]:
        """What one step sends, and the wrong elements of its sums."""
        del steps
        before = self._bytes_sent()
        wrong = self._num_wrong().numpy()
        sent = self._bytes_sent() - before
        plan = self._plan()
        return {
            "bucket_bytes": [bucket.num_bytes for bucket in plan.buckets],
            "payload_bytes": plan.wire_bytes,
            "tcp_bytes": sent,
            "num_wrong": int(wrong.sum()),
        }

    def _bytes_sent(self) -> int:
        self._meet().numpy()
        time.sleep(_CONFIRMED_SECONDS)
        return tcp_bytes_sent()

    def _count_wrong(self, total: tf.Tensor) -> tf.Tensor:
        num_replicas = self._extended.group.size
        wanted = num_replicas * (num_replicas + 1) / 2  # exact in float32
        return tf.math.count_nonzero(total != wanted, dtype=tf.int32)

    def _plan(self) -> CommunicationPlan:
        reducer = self._extended.reducer
        plan = reducer.plans.plan_of(self._gradients[0])
        return CommunicationPlan(
            buckets=plan.buckets,
            sparse=(),
            num_replicas=self._extended.group.size,
            backend=self._extended.group.backend,
            routes=reducer.routes_of(plan),
            node_size=self._extended.algorithm_selector.topology.replicas_per_node,
            traced=True,
        )


def reduction_step(
    strategy: Any, gradients: Gradients, read: Callable[[tf.Tensor], tf.Tensor]
) -> Callable[[], tf.Tensor]:
    """A traced reduction of gradients, in the buckets in which training reduces them.

    They are ready in the order of the backward pass, the last variable's first.

    Args:
        strategy: A strategy of tfdp.
        gradients: List of lists of variables, one for each local replica.
        read: Callable from the sum of a bucket, `[bucket_size]`, to a scalar. A sum is
            dropped when it has been read: those of all buckets would fill the memory.

    Returns:
        Callable that returns what was read, of each replica and bucket, in a row.
    """
    extended = strategy.extended

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        found = []
        for replica, device in enumerate(extended.group.devices):
            own = gradients[replica]
            with tf.device(device):
                # The order of the graph is that in which gradients are ready.
                ready = [variable.read_value() for variable in reversed(own)]
                reduced = extended.reducer.all_reduce(ready[::-1], own, replica)
                found += [read(total) for total in reduced.flats]
        return tf.stack(found)  # [num_local_replicas * num_buckets]

    # Or TensorFlow would take the functions of all routes for one, and warn of it.
    return step.get_concrete_function()


make_variants = GradientVariants

if __name__ == "__main__":
    work(make_variants)
