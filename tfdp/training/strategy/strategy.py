"""The strategies: subclasses of tf.distribute's for exact training with Keras."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.cluster import Cluster, find_cluster, unconnected_processes
from tfdp.communication.cluster.cpu_kernels import warn_of_slow_kernels
from tfdp.communication.cluster.devices import (
    create_default_cpus,
    local_devices,
    resolve_devices,
)
from tfdp.communication.cluster.launchers import mpi_rank
from tfdp.communication.coordination.join import resolver_of_environment, start_worker
from tfdp.ground import user_code
from tfdp.ground._compat import patches, runtime, tf_distribute
from tfdp.ground.arguments import check_choice
from tfdp.ground.base import loops, program_trace, step_context
from tfdp.ground.base.feature import Feature, overriders
from tfdp.ground.options import CommunicationOptions
from tfdp.training.data import distribute
from tfdp.training.keras_hooks import install
from tfdp.training.reduction.communication_plan import (
    CommunicationPlan,
    communication_plan,
)
from tfdp.training.replicas import random_seed, synchronized_scope
from tfdp.training.strategy import replica_step
from tfdp.training.strategy.extended import (
    SingleWorkerReplicaExtended,
    next_stock_key_base,
)
from tfdp.training.strategy.multi_worker_extended import MultiWorkerReplicaExtended


class _Strategy:
    """Base of the two public strategies, with the methods that Keras and users call.

    It defines `scope`, `run`, `num_replicas_in_sync`,
    `experimental_distribute_dataset` and `communication_plan`.
    """

    extended: Any

    def scope(self, init: str | None = None) -> Any:
        """Return a context in which variables are created on every replica.

        Args:
            init: String, `"deferred"`: each trainable variable is sharded when it is
                created, for models too large for one replica; needs an optimizer with
                `sharding="parameters"`. Or `None`: each replica has all variables.
                Defaults to `None`.

        Returns:
            A context manager. Leaving it gives all workers the first worker's
            initial values.

        Raises:
            ValueError: If `init` is another value.
            RuntimeError: In a process that was forked after the strategy was created.

        Example:

        >>> import keras
        >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope(init="deferred"):
        ...     layer = keras.layers.Dense(3)
        ...     layer.build((None, 4))
        >>> [tuple(part.shape) for part in layer.kernel.value.values]
        [(6,), (6,)]
        >>> layer.kernel.numpy().shape
        (4, 3)
        """
        self.extended.worker_group.owner.check("`strategy.scope`")
        check_choice("init", init, (None, "deferred"))
        return synchronized_scope.SynchronizedScope(
            self,
            super().scope(),  # type: ignore[misc]
            defers=init is not None and self.num_replicas_in_sync > 1,
        )

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas, on all workers, whose gradients are added up.

        It is 1 while a step of Keras's loops runs or is traced, because the step is
        that of one device.
        """
        if program_trace.current() is not None:
            return 1
        reader = inspect.currentframe()
        if reader is not None and reader.f_back is not None:
            replica_step.record_replica_count_name(self, reader.f_back)
        return super().num_replicas_in_sync  # type: ignore[misc]

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Run a function on every replica, as `tf.distribute` defines it.

        Keras's loops call it too; it divides their steps among the replicas.

        Args:
            fn: Callable, run in each replica's context.
            args: Tuple, positional arguments; distributed values are split.
            kwargs: Dict or `None`, keyword arguments.
            options: `tf.distribute.RunOptions` or `None`.

        Returns:
            The results of `fn`, one value per replica.
        """
        self.extended.worker_group.owner.check("`strategy.run`")
        if loops.current() is None and self.extended.is_applicant:
            raise RuntimeError(
                "This worker is to join a running job, which it can only in `fit`, or "
                "by a `tfdp.ElasticState`: until then it does not train by itself. "
                "Start all workers again."
            )
        if loops.current() is None:
            # Keras's loops synchronize new variables when they begin. A custom loop has
            # no such point, so each call of `run` synchronizes them.
            synchronized_scope.synchronize_new_variables(self)
            # The assertion that the workers have not changed runs before `fn`.
            # Otherwise a collective of the former workers would fail first.
            fn = replica_step.run_after(self.extended.assert_same_workers(), fn)
        fn, args = replica_step.prepare_run(self, fn, args)
        with (
            synchronized_scope.synchronizing_step(self),
            self.extended.step_scope(),
            step_context.using(in_run=True),
        ):
            return super().run(fn, args, kwargs, options)  # type: ignore[misc]

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: Any = None
    ) -> Any:
        """Split every global batch of a dataset between the replicas.

        If workers have different numbers of batches, a custom loop continues until the
        last worker has no batch left, whatever `CommunicationOptions.uneven` is;
        workers without data get batches of zero rows.

        Args:
            dataset: `tf.data.Dataset`, batched by the global batch size, the
                same on every worker.
            options: `tf.distribute.InputOptions` or `None`.

        Returns:
            A `tf.distribute.DistributedDataset`.

        Raises:
            ValueError: If a batch is smaller than the number of replicas, or workers
                would shuffle differently.
        """
        return distribute.distribute(self, dataset, options, super())

    def communication_plan(self, model: Any) -> CommunicationPlan:
        """Return the plan of a model's gradient buckets.

        Args:
            model: A built Keras model.

        Returns:
            A `CommunicationPlan`; it prints as a table of the buckets.

        Raises:
            ValueError: If the model is not built.
        """
        return communication_plan(self, model)


class MirroredStrategy(_Strategy, tf.distribute.MirroredStrategy):
    """Strategy that trains on all devices of one machine.

    Args:
        devices: List of device strings or `None`, such as `["GPU:0", "GPU:1"]`.
            Defaults to `None`: all GPUs, or else all logical CPU devices.
        communication: `CommunicationOptions` or `None`, the defaults.

    Raises:
        ValueError: If a device does not exist or is listed twice.

    Example:

    >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    >>> strategy.num_replicas_in_sync
    2
    """

    @patches.filter_traceback
    def __init__(
        self,
        devices: Sequence[str] | None = None,
        *,
        communication: CommunicationOptions | None = None,
    ) -> None:
        options = _prepare_process(communication)
        self._collective_key_base = next_stock_key_base()
        extended = SingleWorkerReplicaExtended(
            self, devices=resolve_devices(devices), options=options
        )
        tf.distribute.Strategy.__init__(self, extended)
        _warn_of_slow_kernels(self)


class MultiWorkerMirroredStrategy(_Strategy, tf.distribute.MultiWorkerMirroredStrategy):
    """Strategy that trains on all devices of all workers of a cluster.

    With GPUs or `backend="ring"`, create it before any other use of TensorFlow.
    Without a cluster it trains on the devices of this machine.

    Args:
        cluster_resolver: A `tf.distribute.cluster_resolver.ClusterResolver` or
            `None`. Defaults to `None`: `TF_CONFIG`, Slurm, a cloud's job, or an MPI
            job.
        devices: List of local device strings or `None`. Defaults to `None`:
            all GPUs, or else all logical CPU devices of the worker.
        communication: `CommunicationOptions` or `None`, the defaults.

    Raises:
        ValueError: If `TF_CONFIG` is wrong, the port is taken, a device does
            not exist, or workers have different settings.
        TimeoutError: If a worker does not start within `timeout_seconds`.

    Example:

    >>> strategy = MultiWorkerMirroredStrategy()  # in the process of each worker
    >>> strategy.num_replicas_in_sync  # without a cluster: the devices of one machine
    2
    """

    @patches.filter_traceback
    def __init__(
        self,
        cluster_resolver: Any = None,
        *,
        devices: Sequence[str] | None = None,
        communication: CommunicationOptions | None = None,
    ) -> None:
        options = _prepare_process(communication)
        self._collective_key_base = next_stock_key_base()
        worker = start_worker(cluster_resolver, devices, options)
        if cluster_resolver is None:
            _warn_of_unconnected_processes(worker.cluster or find_cluster())
        for feature in overriders(Feature.on_strategy):
            # Rank 0 means the first worker of the job. A process that will join a
            # running job has rank 0 too while it is alone, and passes 1 instead.
            feature.on_strategy(worker.rank + (worker.job_to_join is not None))
        extended = MultiWorkerReplicaExtended(self, worker=worker, options=options)
        tf.distribute.Strategy.__init__(self, extended)
        random_seed.agree_on_seed(self)
        _warn_of_slow_kernels(self)


def _prepare_process(communication: Any) -> CommunicationOptions:
    """Install tfdp's hooks; return the options of a strategy, or the defaults.

    Raises:
        RuntimeError: In a process that was forked after TensorFlow had started.
        ValueError: If `communication` has another type.
    """
    user_code.check_process_of_tensorflow("A strategy")
    options = CommunicationOptions() if communication is None else communication
    if not isinstance(options, CommunicationOptions):
        raise ValueError(
            "`communication` must be a `tfdp.CommunicationOptions` or None. "
            f"Received: communication={communication!r}"
        )
    install.install()
    return options


def _warn_of_slow_kernels(strategy: Any) -> None:
    """Warn, on the first worker, if TensorFlow trains on CPUs without oneDNN's kernels.

    It does so only if gradients are slow for that reason.
    """
    device = strategy.extended.worker_devices[0]
    if strategy.extended.worker_group.is_chief and runtime.device_type(device) == "CPU":
        warn_of_slow_kernels()


def _warn_of_unconnected_processes(cluster: Cluster | None) -> None:
    """Warn if a launcher has started several processes and no cluster connects them."""
    apart = unconnected_processes() if cluster is None else None
    if apart:
        user_code.warn(
            f"{apart}, and no TF_CONFIG connects them: each trains a separate model. "
            f"{_remedy()}, or start the script with `tfdp run`."
        )


def _remedy() -> str:
    """Return what to do if a launcher's processes are not connected by a cluster.

    Returns:
        String, an instruction without its period, for a warning: to install mpi4py or
        set TF_CONFIG in an MPI job, and to set TF_CONFIG otherwise.
    """
    if mpi_rank() is not None:
        return (
            "Install mpi4py, with which tfdp finds the other processes (pip install "
            "tfdp[mpi]), or set TF_CONFIG before the strategy is created"
        )
    return "Set TF_CONFIG before the strategy is created (see docs/launching.md)"


@patches.filter_traceback
def auto_strategy(
    *, communication: CommunicationOptions | None = None
) -> MirroredStrategy | MultiWorkerMirroredStrategy:
    """Return the strategy that fits where the program runs.

    The strategy has all workers of a cluster, if there are several: workers in
    `TF_CONFIG`, tasks of a Slurm step, hosts of a SageMaker job, machines of a Vertex
    AI job, or processes of an MPI job with mpi4py. Otherwise it has all GPUs of the
    machine, or else its CPUs as several logical devices of one process, which is faster
    than several processes. On one machine without GPUs, a small dense model, whose step
    is mostly memory and communication, may be faster without a strategy, on all cores:
    `tfdp bench compare` measures both.

    Args:
        communication: `CommunicationOptions` or `None`, the defaults.

    Returns:
        A `MultiWorkerMirroredStrategy` or a `MirroredStrategy`. Its `cluster_resolver`
        has the task of this process.

    Raises:
        ValueError: If the environment or the options are wrong, see the strategies.

    Example:

    >>> auto_strategy().num_replicas_in_sync
    2
    """
    cluster = find_cluster(_prepare_process(communication).timeout_seconds)
    _warn_of_unconnected_processes(cluster)
    if cluster is not None and cluster.may_have_several_workers:
        return MultiWorkerMirroredStrategy(communication=communication)
    if not tf.config.get_visible_devices("GPU"):
        create_default_cpus(cluster.devices_per_worker if cluster else None)
    strategy = MirroredStrategy(local_devices(), communication=communication)
    # A script for any number of workers reads its task from the strategy's cluster
    # resolver, so a strategy of one worker needs a resolver, too.
    tf_distribute.set_cluster_resolver(strategy, resolver_of_environment(cluster))
    return strategy
