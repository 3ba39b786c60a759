"""Extended class of the strategy of one process, and what both strategies share.

Both extended classes override the methods by which tf.distribute reduces tensors and
creates and updates variables. All other methods are TensorFlow's, called stock methods
below.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import (
    LaunchOrder,
    ProcessGroup,
    device_positions,
    timing,
)
from tfdp.communication.coordination.checks import agreed_topology
from tfdp.communication.coordination.watch import start_data_watchdog
from tfdp.communication.coordination.worker_group import WorkerGroup, remember_group
from tfdp.ground._compat import tf_distribute
from tfdp.ground.base import loops
from tfdp.ground.base.step_context import ThreadStack
from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.topology import Topology
from tfdp.training.data.load_balancer import LoadBalancer
from tfdp.training.data.uneven_inputs import count_reads
from tfdp.training.parameters.conversion import deferred_parameter, is_deferred
from tfdp.training.reduction.algorithm_selector import AlgorithmSelector
from tfdp.training.reduction.reducer import Reducer
from tfdp.training.reduction.training_group import merging_group
from tfdp.training.replicas.state_merge import average_statistics, merge_states
from tfdp.training.replicas.variables import (
    MetricVariable,
    aggregation_of,
    class_mapping,
)
from tfdp.training.strategy.cross_device_ops import CrossDeviceOps
from tfdp.training.strategy.transports import (
    connect_workers,
    host_transport,
    new_transport,
)

# The number of keys that are reserved for TensorFlow's own collectives of a strategy,
# so that two strategies of a process do not share keys.
_STOCK_KEYS_PER_STRATEGY = 1000
_strategy_counter = itertools.count()
_OTHER_WORKERS = (
    "A `tf.function` around `strategy.run` was traced for the workers from before they "
    "changed. Create it anew after `tfdp.WorkersChanged`."
)


@dataclasses.dataclass
class _Statistics:
    """Moving statistics that replicas assign in a step, and the replicas' weights.

    Args:
        variables: Dict from the `id` of a variable to the mirrored variable.
        weights: Dict from the local index of a replica to a callable that returns its
            weight, a scalar tensor.
    """

    variables: dict[int, Any] = dataclasses.field(default_factory=dict)
    weights: dict[int, Callable[[], tf.Tensor]] = dataclasses.field(
        default_factory=dict
    )


# Replicas record here which moving statistics a step assigns, since those are averaged
# only at the end of the step, by `ReplicaExtended.step_scope`.
_statistics: ThreadStack[_Statistics] = ThreadStack("statistics")


class ReplicaExtended:
    """Mixin for `StrategyExtended` that runs the whole step in replica context.

    It is a base class of the extended classes for one worker and for several workers.
    With `_use_merge_call` false, TensorFlow and Keras run the optimizer in each replica
    instead of switching to cross-replica context. This allows updates inside
    conditionals, for accumulation and moving averages.
    """

    options: CommunicationOptions
    worker_group: WorkerGroup
    # Models whose backward pass XLA compiles, for the communication plan, which reports
    # it because gradients are then reduced after the whole backward pass.
    compiled_models: weakref.WeakSet[Any]
    # For each model and loop, the tensors that its step gathers, kept for reports of
    # the communication that they cost, see `tfdp.training.program.checks`.
    step_gathers: weakref.WeakKeyDictionary[Any, dict[str, Any]]
    # For each model, the states that the training step traced last may write: from the
    # `id` of a resource tensor to the tensor and the line that writes it.
    step_writes: weakref.WeakKeyDictionary[Any, dict[int, tuple[Any, str]]]
    # Names that the user's script gives to the number of replicas. By these names a
    # loss that is wrongly divided by the number is recognized, see
    # `tfdp.training.program.divisions`.
    replica_count_names: set[str]
    # True in a scope with `init="deferred"`: parameters are sharded when they are
    # created, because the model may be too large for one replica.
    defers_parameters = False
    # Number of nested scopes of the strategy that are entered. New variables are
    # broadcast only when the outermost scope is left.
    num_scopes = 0
    # `LoadBalancer` that divides rows by the workers' speed, so that no worker waits
    # for a slower one; `None` for equal rows.
    balance: LoadBalancer | None = None
    # A custom loop may run a step on a batch that it read before the workers changed,
    # which has the wrong rows. So this is the generation of the cluster that its last
    # batch was read for, or `None` before the first.
    read_generation: int | None = None
    # Called with each variable that a step of a custom training loop assigns, to check
    # that a `tfdp.ElasticState` has the variable; or `None`.
    on_assigned: Callable[[Any], None] | None = None
    _collective_keys: Any
    # Variable that is true until the workers change. If training continues after a
    # loss, functions assert it, because a trace for the former workers must not run.
    _is_current: Any

    def naming_lost_workers(self) -> contextlib.AbstractContextManager:
        """Return a context that names a lost worker in errors; here it does nothing."""
        return contextlib.nullcontext()

    def _use_merge_call(self) -> bool:
        """Return false, so that a whole step runs in replica context."""
        return False

    def _prepare_for_worker_loss(self, name: str) -> None:
        """Prepare the transport `name` for the loss of a worker; here do nothing."""
        del name

    def _set_up_communication(
        self, rank: int, hosts: Sequence[str], all_devices: Sequence[str]
    ) -> None:
        """Set up groups and reducers, and replace the stock cross-device operations.

        Args:
            rank: Int, the rank of this worker.
            hosts: Sequence of strings, the host of each worker.
            all_devices: Sequence of strings, the full device name of each replica.
        """
        devices = self.worker_devices  # type: ignore[attr-defined]
        first_rank = rank * len(devices)
        if self.options.timeout_seconds is not None:
            count_reads()
            if self.worker_group.num_workers == 1:
                start_data_watchdog(self.options.timeout_seconds)
        self.replica_count_names = set()
        self.step_gathers = weakref.WeakKeyDictionary()
        self.step_writes = weakref.WeakKeyDictionary()
        self.compiled_models = weakref.WeakSet()
        topology = agreed_topology(self.worker_group, hosts, len(devices), self.options)
        self.topology = topology
        positions = device_positions(all_devices)
        transport = new_transport(self.options, devices, self.worker_group, hosts[rank])
        self._prepare_for_worker_loss(transport.name)
        # Arrays that are sent apart from the steps, such as backups, need connections
        # of their own. The callable takes a new name for them, the same on all workers.
        self.connect_workers = functools.partial(
            connect_workers, transport, self.options, self.worker_group, hosts[rank]
        )
        order = LaunchOrder(devices, transport.num_channels)
        self.group = ProcessGroup(
            order,
            len(all_devices),
            transport,
            positions=positions[first_rank : first_rank + len(devices)],
            nodes=_nodes(topology, positions),
            workers=_worker_ranks(positions, len(devices)),
        )
        # Small tensors, such as metric states and statistics, are merged on each host
        # first. So the group for their collectives has one member for each worker.
        all_hosts = [_host(device) for device in all_devices[:: len(devices)]]
        places = device_positions(all_hosts)
        self.host_group = ProcessGroup(
            LaunchOrder([_host(devices[0])]),
            len(hosts),
            host_transport(transport),
            positions=[places[rank]],
            workers=_worker_ranks(places, 1),
        )
        self.algorithm_selector = AlgorithmSelector(
            self.options, topology, transport.name, warn=self.worker_group.is_chief
        )
        self.hosts = tuple(hosts)
        self.first_rank = first_rank
        self.num_local = len(devices)
        self.local_ranks = list(range(first_rank, first_rank + len(devices)))
        self.reducer = Reducer(
            self.group,
            first_rank,
            self.options,
            self.worker_group,
            self.algorithm_selector,
        )
        self._cross_device_ops = CrossDeviceOps(self.reducer, self._collective_keys)
        self._collective_ops = self._cross_device_ops
        self._host_cross_device_ops = CrossDeviceOps(
            Reducer(self.host_group, rank, self.options, self.worker_group),
            self._collective_keys,
        )

    @property
    def generation(self) -> int:
        """Int, number of earlier clusters of the job: here always 0."""
        return 0

    @property
    def continues_after_loss(self) -> bool:
        """Bool, whether training continues after a loss of workers: here false."""
        return False

    def assert_same_workers(self) -> list[Any]:
        """Add an assertion to the graph, which fails once the workers have changed.

        Without it, a user's `tf.function` would still run for the former workers.

        Returns:
            List of the assertion; empty in eager mode, in a loop of Keras, which drops
            its traced functions, or if training does not continue after losses.
        """
        is_in_graph = not tf.executing_eagerly()
        if not (is_in_graph and self.continues_after_loss) or loops.current():
            return []
        with tf.device(self._is_current.device):
            is_current = self._is_current.read_value()
            return [tf.debugging.Assert(is_current, [_OTHER_WORKERS])]

    def applicants(self) -> list[str]:
        """Return the addresses of processes that apply to join the job: here none."""
        return []

    @property
    def is_applicant(self) -> bool:
        """Bool, whether this process joins a running job in `fit`: here false."""
        return False

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        """Create a variable of tfdp's classes, or a sharded parameter.

        A parameter is sharded in a scope with `init="deferred"`.

        Returns:
            The new variable.
        """
        if is_deferred(self, kwargs):
            return deferred_parameter(self._container_strategy(), kwargs)  # type: ignore[attr-defined]
        kwargs["aggregation"] = aggregation_of(kwargs)
        mapping = class_mapping(kwargs)
        with tf_distribute.variable_classes(mapping):
            variable = super()._create_variable(next_creator, **kwargs)  # type: ignore[misc]
        self._register(variable)
        return variable

    def _register(self, variable: Any) -> None:
        """Record a variable, so that `variable_of` finds it by a resource handle."""
        known = vars(self).setdefault("_variables", weakref.WeakValueDictionary())
        for component in getattr(variable, "values", ()):
            known[id(component.handle)] = variable

    def record_assigned(self, variable: Any) -> None:
        """Call `on_assigned`, if set, with a variable that a custom loop assigns."""
        if self.on_assigned is not None and loops.current() is None:
            self.on_assigned(variable)

    def variable_of(self, handle: Any) -> Any:
        """Return the variable with a replica's component that has this resource handle.

        It is `None` if no existing variable has it.
        """
        variable = vars(self).get("_variables", {}).get(id(handle))
        if variable is None or all(c.handle is not handle for c in variable.values):
            return None
        return variable

    def _replica_ctx_all_reduce(
        self, reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
        """All-reduce a nest of tensors in replica context, without a merge call.

        Several eager local replicas use the stock method, which merges their calls.

        Returns:
            Nest like `value`, of reduced values.
        """
        context = tf.distribute.get_replica_context()
        one_local_replica = len(self.group.devices) == 1
        if tf.executing_eagerly() and not one_local_replica:
            # Eager replicas run one after another, and a collective would wait for a
            # replica that has not started. The stock method waits for all of them
            # and reduces in cross-replica context.
            return super(  # type: ignore[misc]
                tf_distribute.MirroredExtended, self
            )._replica_ctx_all_reduce(reduce_op, value, options)
        replica = tf_distribute.local_replica_id(context)
        return self.reducer.reduce(reduce_op, value, replica)

    def _reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: Any
    ) -> Any:
        """Reduce each value of a nest to `destinations`; return the nest of results.

        TensorFlow's method takes a single value.
        """
        reduce = super()._reduce_to  # type: ignore[misc]
        return tf.nest.map_structure(
            lambda part: reduce(reduce_op, part, destinations, options), value
        )

    def sum_over_replicas(self, values: list) -> list:
        """Return a list of the sums of values over all replicas, in replica context.

        Args:
            values: List of tensors and `tf.IndexedSlices`.
        """
        return self._replica_ctx_all_reduce(tf.distribute.ReduceOp.SUM, values)

    def _get_cross_device_ops(self, value: Any) -> Any:
        """Return the `CrossDeviceOps` that reduces a value over replicas or workers.

        A value with a component for each local replica is reduced over replicas, any
        other one over workers. An assertion that the workers have not changed is added
        to the graph.
        """
        self.assert_same_workers()
        # The class is checked, because the attribute `values` of a per-replica value is
        # also one of sparse tensors.
        is_per_replica = isinstance(value, tf.distribute.DistributedValues)
        num_local = len(value.values) if is_per_replica else 1
        if num_local == len(self.group.devices):
            return self._cross_device_ops
        return self._host_cross_device_ops

    @contextlib.contextmanager
    def step_scope(self) -> Iterator[None]:
        """Open a context for a step, after which its moving statistics are averaged."""
        statistics = _Statistics()
        with _statistics.pushed(statistics):
            yield
        weights = [weight() for _, weight in sorted(statistics.weights.items())]
        self.average(list(statistics.variables.values()), weights or None)

    def average(self, statistics: list, weights: list | None = None) -> None:
        """Set moving statistics to their means over replicas, in cross-replica context.

        Args:
            statistics: List of mirrored variables.
            weights: List of scalar tensors, one for each local replica, that sum to
                one over all replicas, or `None` if all are equal.
        """
        if statistics and self.group.size > 1:
            equal = [tf.constant(1.0 / self.group.size, tf.float64)] * self.num_local
            weights, add_up = weights or equal, None
            if (exchange := loops.exchange()) is not None:
                add_up = functools.partial(exchange.sum_by_share, tf.add_n(weights))
            with timing.labelled("statistics"):
                average_statistics(statistics, weights, self.host_group, add_up)

    def record_statistics(
        self,
        variables: Sequence[Any],
        replica: int = 0,
        weight: Callable[[], tf.Tensor] | None = None,
    ) -> None:
        """Record that a replica has assigned moving statistics.

        At the end of the step, `step_scope` averages them over all replicas. Outside of
        a step nothing is recorded.

        Args:
            variables: Sequence of mirrored variables.
            replica: Int, the local index of the replica. Defaults to 0.
            weight: Callable that returns a scalar tensor, the replica's fraction of all
                rows, in the graph of the whole step; or `None` if all replicas have
                the same weight. Defaults to `None`.
        """
        statistics = _statistics.innermost
        if statistics is not None:
            statistics.variables |= {id(variable): variable for variable in variables}
            if weight is not None:
                statistics.weights[replica] = weight

    def merge_metric_variables(self, variables: list[MetricVariable]) -> list:
        """Return a list of tensors, each variable's state merged over the replicas.

        In eager mode these are all replicas. In a graph, where groups of workers train
        independently, they are those of this worker's group.
        """
        locals_ = [[part.read_value() for part in v.values] for v in variables]
        kinds = [v.merge for v in variables]
        group = self.host_group
        if not tf.executing_eagerly():
            # Groups of workers may train independently of each other, so a traced step
            # merges only the metrics of its own group.
            group = merging_group(self._container_strategy())  # type: ignore[attr-defined]
        return merge_states(locals_, kinds, group)


class SingleWorkerReplicaExtended(ReplicaExtended, tf_distribute.MirroredExtended):
    """`StrategyExtended` of `MirroredStrategy`, for the replicas of one process.

    Args:
        container_strategy: The strategy of this extended class.
        devices: List of device strings.
        options: `CommunicationOptions`.
    """

    def __init__(
        self,
        container_strategy: Any,
        devices: list[str],
        options: CommunicationOptions,
    ) -> None:
        self.options = options
        self.worker_group = remember_group(WorkerGroup(rank=0, num_workers=1))
        with tf_distribute.without_tf_config():
            super().__init__(container_strategy, devices=devices)
        self._set_up_communication(0, ["localhost"], self.worker_devices)


def next_stock_key_base() -> int:
    """Return the first of TensorFlow's own group keys for a new strategy.

    Some stock collectives are still used. All stock strategies count keys from the same
    number, so the collectives of two strategies in a process would share keys.
    """
    return next(_strategy_counter) * _STOCK_KEYS_PER_STRATEGY


def _nodes(topology: Topology, positions: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return, for each node, the positions of its replicas in their `ProcessGroup`.

    Args:
        topology: `Topology`, which has the ranks of the replicas of each node.
        positions: Sequence of ints, the position of each replica, by rank.
    """
    return tuple(tuple(positions[rank] for rank in node) for node in topology.nodes)


def _worker_ranks(positions: Sequence[int], num_local: int) -> list[int]:
    """Return the rank of the worker at each position of a `ProcessGroup`.

    Args:
        positions: Sequence of ints, the position of each replica, by rank.
        num_local: Int, number of replicas of a worker.
    """
    ranks = sorted(range(len(positions)), key=positions.__getitem__)
    return [rank // num_local for rank in ranks]


def _host(device: str) -> str:
    """Return the name of the CPU of a device's worker.

    Args:
        device: String, a full name, such as `"/job:worker/task:1/device:GPU:0"`.
    """
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()
