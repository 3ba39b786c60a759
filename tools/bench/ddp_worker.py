"""One process of PyTorch's DDP over Gloo, with its hooks; needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdp.launch.bench.channel import Variant, work
from tfdp.launch.bench.models import Model
from tfdp.launch.bench.torch_worker import build, make_variants, step_of
from tools.bench.meters import metered

# With several buckets PowerSGD's hook aborts a process (torch 2.13, Gloo): what its
# callbacks reduce is not started in the same order by all.
_ONE_BUCKET_MB = 4096.0


def training_step(
    model: Model,
    batch_size: int,
    *,
    tuned: bool = False,
    bf16: bool = False,
    power_sgd: dict[str, Any] | None = None,
) -> Callable[[], Any]:
    """A training step on a fixed batch with SGD.

    Args:
        model: `Model`.
        batch_size: Int, samples of each replica.
        tuned: Bool, whether with the settings that serve DDP best. Defaults to
            `False`: with its own.
        bf16: Bool, whether gradients travel as bfloat16. Defaults to `False`.
        power_sgd: Dict of arguments of PyTorch's `PowerSGDState`: gradients travel as
            factors of a low rank from the third step on; or `None`. Defaults to `None`.

    Returns:
        Callable that takes the step and returns the loss.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    network = DistributedDataParallel(
        build(model),
        gradient_as_bucket_view=tuned,
        bucket_cap_mb=None if power_sgd is None else _ONE_BUCKET_MB,
    )
    if bf16:
        _send_bf16(network)
    if power_sgd is not None:
        _send_low_rank(network, power_sgd)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, foreach=tuned)
    return step_of(network, optimizer, model, batch_size)


def _send_bf16(network: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    # DDP refuses the hook itself, by its name, without a GPU. Gloo can do it.
    network.register_comm_hook(
        None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
    )


def _send_low_rank(network: Any, options: dict[str, Any]) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    # As early as PyTorch allows: what it feeds back needs buckets that stay.
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **options)
    network.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _timed(step: Callable[[], Any]) -> Variant:
    """Seconds per step; workers meet before a block."""
    import torch

    run = metered(step, lambda loss: loss.item(), torch.distributed.barrier)
    return lambda steps: run(steps)["seconds"]


if __name__ == "__main__":
    work(lambda setup: make_variants(setup, training_step, _timed))
