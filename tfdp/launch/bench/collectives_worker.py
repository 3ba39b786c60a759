"""Worker of `tfdp bench collectives`: collectives to be timed and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup
from tfdp.ground.plans.topology import Topology
from tfdp.ground.plans.traffic import Algorithm
from tfdp.launch.bench.channel import Arm, OnDemand, work
from tfdp.launch.bench.nccl_tests import (
    BACKEND,
    NO_ALGORITHM,
    expected,
    input_of,
    num_wrong,
)
from tfdp.launch.bench.training import make_strategy, timed
from tfdp.training.reduction.algorithm_selector import AlgorithmChoice

_CHECK = "check "


class CollectiveArms:
    """Collectives by name, made when they are first run.

    The arm `all_reduce/ring/4096` takes a number of steps and returns the seconds
    of one; `check all_reduce/ring/4096` returns how many elements are wrong here, and
    `backend` what carries the bytes.

    Args:
        strategy: A strategy of tfdp.
        dtype: String.
    """

    def __init__(self, strategy: Any, dtype: str) -> None:
        self.strategy = strategy
        self._group, self._dtype = strategy.extended.group, tf.as_dtype(dtype)
        # Algorithms of one collective and size take turns.
        self._cases = OnDemand(self._make, lambda n: (n.split("/")[0], n.split("/")[2]))

    def __getitem__(self, name: str) -> Arm:
        if name == BACKEND:
            return lambda _: self._group.backend
        case = self._cases[name.removeprefix(_CHECK)]
        return case.num_wrong if name.startswith(_CHECK) else case.seconds

    def _make(self, name: str) -> _Case:
        collective, algorithm, size = name.split("/")
        length = int(size) // self._dtype.size
        if collective == "all_gather":
            length //= self._group.size  # the size is that of what is gathered
        call = _call(collective, algorithm)
        return _Case(collective, call, self._group, length, self._dtype)


class _Case:
    """One collective of one size on the local replicas."""

    def __init__(
        self,
        collective: str,
        call: Callable[..., tf.Tensor],
        group: ProcessGroup,
        length: int,
        dtype: tf.DType,
    ) -> None:
        self._collective, self._group, self._length = collective, group, length
        self._values = []
        for replica, device in enumerate(group.devices):
            mine = input_of(group.position(replica), length)
            with tf.device(device):
                self._values.append(tf.Variable(tf.cast(mine, dtype)))  # [length]
        values = self._values

        @tf.function(autograph=False)
        def step() -> tuple[tf.Tensor, list[tf.Tensor]]:
            results = []
            for replica, device in enumerate(group.devices):
                with tf.device(device):
                    results.append(call(values[replica].read_value(), group, replica))
            # One element of each tells that all are there, and is cheap to read.
            return tf.stack([result[0] for result in results]), results

        self._step = step
        self.seconds = timed(lambda: step()[0])

    def num_wrong(self, steps: int) -> int:
        """Wrong elements on the local replicas."""
        del steps
        group, wrong = self._group, 0
        for replica, result in enumerate(self._step()[1]):
            place = group.position(replica)
            wanted = expected(self._collective, place, group.size, self._length)
            wrong += num_wrong(result.numpy(), wanted)
        return wrong


def _call(collective: str, algorithm: str) -> Callable[..., tf.Tensor]:
    if algorithm != NO_ALGORITHM:
        return AlgorithmChoice(Algorithm(algorithm)).all_reduce
    return lambda x, group, replica: getattr(Member(group, replica), collective)(x)


def make_arms(
    setup: dict[str, Any], check: Callable[[Topology], None] = lambda topology: None
) -> CollectiveArms:
    """Make the collectives that the driver asks for, once their topology is checked."""
    strategy = make_strategy(setup)
    check(strategy.extended.algorithm_selector.topology)
    return CollectiveArms(strategy, setup["dtype"])


if __name__ == "__main__":
    work(make_arms)
