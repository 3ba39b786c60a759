"""Local steps in the step of a replica: their state, and when exchanges are due."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.features.local_steps.exchanges import Exchanges
from tfdp.features.local_steps.options import LocalStepsOptions
from tfdp.features.local_steps.outer_step import assign
from tfdp.features.local_steps.pace import Pace
from tfdp.features.local_steps.reducers import NodeReducers
from tfdp.ground._compat import tf_distribute
from tfdp.ground.base import batch_weight
from tfdp.ground.base.conditions import run_if
from tfdp.ground.base.context import is_tfdp, replica_context
from tfdp.ground.base.param_groups import innermost
from tfdp.training.optimizer.features import installed
from tfdp.training.reduction.fusion import wide_dtype
from tfdp.training.reduction.gradient_reducer import GradientReducer, replica_reducer
from tfdp.training.step.accumulation import read, set_to_zero
from tfdp.training.step.step import IndependentGroups, Step

# Prefix of the names of the outer optimizer's tensors in a checkpoint: a model without
# `DiLoCo` recognizes by it the tensors that it does not need.
OUTER_PREFIX = "outer/"


class LocalSteps(IndependentGroups):
    """Hooks that count a step's local updates, and combine replicas' weights when due.

    Args:
        make_variable: Callable that creates a Keras variable of the optimizer.
        options: `LocalStepsOptions`.

    Attributes:
        is_enabled: Bool, whether the running `fit` has local steps, now or later.
        is_active: Bool, whether its steps are local now.

    Source: Stich 2019, "Local SGD Converges Fast and Communicates Little",
    https://arxiv.org/abs/1805.09767.
    """

    label = "`LocalSGD` and `DiLoCo`"

    def __init__(
        self, make_variable: Callable[..., Any], options: LocalStepsOptions
    ) -> None:
        self._make_variable = make_variable
        self.options = options
        self.pace = Pace(options) if options.is_dynamic else None
        self.exchanges: Exchanges | None = None
        self.compresses = bool(options.outer and options.outer.compression)
        self._own_variables: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Implements `StepFeature.reset`: before a `fit`, disable local steps.

        Steps are then synchronous until `enable`; the variables are kept.
        """
        self.is_enabled = self.is_active = False

    def build(self, trained: Sequence[Any]) -> None:
        """Implements `StepFeature.build`: create counters, and outer weights if any."""
        make_variable, options = self._make_variable, self.options
        self._trained = list(trained)
        self._node_reducers = NodeReducers(trained)
        self._fragments = options.fragments_of(
            [math.prod(variable.shape) for variable in trained]
        )
        if options.outer is not None:
            self.exchanges = Exchanges(
                make_variable, options, self._trained, self._fragments
            )
        self.updates = make_variable(
            shape=(), dtype="int", initializer="zeros", name="local_updates"
        )
        # Number of this replica's samples since the last exchange of each fragment, a
        # part of the weights. Backups do not contain this variable, although it differs
        # between replicas, since it is zero whenever the state may be saved.
        self.samples = make_variable(
            shape=(len(self._fragments),),
            dtype="float32",
            initializer="zeros",
            name="local_samples",
        )
        # Samples of accumulated micro-batches, which count for the exchange only once
        # an update has used them.
        self.waiting_samples = make_variable(
            shape=(), dtype="float32", initializer="zeros", name="local_waiting_samples"
        )
        self._own_variables = [self.updates, self.samples, self.waiting_samples]

    @property
    def variables(self) -> list:
        """List of the Keras variables that this feature created in the optimizer."""
        of_exchanges = [] if self.exchanges is None else self.exchanges.variables
        return [*self._own_variables, *of_exchanges]

    @property
    def state(self) -> dict[str, Any]:
        """Dict from the name in a checkpoint to each variable of the outer step."""
        state = {} if self.exchanges is None else self.exchanges.outer.state
        return {f"{OUTER_PREFIX}{name}": variable for name, variable in state.items()}

    def check(self, optimizer: Any) -> None:
        """Raise if the step uses an option that needs all replicas in every step.

        Raises:
            ValueError: With sharded state, Adasum or a feature that needs all replicas.
        """
        strategy = tf.distribute.get_strategy()
        is_adasum = is_tfdp(strategy) and strategy.extended.reducer.combines_means
        others = [
            ("sharded state", optimizer.sharding_options.shards_state),
            *((f.label, f.needs_all_replicas) for f in optimizer.features.active),
            ("Adasum", is_adasum),
        ]
        if found := [name for name, is_used in others if is_used]:
            need = "need" if len(found) > 1 else "needs"
            raise ValueError(
                f"Local steps cannot be combined with {' and '.join(found)}, which "
                f"{need} all replicas in every step. Remove `LocalSGD` or `DiLoCo`, or "
                "the other."
            )

    def check_update(self, optimizer: Any) -> None:
        """Raise `ValueError` unless `optimizer`, which updates, has these hooks."""
        if installed(optimizer, LocalSteps) is not self:
            raise ValueError(
                "Local steps support one optimizer, the one that the model was "
                "compiled with. Remove `LocalSGD` or `DiLoCo` for a model with "
                f"several. Received: an update by {optimizer.name!r}"
            )

    def groups_of_ranks(self, strategy: Any) -> Sequence[Sequence[int]]:
        """Implements `IndependentGroups.groups_of_ranks`, by the option `scope`.

        Returns:
            List of lists of ints: with the scope `"replica"`, or on one device without
            a tfdp strategy, each list is one rank; with `"node"`, the ranks on a node.
        """
        if self.options.scope == "replica" or not is_tfdp(strategy):
            return [[rank] for rank in range(strategy.num_replicas_in_sync)]
        return [sorted(node) for node in strategy.extended.topology.nodes]

    def before_sync(self) -> None:
        """Pause exchanges with `min_participants`, before all workers synchronize.

        A running exchange is completed first. `after_sync` resumes the exchanges.
        """
        if self.exchanges is not None and self.exchanges.rounds is not None:
            self.exchanges.rounds.pause()

    def after_sync(self) -> None:
        """Reset `Pace`, and resume exchanges that `before_sync` has paused.

        It is called after all workers have synchronized. From here on `Pace`, with
        `dynamic_steps`, counts and times this worker's updates anew.
        """
        if self.pace is not None:
            self.pace.restart()
        if self.exchanges is not None and self.exchanges.rounds is not None:
            self.exchanges.rounds.resume()

    def reducer(self) -> GradientReducer:
        """Return the reducer that sums the running replica's gradients within its node.

        It sums nothing if each replica trains alone.

        Raises:
            ValueError: If all replicas are on one node.
        """
        if self.options.scope == "replica":
            return GradientReducer()
        strategy = tf.distribute.get_strategy()
        if not is_tfdp(strategy) or len(strategy.extended.group.nodes) < 2:
            raise ValueError(
                "All replicas are on one node, so that there is nothing to exchange "
                'between nodes. Use `DiLoCo(scope="replica")`, or set with '
                "`CommunicationOptions(node_size=...)` how many replicas form a node."
            )
        return self._node_reducers.of_replica(strategy, replica_context())

    def equalize_replicas(self, optimizer: Any) -> None:
        """Give all replicas the same state, by an exchange of all weights and slots.

        Implements `StepFeature.equalize_replicas`. Without local updates since the last
        call there is no exchange.
        """
        if not self.variables:
            return
        self.before_sync()
        if int(self.updates.numpy()):
            optimizer.run_on_replicas("average", lambda: self._equalize(optimizer))
        self.after_sync()

    def begin(self, *, has_batch: bool) -> None:
        """Implements `StepFeature.begin`: copy the weights into the outer ones, if due.

        It is due in the first step, and in the first one after `equalize_replicas` has
        combined the replicas.

        Args:
            has_batch: Bool, ignored here.
        """
        if self.exchanges is not None:
            self.exchanges.outer.begin()

    def end(self, step: Step, is_due: Any, is_kept: Any) -> None:
        """Count a micro-batch, and exchange the fragments that are due after it.

        Fragments are parts of the weights, see `LocalStepsOptions.fragments_of`. With
        `LocalStepsOptions.delay`, an exchange that is due only starts here; a call that
        many updates later finishes it.

        Args:
            step: `Step` of the micro-batch.
            is_due: Scalar bool tensor, or bool, whether an update was due; equal on all
                replicas.
            is_kept: Scalar bool tensor, or bool, false if the update was skipped.
        """
        self._count(is_due, is_kept)
        updates = read(self.updates)
        position = updates % self.options.sync_every
        for number, offset in enumerate(self.options.offsets):
            begins = tf.logical_and(is_due, tf.equal(position, offset))
            if not self.options.delay:
                arguments = number, step.optimizer, step.reducer
                run_if(begins, functools.partial(self._exchange, *arguments))
                continue
            run_if(begins, functools.partial(self._launch, number, updates))
            later = (offset + self.options.delay) % self.options.sync_every
            is_over = tf.logical_and(is_due, tf.equal(position, later))
            self._finish(number, is_over, updates, step.reducer)

    def _count(self, is_due: tf.Tensor | bool, is_kept: tf.Tensor | bool) -> None:
        """Count the samples of a micro-batch, and an update if one was due.

        Samples that no update has used yet are kept in `waiting_samples`;
        `_exchange_all` drops them.

        Args:
            is_due: Scalar bool tensor, or bool, whether an update was due; the same
                on all replicas.
            is_kept: Scalar bool tensor, or bool, false if the update was skipped on
                overflow: its samples then do not count.
        """
        samples = tf_distribute.local_part(self.samples)
        new_samples = tf.cast(_local_samples(), samples.dtype)
        if is_due is not True:
            waiting = tf_distribute.local_part(self.waiting_samples)
            new_samples += waiting.read_value()
            left = tf.where(is_due, tf.zeros_like(new_samples), new_samples)
            waiting.assign(left, read_value=False)
            is_kept = tf.logical_and(is_due, is_kept)
        counted = new_samples * tf.cast(is_kept, new_samples.dtype)
        samples.assign_add(tf.fill(samples.shape, counted), read_value=False)
        updates = tf_distribute.local_part(self.updates)
        updates.assign_add(tf.cast(is_due, updates.dtype), read_value=False)

    def _equalize(self, optimizer: Any) -> None:
        """Exchange local updates and agree on one loss scale; called on each replica.

        Args:
            optimizer: `DistributedOptimizer`.
        """
        features, reducer = optimizer.features, replica_reducer()
        self._exchange_all(optimizer.inner_optimizer, reducer)
        scale, accumulation = features.scale, features.accumulation
        if scale is None:
            return
        before = scale.read()
        scale.agree(reducer)
        # Replicas that took local steps may have had different loss scales, so each
        # rescales its accumulated gradients to the common scale.
        if accumulation is not None:
            accumulation.rescale_own(scale.read() / before)

    def _exchange_all(self, optimizer: Any, reducer: GradientReducer) -> None:
        """Exchange all weights and slots, so that all replicas have the same state.

        Each fragment, a part of the weights, is averaged over the replicas or, with an
        outer optimizer, updated by it. Slots are averaged.

        Args:
            optimizer: Keras optimizer, not a wrapper.
            reducer: `GradientReducer` of all replicas.
        """
        for number in range(len(self._fragments)):
            if self.options.delay:
                self._finish(number, True, read(self.updates), reducer)
            self._exchange(number, optimizer, reducer)
        if self.exchanges is not None:
            self.exchanges.adopt_common_weights()
            slots = slots_of(optimizer)
            assign(slots, _means(slots, reducer, 1.0 / reducer.num_replicas))
            # A zero in `is_begun` makes the next step copy the weights into the anchors
            # again, since callbacks may change the weights before that step.
            set_to_zero(self.exchanges.outer.is_begun)
        set_to_zero(self.updates)
        set_to_zero(self.waiting_samples)

    def _exchange(self, number: int, optimizer: Any, reducer: GradientReducer) -> None:
        """Average a fragment, or make its outer step, if any replica has new samples.

        Args:
            number: Int, index of the fragment, a part of the weights.
            optimizer: Keras optimizer, not a wrapper.
            reducer: `GradientReducer` of all replicas.
        """
        samples = tf_distribute.local_part(self.samples)
        local_samples = tf.cast(samples[number], tf.float64)
        (total,) = reducer.sum([local_samples])
        exchanges = self.exchanges
        if exchanges is not None:
            # A worker that missed rounds started from an older outer state, so its
            # pseudo-gradients are computed before the broadcast replaces that state.
            gradients = exchanges.outer.pseudo_gradients(self._fragments[number])
            if exchanges.rounds is not None:
                exchanges.broadcast_state(reducer)

        def exchange() -> None:
            """Combine fragment `number` of all replicas, and reset its samples.

            With an outer optimizer it updates the fragment. Otherwise weights and slots
            become their means, weighted by the samples that each replica has used since
            the last exchange.
            """
            share = local_samples / total
            if exchanges is not None:
                exchanges.exchange(number, gradients, share, reducer)
            else:
                state = [*self._trained, *slots_of(optimizer)]
                assign(state, _means(state, reducer, share))
            samples.scatter_nd_update([[number]], [0.0])

        run_if(total > 0, exchange)

    def _launch(self, number: int, updates: tf.Tensor) -> None:
        """Start the delayed exchange of a fragment.

        Args:
            number: Int, index of the fragment, a part of the weights.
            updates: Scalar tensor, local updates so far.
        """
        assert self.exchanges is not None
        samples = tf_distribute.local_part(self.samples)
        self.exchanges.launch(number, samples[number], updates)
        samples.scatter_nd_update([[number]], [0.0])

    def _finish(
        self,
        number: int,
        is_over: tf.Tensor | bool,
        updates: tf.Tensor,
        reducer: GradientReducer,
    ) -> None:
        """Finish the delayed exchange of a fragment, if one is in flight and due.

        Args:
            number: Int, index of the fragment, a part of the weights.
            is_over: Scalar bool tensor, or bool, whether the delay, a number of
                updates, is over: the result is then due.
            updates: Scalar tensor, local updates so far.
            reducer: `GradientReducer` of all replicas.
        """
        exchanges = self.exchanges
        assert exchanges is not None

        def finish() -> None:
            """Update the weights of fragment `number` by its delayed exchange.

            If the exchange did not take place, the samples that were sent with it are
            counted again for the next one.
            """
            unused = exchanges.finish(number, updates, reducer)
            if unused is not None:
                samples = tf_distribute.local_part(self.samples)
                samples.scatter_nd_add([[number]], [unused])

        run_if(tf.logical_and(is_over, exchanges.is_in_flight(number)), finish)


def _means(variables: Sequence[Any], reducer: GradientReducer, share: Any) -> list:
    """Return a list of tensors, the mean of each variable over all replicas.

    Args:
        variables: Sequence of Keras variables.
        reducer: `GradientReducer` of all replicas.
        share: Float or scalar tensor, weight of this replica; the weights add up to 1.
    """
    values = [tf.cast(read(v), wide_dtype(v.dtype)) for v in variables]
    return reducer.sum(
        [tf.math.multiply_no_nan(v, tf.cast(share, v.dtype)) for v in values]
    )


def _local_samples() -> tf.Tensor:
    """Return the number of samples in this replica's micro-batch, a float64 scalar.

    A replica's weight is its fraction of the samples of all replicas. The result is

    - in Keras's loops, the weight times the number of samples of all replicas;
    - in Keras's loops, if that number is unknown, the weight alone;
    - outside of Keras's loops, where no replica has a weight, 1.
    """
    weight, samples = batch_weight.current(), batch_weight.num_samples()
    share = tf.constant(1.0, tf.float64) if weight is None else weight
    return share if samples is None else share * tf.cast(samples, share.dtype)


def slots_of(optimizer: Any) -> list:
    """Return a list of an optimizer's slots, the variables that depend on gradients.

    Its scalars, such as the learning rate and the number of updates, depend only on
    the number of steps, and are always the same on all replicas.

    Args:
        optimizer: Keras optimizer, not a wrapper.
    """
    variables = [v for part in innermost(optimizer) for v in part.variables]
    slots = [v for v in variables if len(v.shape) and tf.as_dtype(v.dtype).is_floating]
    return list({id(slot): slot for slot in slots}.values())


def enabled(optimizer: Any) -> LocalSteps | None:
    """Return an optimizer's `LocalSteps` if this `fit` enables them, else `None`.

    Args:
        optimizer: Keras optimizer.
    """
    found = installed(optimizer, LocalSteps)
    return found if found is not None and found.is_enabled else None


def active(model: Any) -> LocalSteps | None:
    """Return a model's `LocalSteps` if its steps are local now, else `None`."""
    found = installed(getattr(model, "optimizer", None), LocalSteps)
    return found if found is not None and found.is_active else None


def enable(optimizer: Any, options: LocalStepsOptions, *, now: bool) -> None:
    """Enable local steps: replicas or nodes synchronize after several updates.

    Args:
        optimizer: `DistributedOptimizer`.
        options: `LocalStepsOptions`.
        now: Bool, whether steps are local from now on; otherwise only the variables are
            created.

    Raises:
        ValueError: If local steps with other options are enabled in this `fit`.
    """
    before = enabled(optimizer)
    if before is not None and before.options != options:
        raise ValueError(
            "Give `fit` only one `LocalSGD` or `DiLoCo`: each sets when the replicas "
            "synchronize."
        )
    local_steps = optimizer.features.install(LocalSteps, options=options)
    local_steps.is_enabled, local_steps.is_active = True, now
