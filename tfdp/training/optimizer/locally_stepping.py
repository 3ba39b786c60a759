"""Local steps of a `DistributedOptimizer`: when they are taken, and with what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdp.ground import _compat
from tfdp.training.optimizer.shardable import ShardableOptimizer
from tfdp.training.reduction.gradient_reducer import replica_reducer
from tfdp.training.step.grouped_update import decay_and_update


class LocallySteppingOptimizer(ShardableOptimizer):
    """The part of a `DistributedOptimizer` that lets replicas or nodes step alone."""

    def step_locally(self, options: Any, make: Callable, *, alone: bool) -> None:
        """Let replicas, or nodes, step alone, and meet every so many updates.

        Args:
            options: What says when they meet.
            make: Callable of what creates a variable of this optimizer, the options and
                the trained variables, which returns a `StepFeature`.
            alone: Bool, whether from now on; else the state for it is only made.

        Raises:
            ValueError: If this `fit` has other local steps already.
        """
        with _compat.scope_of_optimizer(self):  # of the outer optimizer, too
            self._features.step_locally(options, make, alone=alone)

    def stop_local_steps(self) -> None:
        """Let the replicas train synchronously from now on, once they are averaged."""
        self._features.stop_local_steps()

    def average_replicas(self) -> None:
        """Exchange what replicas have learned alone, so that all have one state.

        Outside a step, on all workers. Without local steps it does nothing.
        """
        local_steps = self._features.local_steps
        if local_steps is None:
            return
        local_steps.rest()
        if int(local_steps.updates.numpy()):
            self._traces.run(self, "average", self._average_replicas)
        local_steps.meet()

    def _average_replicas(self) -> None:
        features, reducer = self._features, replica_reducer()
        assert features.local_steps is not None
        features.local_steps.exchange(self.inner_optimizer, reducer, decay_and_update)
        scale, accumulation = features.scale, features.accumulation
        if scale is None:
            return
        before = scale.read()
        scale.agree(reducer)
        if accumulation is not None:  # of another scale on each replica until now
            accumulation.rescale_own(scale.read() / before)

    def _alone(self) -> Any:
        """The local steps of a step that is being traced, or `None`."""
        features = self._features
        if not features.steps_alone:
            return None
        others = [
            ("sharded state", self.sharding != "none"),
            *((f.label, f.needs_all_replicas) for f in features.installed.values()),
            ("Adasum", self._combines_means),
        ]
        if found := [name for name, is_used in others if is_used]:
            raise ValueError(
                "Replicas that step alone cannot be combined with "
                f"{' and '.join(found)}: these need what all replicas have in every "
                "step. Leave out `LocalSGD` or `DiLoCo`, or the other."
            )
        return features.local_steps
