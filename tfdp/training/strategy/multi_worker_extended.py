"""Extended class of the strategy over several workers, whose cluster may change."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import tensorflow as tf

from tfdp.communication.cluster.devices import resolve_devices
from tfdp.communication.collectives import Member, align_group_keys
from tfdp.communication.coordination.checks import check_same_setup, setup_facts
from tfdp.communication.coordination.join import (
    Worker,
    join_next_cluster,
    join_running_job,
)
from tfdp.communication.coordination.progress import progress
from tfdp.communication.coordination.survivors import find_survivors
from tfdp.communication.coordination.tensorflow_server import start_server
from tfdp.communication.coordination.watch import (
    ClusterChanges,
    Watchdog,
    WorkerLost,
    WorkersJoin,
    watch,
)
from tfdp.communication.coordination.worker_group import (
    WorkerGroup,
    forget_groups,
    remember_group,
)
from tfdp.communication.store import own_version
from tfdp.ground._compat import runtime, tf_distribute
from tfdp.ground.options import CommunicationOptions
from tfdp.training.data.load_balancer import LoadBalancer
from tfdp.training.replicas.synchronized_scope import NewVariables, synchronize_in_step
from tfdp.training.replicas.variables import MirroredVariable
from tfdp.training.strategy.extended import ReplicaExtended
from tfdp.training.strategy.transports import close_all, watch_transports


class MultiWorkerReplicaExtended(ReplicaExtended, tf_distribute.MultiWorkerExtended):
    """`StrategyExtended` of `MultiWorkerMirroredStrategy`, for all workers' replicas.

    Args:
        container_strategy: The strategy of this extended class.
        worker: `Worker`, this process in its cluster.
        options: `CommunicationOptions`.
    """

    def __init__(
        self, container_strategy: Any, worker: Worker, options: CommunicationOptions
    ) -> None:
        self.options = options
        self.new_variables = NewVariables()
        # Facts that must be the same on all workers. They are kept, because workers
        # that join later are compared with them, too.
        self.facts: dict[str, str] = {"version of tfdp": own_version()}
        self._enter_cluster(worker)
        super().__init__(
            container_strategy,
            cluster_resolver=worker.resolver,
            communication_options=tf_distribute.StockOptions(),
        )
        self._connect()

    def _enter_cluster(self, worker: Worker) -> None:
        """Create the group of the cluster's workers, and watch the other workers."""
        self.worker = worker
        self._watchdog: Watchdog | None = None
        membership = worker.membership
        if membership is not None:
            membership.facts = self.facts
        self.worker_group = remember_group(
            WorkerGroup(
                worker.rank,
                worker.num_workers,
                worker.timeout_seconds,
                None if membership is None else membership.store,
            )
        )
        if membership is not None:
            self._watchdog = watch(
                self.worker_group, membership, worker.timeout_seconds
            )
            watch_transports(self._watchdog)
            self._watchdog.outlives_losses = worker.min_workers is not None
            start_server(
                membership.cluster,
                self.worker_group,
                self.options,
                may_change=worker.min_workers is not None,
            )

    def _connect(self) -> None:
        """Compare the workers' set-up, and connect their replicas."""
        worker = self.worker
        # Users' functions that are traced for these workers must not run for others. So
        # they assert this variable, which becomes false when the workers change.
        self._is_current = runtime.plain_variable(True, tf.bool, "CPU:0")
        self.add_facts(
            setup_facts(self.worker_devices, self.options, rebalances=worker.rebalances)
        )
        all_devices = check_same_setup(
            self.worker_group, self.worker_devices, self.facts
        )
        if worker.rebalances:
            self.balance = LoadBalancer(worker.num_workers, len(self.worker_devices))
        align_group_keys(functools.partial(self.worker_group.all_gather, "group keys"))
        hosts = worker.cluster.hosts if worker.cluster else ["localhost"]
        self._set_up_communication(worker.rank, hosts, all_devices)

    def add_facts(self, facts: dict[str, str]) -> None:
        """Add facts, such as versions, that must be equal on all workers.

        They must be equal on workers that join later, too, which are compared with
        them.

        Args:
            facts: Dict from the name of a fact, for messages, to its value.
        """
        # A new dict is created, since another thread may read the current one.
        self.facts = self.facts | facts
        if self.worker.membership is not None:
            self.worker.membership.facts = self.facts

    def _prepare_for_worker_loss(self, name: str) -> None:
        """Prepare a transport for the loss of a worker, if there are several workers.

        TensorFlow's collectives may wait for a lost worker indefinitely, so the
        watchdog is set to abort them, also those that connect the first group.

        Args:
            name: String, name of the `Transport`.

        Raises:
            ValueError: If training with MPI is to continue after a loss.
        """
        if self.worker.membership is None or self.worker_group.num_workers == 1:
            return
        if name == "mpi" and self.continues_after_loss:
            raise ValueError(
                '`on_loss="continue"` is for `backend="direct"`: MPI ends all '
                'processes of a job with one of them. Use `on_loss="stop"`.'
            )
        if name not in ("direct", "mpi"):
            assert self._watchdog is not None
            self._watchdog.closers.append(runtime.abort_collectives)

    @property
    def generation(self) -> int:
        """Int, number of earlier clusters of the job: 0 in the first one."""
        membership = self.worker.membership
        return 0 if membership is None else membership.generation

    @property
    def continues_after_loss(self) -> bool:
        """Bool, whether training continues after the loss of workers."""
        return self.worker.min_workers is not None

    def applicants(self) -> list[str]:
        """Return the addresses of the processes that apply to join the job."""
        membership = self.worker.membership
        return [] if membership is None else membership.applicants()

    @property
    def is_applicant(self) -> bool:
        """Bool, whether this process is alone until it joins a running job in `fit`."""
        return self.worker.job_to_join is not None

    def change_cluster(self, change: ClusterChanges) -> None:
        """Join the next cluster, after workers were lost or have applied to join.

        Variables keep their values, which may differ between workers. Functions that
        were traced for the former cluster must not run any more.

        Args:
            change: `ClusterChanges`, the reason.

        Raises:
            RuntimeError: If the remaining workers may not continue.
            TimeoutError: If another worker does not join in time.
        """
        if self.is_applicant:
            self.worker = join_running_job(
                self.worker, self.facts, self.worker.timeout_seconds
            )
        else:
            self.worker = self._next_worker(self.worker, change)
        while self.worker.membership is not None and self.worker.membership.absent:
            # Some workers were lost while the cluster was formed, so the remaining ones
            # form another cluster.
            self.worker = self._next_worker(self.worker, ClusterChanges())
        self._is_current.assign(False)
        tf_distribute.forget_functions_of_replicas(self._container_strategy())
        self.new_variables = NewVariables()
        progress.restart()
        forget_groups()
        self._enter_cluster(self.worker)
        self._initialize_strategy(self.worker.resolver, devices=None)
        self._connect()

    def _next_worker(self, worker: Worker, change: ClusterChanges) -> Worker:
        """Agree on the next cluster and join it; return this process as its `Worker`.

        Args:
            worker: `Worker`, this process in the former cluster.
            change: `ClusterChanges`, the reason.
        """
        assert worker.membership is not None
        close_all()
        lost = [change.rank] if isinstance(change, WorkerLost) else []
        applicants = change.applicants if isinstance(change, WorkersJoin) else []
        survivors, applicants = find_survivors(
            worker.membership,
            lost,
            applicants,
            worker.min_workers or 1,
            worker.timeout_seconds,
        )
        return join_next_cluster(worker, survivors, applicants)

    def naming_lost_workers(self) -> contextlib.AbstractContextManager:
        """Return a context that names the lost worker in errors of TensorFlow."""
        if self._watchdog is None:
            return contextlib.nullcontext()
        return self._watchdog.translate_errors()

    def _initialize_strategy(self, cluster_resolver: Any, devices: Any) -> None:
        """Set up this worker's devices, but no server, unlike TensorFlow's method."""
        if self.worker.cluster is None:
            self._initialize_local(cluster_resolver, devices=devices)
            return
        task = runtime.own_task()
        local, _ = self._initialize_local_devices(cluster_resolver, task)
        host = runtime.canonical_device(f"{task}/device:CPU:0")
        worker = self.worker
        tf_distribute.initialize_worker(
            self, cluster_resolver, local, host, worker.rank, worker.num_workers
        )

    def _initialize_local_devices(
        self, cluster_resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        """Return the worker's GPUs or logical CPUs; the stock method has one CPU.

        Args:
            cluster_resolver: Not used.
            worker_device: String, the prefix of the devices' names, this worker's task.

        Returns:
            Tuple of the tuple of the devices' full names, and their type, `"GPU"` or
            `"CPU"`.
        """
        del cluster_resolver
        devices = resolve_devices(self.worker.devices)
        full = tuple(f"{worker_device}/device:{device}" for device in devices)
        return full, runtime.device_type(full[0])

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any
    ) -> Any:
        """Return a variable's initial value, or a callable that returns it.

        The stock method broadcasts it from the first worker. Here, in eager mode, a
        single broadcast covers all new variables later. Variables that a `tf.function`
        creates are initialized after tracing: the callable broadcasts the value.
        """
        initial_value = tf_distribute.stock_initial_value(
            self, replica_id, device, primary_var, **kwargs
        )
        if tf.executing_eagerly() or self.worker.num_workers == 1 or replica_id:
            return initial_value

        def first_workers_value() -> tf.Tensor:
            """Broadcast the first worker's initial value, and return it."""
            value = initial_value() if callable(initial_value) else initial_value
            own = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
            return Member(self.host_group, 0).broadcast(own)

        return first_workers_value

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        """Create a variable, and record it for the broadcast of initial values."""
        variable = super()._create_variable(next_creator, **kwargs)
        is_mirrored = isinstance(variable, MirroredVariable) and not variable.has_parts
        if tf.executing_eagerly() and is_mirrored:
            self.new_variables.add(variable)
            synchronize_in_step(self._container_strategy())
        return variable
