"""All-reduce over replicas: dense tensors in buckets, sparse ones as rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ref

import tensorflow as tf

from tfdp.communication.collectives import ProcessGroup, timing
from tfdp.communication.coordination.checks import check_same_plan, check_same_variables
from tfdp.communication.coordination.progress import progress
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground import user_code
from tfdp.ground.base import loops
from tfdp.ground.base.param_groups import path_of
from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.buckets import Bucket, BucketPlan
from tfdp.training.compression.algorithm_choice import AlgorithmChoice
from tfdp.training.compression.compressed_reduce import all_reduce_compressed
from tfdp.training.compression.residuals import ResidualStore
from tfdp.training.reduction.algorithm_selector import AlgorithmSelector
from tfdp.training.reduction.carried_scalar import carrier_of, pending_scalar
from tfdp.training.reduction.fusion import (
    ReducedGradients,
    all_reduce_any_shape,
    all_reduce_buckets,
    make_plan,
    unbucketed,
    weighted,
    with_values,
)
from tfdp.training.reduction.sparse import reduce_indexed_slices
from tfdp.training.reduction.trained_plans import TrainedPlans, Tuned


class Reducer:
    """All-reduce of values of the local replicas over a process group.

    Args:
        group: `ProcessGroup` of the replicas.
        first_rank: Int, rank of the first local replica.
        options: `CommunicationOptions` of the strategy.
        worker_group: `WorkerGroup` of all workers.
        algorithm_selector: `AlgorithmSelector` that chooses the algorithm of each
            bucket, or `None` for the ring. Defaults to `None`.
        residuals: `ResidualStore` of compressors' residuals, or `None` to create one.
            Defaults to `None`.
        kind: String, name of the collective, a part of the keys that `residuals` finds
            its residuals by. Defaults to `"all-reduce"`.
        compares: Bool, whether new variables and plans are compared between all
            workers. Defaults to `True`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        first_rank: int,
        options: CommunicationOptions,
        worker_group: WorkerGroup,
        algorithm_selector: AlgorithmSelector | None = None,
        *,
        residuals: ResidualStore | None = None,
        kind: str = "all-reduce",
        compares: bool = True,
    ) -> None:
        self.group = group
        self.algorithm_selector = algorithm_selector
        self.first_rank = first_rank
        self.options = options
        self._worker_group = worker_group
        self.plans = TrainedPlans()
        # A model is found by the `id`s of its variables, since two models may have
        # variables of the same path.
        self._tuned: dict[frozenset[int], Tuned] = {}
        self.residuals = residuals or ResidualStore(group.devices)
        self._kind = kind
        self._compares = compares

    @property
    def combines_means(self) -> bool:
        """Bool, whether Adasum combines mean gradients, of replicas or of nodes.

        Otherwise gradients are summed.
        """
        selector = self.algorithm_selector
        return selector is not None and selector.combines_means

    @property
    def num_means(self) -> int:
        """Int, number of gradients that Adasum combines: one per node or per replica.

        It is the number of nodes if buckets are reduced inside nodes first, else the
        number of replicas. It has no meaning unless `combines_means` is true.
        """
        selector = self.algorithm_selector
        of_nodes = selector is not None and selector.is_hierarchical
        return len(self.group.nodes) if of_nodes else self.group.size

    def reduce(self, reduce_op: Any, value: Any, replica: int) -> Any:
        """All-reduce a nest of tensors and `IndexedSlices` of one replica.

        Args:
            reduce_op: `tf.distribute.ReduceOp`, or its name, `"SUM"` or `"MEAN"`: a
                mean is the sum divided by the number of replicas.
            value: Nest of tensors and `IndexedSlices`. A dense tensor has the same
                shape on all replicas.
            replica: Int, index of the calling replica among the local ones.

        Returns:
            Nest of the same structure, with reduced values.
        """
        flat = tf.nest.flatten(value, expand_composites=False)
        reduced = self.all_reduce(flat, None, replica)
        results = reduced.gradients()
        if getattr(reduce_op, "value", str(reduce_op)).upper() == "MEAN":
            results = [_divide(item, self.group.size) for item in results]
        return tf.nest.pack_sequence_as(value, results)

    def all_reduce(
        self,
        flat: list,
        variables: list[Any] | None,
        replica: int,
        may_sum: bool = False,
        weight: tf.Tensor | None = None,
    ) -> ReducedGradients:
        """Sum tensors and `IndexedSlices` over all replicas, bucket by bucket.

        Args:
            flat: List of tensors and `IndexedSlices`.
            variables: List of Keras variables, one for each gradient; or `None` if the
                tensors are not gradients.
            replica: Int, index of the calling replica among the local ones.
            may_sum: Bool, whether rows with the same index may be added up, see
                `tfdp.training.reduction.sparse`. Defaults to `False`.
            weight: Scalar tensor, factor of this replica's gradients, or `None` for 1.
                Defaults to `None`.

        Returns:
            `ReducedGradients`, the same on all replicas.
        """
        flat = [
            item if _is_sparse(item) else tf.convert_to_tensor(item) for item in flat
        ]
        if self.group.size == 1:
            return unbucketed(flat)
        progress.record_reduction(str([(t.dtype.name, str(t.shape)) for t in flat]))
        dense = [index for index, item in enumerate(flat) if not _is_sparse(item)]
        flats, buckets = self._reduce_dense(flat, dense, variables, replica, weight)
        with timing.labelled(timing.ROWS):
            sparse = {
                index: reduce_indexed_slices(
                    item if weight is None else weighted(item, weight),
                    self.group,
                    replica,
                    may_sum=may_sum,
                )
                for index, item in enumerate(flat)
                if _is_sparse(item)
            }
        return ReducedGradients(flats, buckets, flat, sparse)

    def _reduce_dense(
        self,
        flat: list,
        dense: list[int],
        variables: list[Any] | None,
        replica: int,
        weight: tf.Tensor | None,
    ) -> tuple[list[tf.Tensor], list[tuple[int, ...]]]:
        """Sum the dense tensors at some positions of a list, bucket by bucket.

        The first local replica stores the plan of gradients in `plans`, and compares a
        new plan between workers if `compares` is set.

        Args:
            flat: List of tensors and `IndexedSlices`.
            dense: List of ints, positions of the dense tensors in `flat`.
            variables: List of Keras variables, see `all_reduce`.
            replica: Int, index of the calling replica among the local ones.
            weight: Scalar tensor, factor of this replica's tensors, or `None` for 1.

        Returns:
            Tuple of two lists, with an item for each bucket: the sum, a flat tensor;
            and the positions in `flat` of the tensors that it consists of.
        """
        tensors = [flat[index] for index in dense]
        if variables is not None:
            # A gradient may have an unknown shape if the size of the batch is unknown.
            # It takes the static shape of its variable, which bucket plans need.
            for tensor, index in zip(tensors, dense, strict=True):
                tensor.set_shape(variables[index].shape)
        if not all(tensor.shape.is_fully_defined() for tensor in tensors):
            # A bucket plan needs static shapes. If tensors other than gradients have
            # none, all tensors are reduced one by one instead.
            sums = [all_reduce_any_shape(t, self.group, replica) for t in tensors]
            return sums, [(index,) for index in dense]
        if variables is None:
            names = [str(index) for index in dense]
        else:
            names = [path_of(variables[index]) for index in dense]
        options = self.options_of(variables)
        plan = make_plan(tensors, names, options, in_list_order=variables is None)
        known = self.plans.plan_of(variables, options) if variables else None
        if known is not None and known.entries == plan.entries:
            # One replica may trace the step again, for another number of rows, and
            # compute gradients in a new order. Its buckets must still be those of the
            # other replicas, so it keeps the first plan.
            plan = known
        routes = self.routes_of(
            plan, are_gradients=variables is not None, variables=variables
        )
        if variables is not None and any(not route.is_compressed for route in routes):
            self.warn_of_momentum("some gradients are sent whole")
        if variables is not None and replica == 0:
            self._warn_of_own_loop()
            # Only a new plan is compared: a comparison needs all workers, and for a
            # batch of another size perhaps only some of them trace the step again.
            if plan and not known and self._compares:
                check_same_plan(self._worker_group, plan)
            self.plans.remember(variables, plan, routes, options)
        algorithms = [
            self._bucket_all_reduce(route, order, bucket, variables, dense, replica)
            for order, (route, bucket) in enumerate(zip(routes, plan, strict=True))
        ]
        carried = pending_scalar() if variables is not None and weight is None else None
        flats = all_reduce_buckets(
            tensors,
            plan,
            self.group,
            replica,
            weight,
            algorithms,
            carried,
            carrier_of(plan, routes) if carried is not None else None,
        )
        return flats, [tuple(dense[i] for i in bucket.indices) for bucket in plan]

    def _bucket_all_reduce(
        self,
        route: AlgorithmChoice,
        order: int,
        bucket: Bucket,
        variables: Sequence[Any] | None,
        dense: Sequence[int],
        replica: int,
    ) -> Callable[..., tf.Tensor]:
        """Return the all-reduce of a bucket, with the residuals of its compressors.

        Args:
            route: `AlgorithmChoice` of the bucket.
            order: Int, position of the bucket in its plan.
            bucket: `Bucket`, with positions of its gradients among the dense ones.
            variables: Sequence of Keras variables, or `None` for tensors that are not
                gradients.
            dense: Sequence of ints, positions of the dense gradients in `variables`.
            replica: Int, index of the calling replica among the local ones.

        Returns:
            Callable that all-reduces the bucket as one flat tensor, with the
            arguments of `tfdp.communication.collectives.ring` except `wire_dtype`.
        """
        if route.algorithm.is_adasum:
            sizes = [entry.num_elements for entry in bucket.entries]
            return functools.partial(route.all_reduce, sizes=sizes)
        if not route.is_compressed or variables is None:
            return route.all_reduce
        members = [variables[dense[index]] for index in bucket.indices]
        return functools.partial(
            all_reduce_compressed,
            route=route,
            entries=bucket.entries,
            residuals=self.residuals.of_bucket(self._kind, order, members, replica),
        )

    def routes_of(
        self,
        plan: BucketPlan,
        *,
        are_gradients: bool = True,
        variables: Sequence[Any] | None = None,
    ) -> tuple[AlgorithmChoice, ...]:
        """Choose the algorithm of each bucket of a plan.

        Args:
            plan: `BucketPlan`.
            are_gradients: Bool, whether the buckets have gradients, which may be
                compressed. Defaults to `True`.
            variables: Sequence of Keras variables whose tuned options apply, or `None`
                for the strategy's options. Defaults to `None`.

        Returns:
            Tuple of `AlgorithmChoice`, one for each bucket.
        """
        tuned = self.tuned_of(variables)
        selector = tuned.algorithm_selector if tuned else self.algorithm_selector
        if selector is None:
            return (AlgorithmChoice(),) * len(plan)
        return selector.select_for(plan, may_compress=are_gradients)

    def tune(
        self,
        variables: Sequence[Any],
        options: CommunicationOptions | None,
        gain: str = "",
    ) -> None:
        """Set the options for a model's gradients, in steps that are traced later.

        Every worker has to call it, before the same step.

        Args:
            variables: Sequence of Keras variables, those of a model.
            options: `CommunicationOptions`, or `None` for the strategy's.
            gain: String, description of the gain over the strategy's options, which is
                shown to the user. Defaults to `""`.
        """
        key, selector = frozenset(map(id, variables)), self.algorithm_selector
        self._tuned.pop(key, None)
        if options is not None and selector is not None:
            selector, refs = selector.with_options(options), list(map(ref, variables))
            self._tuned[key] = Tuned(options, selector, gain, refs)
        self.plans.make_latest(variables, self.options_of(variables))

    def tuned_of(self, variables: Sequence[Any] | None) -> Tuned | None:
        """Return the latest tuned options that apply to variables of a model.

        Args:
            variables: Sequence of Keras variables, all or some of the model's; or
                `None` for tensors that are not gradients, which have no tuned options.

        Returns:
            `Tuned`, the options and their algorithm selector; or `None` if the model
            uses the strategy's.
        """
        if variables is None:
            return None
        wanted = set(map(id, variables))
        tuned = [t for key, t in self._tuned.items() if wanted <= key and t.is_alive]
        return tuned[-1] if tuned else None

    def options_of(self, variables: Sequence[Any] | None) -> CommunicationOptions:
        """Return the tuned options of a model's variables, or else the strategy's."""
        tuned = self.tuned_of(variables)
        return self.options if tuned is None else tuned.options

    def _warn_of_own_loop(self) -> None:
        """Warn once, in a loop other than `fit`, that its buckets are not tuned.

        Only the chief warns, and only if the options ask for tuned buckets.
        """
        loop = loops.current()
        in_fit = loop is not None and loop.name == "fit"
        is_affected = self.options.tunes_buckets and self._worker_group.is_chief
        if in_fit or not is_affected:
            return
        user_code.warn(
            '`bucket_mb="auto"` tunes buckets only in `fit`. Other loops use the '
            "default buckets, or those that an earlier `fit` of the same model has "
            "found.",
            once_for=self,
        )

    def warn_of_momentum(self, reason: str) -> None:
        """Warn, once, of gradients that bypass a compressor with momentum.

        Without such a compressor in the options it does nothing.

        Args:
            reason: String, clause that says why they are not compressed.
        """
        compression = self.options.compression
        compressors = (
            compression.values() if isinstance(compression, Mapping) else [compression]
        )
        has_momentum = any(
            getattr(compressor, "replaces_momentum", False)
            for compressor in compressors
        )
        if not has_momentum:
            return
        user_code.warn(
            "The `momentum` of `TopK` applies only to compressed gradients, but "
            f"{reason}. Uncompressed gradients train without momentum. Give `momentum` "
            "to the optimizer instead of `TopK`.",
            once_for=self,
            topic="momentum",
        )

    def check(self, variables: list[Any], replica: int) -> None:
        """Raise a `ValueError` on all workers if they train different variables.

        Workers compare each list of variables once, by their first local replica.

        Args:
            variables: List of Keras variables that the step trains.
            replica: Int, index of the calling replica among the local ones.
        """
        if self._compares and replica == 0 and self.plans.plan_of(variables) is None:
            self.plans.remember(variables, BucketPlan(()))
            check_same_variables(
                self._worker_group, "first training step", variables, "trains"
            )


def _is_sparse(value: Any) -> bool:
    """Return whether a gradient is sparse: `tf.IndexedSlices`, rows of a table."""
    return isinstance(value, tf.IndexedSlices)


def _divide(value: Any, count: int) -> Any:
    """Return a tensor or `tf.IndexedSlices`, divided by a number."""
    if _is_sparse(value):
        return with_values(value, value.values / count)
    return value / count
