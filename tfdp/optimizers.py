"""LARS: momentum steps whose length follows the norm of each layer's weights."""

from __future__ import annotations

import numbers
import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.ground import user_code
from tfdp.ground._compat import keras_optimizer
from tfdp.ground.arguments import checked_bool, checked_number

# Names of biases and normalization parameters in Keras's layers, which LARS excludes by
# name as well as by shape: the biases of attention and GRU have two axes, like kernels.
_EXCLUDED_NAMES = ("bias", "beta", "gamma")


@keras.saving.register_keras_serializable(package="tfdp")
class LARS(keras.optimizers.Optimizer):
    """Layer-wise adaptive rate scaling, for training with large batches.

    Each variable `w` with gradient `g` takes a momentum step, whose learning rate
    is scaled by the variable's trust ratio:

    ```python
    trust_ratio = trust_coefficient * norm(w) / (
        norm(g) + weight_decay * norm(w) + epsilon
    )
    velocity = momentum * velocity + learning_rate * trust_ratio * (
        g + weight_decay * w
    )
    w = w - velocity
    ```

    The trust ratio is 1 if `norm(w)` or `norm(g)` is zero. With `nesterov=True`
    the last line subtracts `momentum * velocity` plus the new term instead of
    `velocity`.

    Biases and normalization parameters use plain momentum: a trust ratio of 1 and
    no weight decay. They are the variables with at most one axis, and those whose
    name is `bias`, `beta` or `gamma`. Further variables can be excluded before the
    first step: `exclude_from_layer_adaptation` sets their trust ratio to 1,
    `exclude_from_weight_decay` removes the decay, also from the ratio. As in
    Keras, these two calls are not part of the config.

    A sparse gradient, such as that of an Embedding, is made dense first, and
    duplicate rows are summed. Norms are computed in float32 or wider.

    Args:
        learning_rate: A float, a `keras.optimizers.schedules.LearningRateSchedule`
            or a callable without arguments. Since the trust ratio is small, the rate
            is larger than for SGD: 1 to 30 is usual for large batches, with
            warmup. Defaults to `0.1`.
        momentum: Float between 0 and 1. Defaults to `0.9`.
        trust_coefficient: Float above 0, the length of a step relative to the
            norm of the weights at a learning rate of 1. Defaults to `0.001`.
        weight_decay: Float of at least 0, or `None` for 0. It is part of the
            gradient and of the trust ratio, as in the formula above, unlike the
            decoupled weight decay of other Keras optimizers. Defaults to `0.0005`.
        nesterov: Bool, whether to use Nesterov momentum. Defaults to `False`.
        epsilon: Float of at least 0, added to the denominator of the trust ratio.
            Defaults to `0.0`.
        exclude_biases_and_norms: Bool, whether biases and normalization parameters
            use plain momentum. Defaults to `True`.
        **kwargs: Arguments of all Keras optimizers: `clipnorm`, `clipvalue`,
            `global_clipnorm`, `use_ema`, `ema_momentum`,
            `ema_overwrite_frequency`, `loss_scale_factor`,
            `gradient_accumulation_steps` and `name`.

    Raises:
        ValueError: If a value is out of range or an argument is unknown.

    Example:

    >>> kernel = keras.Variable([[3.0, 4.0]])
    >>> optimizer = LARS(1.0, trust_coefficient=0.5, weight_decay=None)
    >>> optimizer.apply([tf.constant([[300.0, 400.0]])], [kernel])
    >>> kernel.numpy().tolist()
    [[1.5, 2.0]]

    Source: You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional
    Networks", https://arxiv.org/abs/1708.03888, equation 6 and algorithm 1. The
    exclusions follow later practice: Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, for the decay.
    """

    # Velocities contain the learning rate, as those of `SGD` do, so they must be
    # rescaled when the rate changes, as in warmup.
    rate_in_slots = True

    def __init__(
        self,
        learning_rate: Any = 0.1,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        weight_decay: float | None = 0.0005,
        nesterov: bool = False,
        epsilon: float = 0.0,
        exclude_biases_and_norms: bool = True,
        **kwargs: Any,
    ) -> None:
        not_negative = "a number of at least zero"
        if isinstance(learning_rate, (numbers.Real, np.bool_)):
            what = f"{not_negative}, a schedule or a callable"
            rate = checked_number("learning_rate", learning_rate, what, least=0)
            learning_rate = float(rate)
        momentum = checked_number(
            "momentum", momentum, "a number from 0 to 1", least=0, most=1
        )
        trust_coefficient = checked_number(
            "trust_coefficient",
            trust_coefficient,
            "a number greater than zero",
            above=0,
        )
        if weight_decay is not None:
            weight_decay = checked_number(
                "weight_decay", weight_decay, f"{not_negative}, or None", least=0
            )
        epsilon = checked_number("epsilon", epsilon, not_negative, least=0)
        nesterov = checked_bool("nesterov", nesterov)
        excludes = checked_bool("exclude_biases_and_norms", exclude_biases_and_norms)
        if nesterov and not momentum:
            user_code.warn(
                "`nesterov=True` changes nothing without momentum. Give a "
                f"`momentum` above zero. Received: momentum={momentum!r}"
            )
        super().__init__(
            learning_rate=learning_rate, weight_decay=weight_decay, **kwargs
        )
        self.momentum = momentum
        self.trust_coefficient = trust_coefficient
        self.nesterov = nesterov
        self.epsilon = epsilon
        self.exclude_biases_and_norms = excludes
        self.exclude_from_layer_adaptation()

    def exclude_from_layer_adaptation(
        self,
        var_list: Sequence[Any] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Exclude variables from the trust ratio, before the first step.

        A second call replaces the first. Biases and normalization parameters stay
        excluded, see `exclude_biases_and_norms`.

        Args:
            var_list: List of variables.
            var_names: List of strings, regular expressions. A variable is excluded
                if one of them matches a part of its path.

        Raises:
            ValueError: If the optimizer is built, or `var_names` is one string.
        """
        if self.built:
            raise ValueError(
                "`exclude_from_layer_adaptation()` must be called before the "
                "optimizer is built, which the first step does."
            )
        if isinstance(var_names, str):
            raise ValueError(
                "`var_names` must be a list of strings. "
                f"Received: var_names={var_names!r}"
            )
        self._excluded_keys = frozenset(
            keras_optimizer.key_of(self, variable) for variable in var_list or ()
        )
        self._excluded_names = "|".join(var_names or ())

    def exclude_alike(
        self, other: LARS, variables: Sequence[Any], theirs: Sequence[Any]
    ) -> None:
        """Copy exclusions from the trust ratio to the same variables of another `LARS`.

        Args:
            other: `LARS`, not built.
            variables: Sequence of variables of this optimizer.
            theirs: Sequence of the corresponding variables of `other`.
        """
        other._excluded_keys = frozenset(
            keras_optimizer.key_of(other, counterpart)
            for variable, counterpart in zip(variables, theirs, strict=True)
            if self._is_excluded_from_adaptation(variable)
        )

    def build(self, variables: Sequence[Any]) -> None:
        """Create a velocity for each variable, unless the momentum is zero."""
        if self.built:
            return
        super().build(variables)
        self.momentums = []
        if self.momentum:
            self.momentums = self.add_optimizer_variables(variables, "momentum")
        # Exclusions are stored by position: under a strategy `update_step` receives
        # the variables of one replica, whose names differ.
        self._excluded = frozenset(
            index
            for index, variable in enumerate(variables)
            if self.exclude_biases_and_norms and _is_bias_or_norm(variable)
        )
        self._unadapted = self._excluded | {
            index
            for index, variable in enumerate(variables)
            if self._is_excluded_from_adaptation(variable)
        }

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable and its velocity, as in the class's formula."""
        (index,) = keras_optimizer.positions_in(self, [variable])
        dtype = _norm_dtype(variable.dtype)
        gradient = _densify(gradient, variable, dtype)
        weights = tf.cast(tf.convert_to_tensor(variable), dtype)
        rate = tf.cast(tf.convert_to_tensor(learning_rate), dtype)
        decay = self._decay_of(variable, index)
        if index not in self._unadapted:
            rate *= self._trust_ratio(weights, gradient, decay)
        step = rate * (gradient + decay * weights if decay else gradient)
        if self.momentums:
            velocity = self.momentums[index]
            previous = tf.cast(tf.convert_to_tensor(velocity), dtype)
            following = self.momentum * previous + step
            self.assign(velocity, following)
            step = self.momentum * following + step if self.nesterov else following
        self.assign_sub(variable, step)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor, as Keras serializes them."""
        return super().get_config() | {
            "momentum": self.momentum,
            "trust_coefficient": self.trust_coefficient,
            "nesterov": self.nesterov,
            "epsilon": self.epsilon,
            "exclude_biases_and_norms": self.exclude_biases_and_norms,
        }

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        """Skip Keras's decoupled decay: `update_step` applies the decay.

        Guarded by test_weight_decay_is_applied_once.
        """

    def _is_excluded_from_adaptation(self, variable: Any) -> bool:
        """Return whether `exclude_from_layer_adaptation` has excluded a variable."""
        if keras_optimizer.key_of(self, variable) in self._excluded_keys:
            return True
        path = getattr(variable, "path", variable.name)
        return bool(self._excluded_names and re.search(self._excluded_names, path))

    def _decay_of(self, variable: Any, index: int) -> float:
        """Return the weight decay of the variable at `index`, 0 if it is excluded."""
        is_decayed = keras_optimizer.uses_weight_decay(self, variable)
        return self.weight_decay if is_decayed and index not in self._excluded else 0.0

    def _trust_ratio(
        self, weights: tf.Tensor, gradient: tf.Tensor, decay: float
    ) -> tf.Tensor:
        """Return the trust ratio of a variable, a scalar; 1 if a norm is zero."""
        weight_norm, gradient_norm = _norm(weights), _norm(gradient)
        ratio = (self.trust_coefficient * weight_norm) / (
            gradient_norm + decay * weight_norm + self.epsilon
        )
        has_ratio = (weight_norm > 0) & (gradient_norm > 0)
        return tf.where(has_ratio, ratio, tf.ones_like(ratio))


def _is_bias_or_norm(variable: Any) -> bool:
    """Return whether a variable is a bias or a normalization parameter."""
    name = variable.name.split("/")[-1].partition(":")[0]
    return len(variable.shape) <= 1 or name in _EXCLUDED_NAMES


def _norm_dtype(dtype: Any) -> tf.DType:
    """Return float64 for float64, otherwise float32, in which norms are computed."""
    return tf.float64 if tf.as_dtype(dtype) == tf.float64 else tf.float32


def _densify(gradient: Any, variable: Any, dtype: tf.DType) -> tf.Tensor:
    """Convert a gradient to a dense tensor of a dtype, and sum duplicate rows."""
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(gradient.values, dtype)
        return tf.math.unsorted_segment_sum(values, gradient.indices, variable.shape[0])
    return tf.cast(tf.convert_to_tensor(gradient), dtype)


def _norm(tensor: tf.Tensor) -> tf.Tensor:
    """Return the Euclidean norm of all elements of a tensor, a scalar."""
    return tf.sqrt(tf.reduce_sum(tf.square(tensor)))
