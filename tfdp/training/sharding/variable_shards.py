"""Optimizer state of whole variables, for optimizers that look at a tensor.

A clone of the user's optimizer is built on the variables that the replica owns.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.ground import _compat
from tfdp.ground.plans.shards import ShardBucket
from tfdp.training.parameters.packing import pack_row
from tfdp.training.parameters.sharded_parameter import sharded_parameter
from tfdp.training.reduction.fusion import pack
from tfdp.training.sharding.sharded_gradients import ShardedGradients
from tfdp.training.sharding.sharded_param_group import OwnedState


class VariableShards(OwnedState):
    """Slots of whole variables, for optimizers that look at a tensor.

    Arguments and methods are those of `ElementShards`.
    """

    def _build(self, optimizer: Any, variables: list[Any], replica: int) -> None:
        self.owned = self._plan.owned(self.owner)
        # Kept beside the replica's own where the update is made elsewhere.
        self._copies: dict[int, Any] = {}
        # What the replica holds of sharded parameters: those that it owns, whole.
        self._parts: dict[int, Any] = {}
        mine = [_compat.with_local_value(variables[i], replica) for i in self.owned]
        if self.owned and sharded_parameter(variables[0]) is not None:
            self._parts = dict(zip(self.owned, mine, strict=True))
        elif mine and not _compat.is_on(mine[0], self.device):
            mine = [_compat.copy_of(variable) for variable in mine]
            self._copies = dict(zip(self.owned, mine, strict=True))
        self.clone = _compat.plain_clone(optimizer)
        if hasattr(optimizer, "exclude_alike"):  # no part of the config
            wholes = [variables[index] for index in self.owned]
            optimizer.exclude_alike(self.clone, wholes, mine)
        before = _settings_of(self.clone)
        # An owner of nothing needs no slots, and not every class makes none.
        if mine:
            self.clone.build(mine)
        built = _settings_of(self.clone)
        # The user's optimizer is never built.
        self._made_by_build = {
            name for name, value in built.items() if before.get(name, self) != value
        }
        self.variables = _compat.state_variables(self.clone)
        self.slots = _compat.slots_of(self.clone) if mine else {}
        self.singles = _compat.single_variables(self.clone)

    def update(
        self,
        optimizer: Any,
        gradients: ShardedGradients,
        variables: list[Any],
        rate: Any,
    ) -> list[tf.Tensor | None]:
        """See `ElementShards`."""
        mine = [index for index in self.owned if index in gradients.present]
        whole = self.gradients(gradients, variables)
        clone = self._clone_with_settings(optimizer, variables)
        self._refresh(variables)
        updated = [self._updated(index, variables) for index in mine]
        if self.owned:
            # Also without gradients: what belongs to no variable moves on.
            with tf.device(self.device):
                _compat.apply_weight_decay(clone, updated)
                given = [whole[index] for index in mine]
                _compat.update_variables(clone, given, updated, rate)
        values = {
            index: _compat.local_part(self._updated(index, variables))
            for index in self.owned
        }
        return [
            self._pack(bucket, values) if bucket.indices & gradients.present else None
            for bucket in self._plan.buckets
        ]

    def gradients(
        self, gradients: ShardedGradients, variables: list[Any]
    ) -> dict[int, Any]:
        """Assemble the gradients of the owned variables from the buckets."""
        parts = gradients.parts(self._plan, self.owner)
        whole: dict[int, Any] = {
            index: _assemble(parts.get(index, []), variables[index])
            for index in gradients.dense & set(self.owned)
        }
        for index in set(self.owned) & gradients.sparse.keys():
            whole[index] = gradients.sparse[index]
        return whole

    def average(self, optimizer: Any, variables: list[Any]) -> None:
        """See `ElementShards`."""
        mine = self.own_values(variables)
        _compat.move_averages(self._clone_with_settings(optimizer, variables), mine)

    def own_values(self, variables: list[Any]) -> list[tf.Tensor]:
        """See `ElementShards`."""
        parts = [_compat.local_part(variables[index]) for index in self.owned]
        return [part.read_value() for part in parts]

    def averages(self) -> list[tf.Tensor]:
        """See `ElementShards`."""
        averages = self._own_averages
        values = {
            index: tf.convert_to_tensor(average)
            for index, average in zip(self.owned, averages, strict=True)
        }
        return [self._pack(bucket, values) for bucket in self._plan.buckets]

    def _updated(self, index: int, variables: list[Any]) -> Any:
        """The Keras variable that the update changes in the place of one."""
        found = self._parts.get(index, self._copies.get(index))
        return variables[index] if found is None else found

    def _pack(self, bucket: ShardBucket, values: dict[int, Any]) -> tf.Tensor:
        return pack_row(bucket, self.owner, values, tf.as_dtype(bucket.dtype))

    def _refresh(self, variables: list[Any]) -> None:
        """Set the copies to the values of the variables."""
        for index, copy in self._copies.items():
            value = _compat.local_part(variables[index]).read_value()
            _compat.local_part(copy).assign(value, read_value=False)

    def _clone_with_settings(self, optimizer: Any, variables: list[Any]) -> Any:
        """Clone with the settings, counter and rate of the user's optimizer."""
        _compat.adopt(self.clone, optimizer)
        for index, copy in self._copies.items():
            _compat.decay_alike(self.clone, copy, variables[index])
        settings = _settings_of(optimizer)
        for name in self._made_by_build & settings.keys():
            del settings[name]
        return _compat.stand_in(self.clone, **settings)


def _assemble(parts: list[tf.Tensor], variable: Any) -> tf.Tensor:
    """Assemble a gradient from its parts; one of no elements lies in no bucket."""
    if not parts:
        return tf.zeros(variable.shape, variable.dtype)
    return tf.reshape(pack(parts), variable.shape)


def _settings_of(optimizer: Any) -> dict[str, Any]:
    """The plain numbers, texts and switches among an optimizer's attributes."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, (bool, int, float, str, type(None))) and name != "built"
    }
