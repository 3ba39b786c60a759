"""Worker of `tfdp bench collectives`: times collectives, and checks their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup
from tfdp.ground.plans.topology import Topology
from tfdp.ground.plans.traffic import Algorithm
from tfdp.launch.bench.channel import OnDemand, Variant, work
from tfdp.launch.bench.nccl_tests import (
    BACKEND,
    NO_ALGORITHM,
    expected,
    input_of,
    num_wrong,
)
from tfdp.launch.bench.training import make_strategy, timed
from tfdp.training.reduction.algorithm_selector import AlgorithmChoice

# Results are checked by separate variants, whose names have this prefix, so checks take
# no measured time.
_CHECK = "check "


class CollectiveVariants:
    """Mapping of the measured variants of all collectives, created on first use.

    The variant `all_reduce/ring/4096` returns the seconds of one call;
    `check all_reduce/ring/4096` returns the number of wrong elements on the local
    replicas, and `backend` returns the name of the communication backend.

    Args:
        strategy: A strategy of tfdp.
        dtype: String, type of the elements.
    """

    def __init__(self, strategy: Any, dtype: str) -> None:
        self.strategy = strategy
        self._group, self._dtype = strategy.extended.group, tf.as_dtype(dtype)
        # Blocks of the algorithms of one collective and size alternate, so their cases
        # stay in memory together.
        self._cases = OnDemand(self._make, lambda n: (n.split("/")[0], n.split("/")[2]))

    def __getitem__(self, name: str) -> Variant:
        if name == BACKEND:
            return lambda _: self._group.backend
        case = self._cases[name.removeprefix(_CHECK)]
        return case.num_wrong if name.startswith(_CHECK) else case.seconds

    def _make(self, name: str) -> _Case:
        """Create the `_Case` of the name `collective/algorithm/bytes`."""
        collective, algorithm, size = name.split("/")
        length = int(size) // self._dtype.size
        if collective == "all_gather":
            # As in nccl-tests, the size is that of the larger of input and output. The
            # output of an all-gather is larger, since it has the inputs of all
            # replicas.
            length //= self._group.size
        call = _call(collective, algorithm)
        return _Case(collective, call, self._group, length, self._dtype)


class _Case:
    """One collective of one size on the local replicas.

    Args:
        collective: String, name of the collective.
        call: Callable that runs the collective; takes the tensor of a replica, the
            group, and the local index of the replica.
        group: `ProcessGroup` of all replicas.
        length: Int, number of elements that each replica contributes.
        dtype: Type of the elements.

    Attributes:
        seconds: `Variant` that returns the seconds per call.
    """

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
            array = input_of(group.position(replica), length)
            with tf.device(device):
                self._values.append(tf.Variable(tf.cast(array, dtype)))
        values = self._values

        @tf.function(autograph=False)
        def step() -> tuple[tf.Tensor, list[tf.Tensor]]:
            """Run the collective on the local replicas.

            Returns:
                Tuple of a tensor `[replicas]`, the first element of each replica's
                result, and the list of all results.
            """
            results = []
            for replica, device in enumerate(group.devices):
                with tf.device(device):
                    results.append(call(values[replica].read_value(), group, replica))
            # Reading one element of each replica's result is cheap, and waits for the
            # collective.
            return tf.stack([result[0] for result in results]), results

        self._step = step
        self.seconds = timed(lambda: step()[0])

    def num_wrong(self, steps: int) -> int:
        """Run the collective once, and count wrong elements on the local replicas.

        Args:
            steps: Int, not used: every measured variant takes a number of steps.
        """
        del steps
        group, wrong = self._group, 0
        for replica, result in enumerate(self._step()[1]):
            place = group.position(replica)
            wanted = expected(self._collective, place, group.size, self._length)
            wrong += num_wrong(result.numpy(), wanted)
        return wrong


def _call(collective: str, algorithm: str) -> Callable[..., tf.Tensor]:
    """Return a function that runs a collective on one local replica.

    Args:
        collective: String, name of the collective, a method of `Member`.
        algorithm: String, algorithm of an all-reduce; `NO_ALGORITHM` for any other
            collective.

    Returns:
        Callable that takes the replica's tensor, the `ProcessGroup` and the index of
        the replica among the local ones, and returns the replica's result.
    """
    if algorithm != NO_ALGORITHM:
        return AlgorithmChoice(Algorithm(algorithm)).all_reduce
    return lambda x, group, replica: getattr(Member(group, replica), collective)(x)


def make_variants(
    setup: dict[str, Any], check: Callable[[Topology], None] = lambda topology: None
) -> CollectiveVariants:
    """Create the measured variants of a worker, after a check of the topology.

    Args:
        setup: Dict for `make_strategy`, which also has `dtype`, a string.
        check: Callable that raises `ValueError` for a `Topology` that cannot run the
            benchmark. Defaults to no check.
    """
    strategy = make_strategy(setup)
    check(strategy.extended.algorithm_selector.topology)
    return CollectiveVariants(strategy, setup["dtype"])


if __name__ == "__main__":
    work(make_variants)
