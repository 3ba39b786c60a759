"""Optimizer state of whole variables, for optimizers that are not elementwise.

A clone of the user's optimizer is built on the variables that the replica owns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import (
    keras_optimizer,
    optimizer_state,
    optimizer_views,
    tf_distribute,
)
from tfdp.ground.plans.shards import ShardBucket
from tfdp.training.parameters.packing import pack_row
from tfdp.training.parameters.sharded_parameter import sharded_parameter
from tfdp.training.reduction.fusion import pack
from tfdp.training.sharding.sharded_gradients import ShardedGradients
from tfdp.training.sharding.sharded_param_group import OptimizerShard


class VariableShards(OptimizerShard):
    """Slots of whole variables, for optimizers that are not elementwise.

    The methods have the arguments and results of those of `ElementShards`.

    Args:
        optimizer: Keras optimizer, the user's.
        variables: List of the Keras variables that the `ShardPlan` was made for.
        plan: `ShardPlan`, in which each variable has one owner.
        owner: Int, index of the owner of the slices.
        replica: Int, the local replica that holds the slices.
        device: String, the device that stores and updates the slices.
    """

    def _build(self, optimizer: Any, variables: list[Any], replica: int) -> None:
        """Build a clone of the optimizer on the variables that the replica owns.

        Variables on another device than `device` are copied, for updates of the copies.
        """
        self.owned = self._plan.owned(self.owner)
        # An update changes variables on its own device, so it needs copies of owned
        # variables that are on another device. The keys are positions in the plan.
        self._copies: dict[int, Any] = {}
        # The owner of a sharded parameter holds all its elements, so the update changes
        # the owner's part, and needs no copy. The keys are positions in the plan.
        self._parts: dict[int, Any] = {}
        values = (variables[i] for i in self.owned)
        owned = [optimizer_views.with_local_value(v, replica) for v in values]
        if self.owned and sharded_parameter(variables[0]) is not None:
            self._parts = dict(zip(self.owned, owned, strict=True))
        elif owned and not optimizer_state.is_on_device(owned[0], self.device):
            owned = [optimizer_state.copy_of(variable) for variable in owned]
            self._copies = dict(zip(self.owned, owned, strict=True))
        self.clone = optimizer_views.plain_clone(optimizer)
        # A clone is created from the optimizer's config, which lacks the variables that
        # the user has excluded from the trust ratio of `LARS`: they are excluded again.
        if hasattr(optimizer, "exclude_alike"):
            wholes = [variables[index] for index in self.owned]
            optimizer.exclude_alike(self.clone, wholes, owned)
        before = _settings_of(self.clone)
        # Some optimizers create slots even when built for no variables, but an owner of
        # no variables needs no slots.
        if owned:
            self.clone.build(owned)
        built = _settings_of(self.clone)
        # The clone keeps its own values of attributes that hold state or that `build`
        # sets: the user's optimizer may never be built, and has `None` in place of
        # state that was freed.
        self._kept = {
            name
            for name in vars(self.clone)
            if name not in built or before.get(name, self) != built[name]
        }
        self.variables = optimizer_state.state_variables(self.clone)
        self.slots = optimizer_state.slots_of(self.clone) if owned else {}
        self.singles = optimizer_state.single_variables(self.clone)

    def update(
        self,
        optimizer: Any,
        gradients: ShardedGradients,
        variables: list[Any],
        rate: Any,
    ) -> list[tf.Tensor | None]:
        """Update the variables that the replica owns, and their slots.

        Weights decay first. If the update runs on another device than a variable, it
        changes a copy. Arguments and result are those of `ElementShards.update`.
        """
        updated_indices = [index for index in self.owned if index in gradients.present]
        whole = self.gradients(gradients, variables)
        clone = self._clone_with_settings(optimizer, variables)
        self._refresh(variables)
        updated = [
            self._updated_variable(index, variables) for index in updated_indices
        ]
        if self.owned:
            # The update also runs if no owned variable has a gradient: state that
            # belongs to no variable, such as a product of momenta, advances each step.
            with tf.device(self.device), _refusing_random_numbers(optimizer):
                keras_optimizer.apply_weight_decay(clone, updated)
                update_gradients = [whole[index] for index in updated_indices]
                keras_optimizer.update_variables(clone, update_gradients, updated, rate)
        values = {
            index: tf_distribute.local_part(self._updated_variable(index, variables))
            for index in self.owned
        }
        return [
            self._pack_slice(bucket, values)
            if bucket.indices & gradients.present
            else None
            for bucket in self._plan.buckets
        ]

    def gradients(
        self, gradients: ShardedGradients, variables: list[Any]
    ) -> dict[int, Any]:
        """Return the whole gradients of the variables that the replica owns.

        Args:
            gradients: `ShardedGradients`.
            variables: List of the Keras variables that the `ShardPlan` was made for.

        Returns:
            Dict from a variable's position in `variables` to its gradient, a tensor or
            `tf.IndexedSlices`.
        """
        parts = gradients.parts(self._plan, self.owner)
        whole: dict[int, Any] = {
            index: _assemble(parts.get(index, []), variables[index])
            for index in gradients.dense & set(self.owned)
        }
        for index in set(self.owned) & gradients.sparse.keys():
            whole[index] = gradients.sparse[index]
        return whole

    def average(self, optimizer: Any, variables: list[Any]) -> None:
        """Move the moving averages that the replica owns towards the variables.

        Arguments are those of `ElementShards.average`.
        """
        owned = self.own_values(variables)
        clone = self._clone_with_settings(optimizer, variables)
        keras_optimizer.move_averages(clone, owned)

    def own_values(self, variables: list[Any]) -> list[tf.Tensor]:
        """Return the whole values of the variables that the replica owns.

        They are in the order of `owned`, the positions of these variables in
        `variables`. The moving averages have the same order.

        Args:
            variables: List of the Keras variables that the `ShardPlan` was made for.
        """
        parts = [tf_distribute.local_part(variables[index]) for index in self.owned]
        return [part.read_value() for part in parts]

    def averages(self) -> list[tf.Tensor]:
        """Return the moving averages of the replica's slice of each bucket.

        Returns:
            List with a tensor of shape `[slice_size]`, padded with zeros, for each
            bucket.
        """
        averages = self._own_averages
        values = {
            index: tf.convert_to_tensor(average)
            for index, average in zip(self.owned, averages, strict=True)
        }
        return [self._pack_slice(bucket, values) for bucket in self._plan.buckets]

    def _updated_variable(self, index: int, variables: list[Any]) -> Any:
        """Return the Keras variable that the update changes for `variables[index]`.

        It is this replica's part of a sharded parameter, a copy on the device of the
        update, or the variable of the model itself.
        """
        replacement = self._parts.get(index, self._copies.get(index))
        return variables[index] if replacement is None else replacement

    def _pack_slice(self, bucket: ShardBucket, values: dict[int, Any]) -> tf.Tensor:
        """Pack the slice of a bucket that this state owns.

        Args:
            bucket: `ShardBucket`.
            values: Dict from the position of a variable to its value; missing ones
                count as zeros.

        Returns:
            Tensor of shape `[slice_size]`, padded with zeros.
        """
        return pack_row(bucket, self.owner, values, tf.as_dtype(bucket.dtype))

    def _refresh(self, variables: list[Any]) -> None:
        """Set the copies of owned variables on the update's device to their values."""
        for index, copy in self._copies.items():
            value = tf_distribute.local_part(variables[index]).read_value()
            tf_distribute.local_part(copy).assign(value, read_value=False)

    def _clone_with_settings(self, optimizer: Any, variables: list[Any]) -> Any:
        """Return an optimizer with this shard's slots and the user's present settings.

        It is a shallow copy of `clone`, which was built on the owned variables. The
        counter, rate, strategy and decay exclusions of `clone` itself are set to those
        of `optimizer`.

        Args:
            optimizer: Keras optimizer, the user's, whose settings may have changed
                since the clone was built.
            variables: List of the Keras variables that the `ShardPlan` was made for.

        Returns:
            Keras optimizer.
        """
        optimizer_views.share_state(self.clone, optimizer)
        for index, copy in self._copies.items():
            keras_optimizer.copy_decay_exclusion(self.clone, copy, variables[index])
        settings = _settings_of(optimizer)
        for name in self._kept & settings.keys():
            del settings[name]
        return optimizer_views.copy_with(self.clone, **settings)


@contextlib.contextmanager
def _refusing_random_numbers(optimizer: Any) -> Iterator[None]:
    """Open a context that raises if an optimizer's update draws random numbers.

    It checks the operations that are traced in the context, if `update_step` is the
    user's. Each replica would draw numbers for its own variables only, and so other
    numbers than one device, whose seed advances with each variable.

    Args:
        optimizer: Keras optimizer.

    Raises:
        ValueError: On exit, if an operation that draws random numbers was traced.
    """
    is_own = keras_optimizer.overridden_by_user(optimizer, "update_step")
    if tf.executing_eagerly() or not is_own:
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    num_before = len(graph.get_operations())
    yield
    if any("Random" in op.type for op in graph.get_operations()[num_before:]):
        raise ValueError(
            f"The state of `{type(optimizer).__name__}` cannot be sharded: its "
            "`update_step` draws random numbers, which would not be those of one "
            "device. Train without sharding."
        )


def _assemble(parts: list[tf.Tensor], variable: Any) -> tf.Tensor:
    """Assemble a variable's gradient from its flat parts; zeros if there are none.

    Returns:
        Tensor of the variable's shape.
    """
    if not parts:
        return tf.zeros(variable.shape, variable.dtype)
    return tf.reshape(pack(parts), variable.shape)


def _settings_of(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's attributes that are settings, by name.

    Settings are numbers, strings, bools and `None`, except `built`.
    """
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, (bool, int, float, str, type(None))) and name != "built"
    }
