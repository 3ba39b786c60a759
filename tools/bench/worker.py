"""Sums of tensors in one TensorFlow process, by tfdp's strategy or the stock one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdp.launch.bench.channel import Variant, Variants, timed, work
from tfdp.launch.bench.training import make_strategy, sums_in_packs
from tools.bench.meters import metered


def make_variants(setup: dict[str, Any]) -> Variants:
    """Make sums of plain tensors, by the public API of tf.distribute."""
    strategy = make_strategy(setup)
    variants: dict[str, Variant] = {}
    in_a_row = setup.get("in_a_row", {})
    for name, (lengths, pack_bytes) in setup["variants"].items():
        step = _all_reduce_step(strategy, lengths, pack_bytes, in_a_row.get(name, 1))
        if setup.get("meters"):
            variants[name] = metered(step, lambda result: result.numpy())
        else:
            variants[name] = timed(step)
    return variants


def _all_reduce_step(
    strategy: Any, lengths: Sequence[int], pack_bytes: int, times: int
) -> Callable[[], Any]:
    import tensorflow as tf

    values = [tf.Variable(tf.ones([length])) for length in lengths]

    def replica() -> Any:
        sums = [v.read_value() for v in values]
        for _ in range(times):
            sums = sums_in_packs(sums, pack_bytes)
        return tf.add_n([total[0] for total in sums])

    @tf.function
    def step() -> Any:
        return strategy.experimental_local_results(strategy.run(replica))[0]

    return step


if __name__ == "__main__":
    work(make_variants)
