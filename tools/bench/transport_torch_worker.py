"""One process of PyTorch's Gloo; needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdp.launch.bench.channel import Variants, work
from tfdp.launch.bench.torch_worker import join
from tools.bench.meters import metered


def all_reduce_step(lengths: Sequence[int]) -> Callable[[], None]:
    """Sums of float32 tensors in place, all under way at once, as DDP asks for them.

    Args:
        lengths: Sequence of ints, elements of each tensor.

    Returns:
        Callable.
    """
    import torch
    from torch import distributed

    tensors = [torch.ones(length) for length in lengths]

    def step() -> None:
        started = [distributed.all_reduce(each, async_op=True) for each in tensors]
        for each in started:
            each.wait()

    return step


def make_variants(setup: dict[str, Any]) -> Variants:
    """Make a variant for each size."""
    join(setup)
    return {
        name: metered(all_reduce_step(lengths))
        for name, lengths in setup["variants"].items()
    }


if __name__ == "__main__":
    work(make_variants)
