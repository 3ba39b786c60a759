"""One process of PyTorch's FSDP2 or DDP with Gloo; needs no TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdp.launch.bench.channel import OnDemand, Variant, Variants, work
from tfdp.launch.bench.models import Model
from tfdp.launch.bench.torch_worker import build, join, step_of
from tools.bench.meters import metered, peak_bytes, peak_of, reset_peak, resident_bytes

_SENT = 25_000_000 // 4
Step = Callable[[], Any]


def training_step(
    model: Model,
    batch_size: int,
    *,
    optimizer: str,
    sharded: bool,
    reshard_after_forward: bool = True,
) -> Step:
    """A training step on a fixed batch by FSDP2, or by DDP with what serves it best.

    Args:
        model: `Model`, a transformer.
        batch_size: Int, samples of each replica.
        optimizer: String, `"adam"` or `"sgd"`.
        sharded: Bool, whether by FSDP2.
        reshard_after_forward: Bool, of FSDP2. Defaults to `True`.

    Returns:
        Callable that takes the step and returns the loss.
    """
    import torch
    from torch import nn

    network = build(model)
    if sharded:
        _shard(network, reshard_after_forward=reshard_after_forward)
    else:
        options = {"gradient_as_bucket_view": True}
        network = nn.parallel.DistributedDataParallel(network, **options)
    made = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer]
    update = made(network.parameters(), lr=1e-3, foreach=True)
    return step_of(network, update, model, batch_size)


def _shard(network: Any, *, reshard_after_forward: bool) -> None:
    """Shard each block, and what is in none of them."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in [*network.blocks.layers, network]:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)


def memory_variants(setup: dict[str, Any]) -> dict[str, Variant]:
    """Peaks of resident memory of one of the two."""
    import torch

    # Gloo takes the memory that it keeps, whatever the model.
    torch.distributed.all_reduce(torch.zeros(_SENT))
    reset_peak()
    step = _step_of(setup)
    start = peak_bytes()

    def whole_step() -> None:
        step().item()

    return {
        "start": lambda steps: start,
        "step": peak_of(whole_step),
        "resident": lambda steps: resident_bytes(),
        "largest unit": lambda steps: 0,
    }


def time_variants(setup: dict[str, Any]) -> OnDemand[Variant]:
    """Step times of both."""
    import torch

    def make(name: str) -> Variant:
        step = _step_of({**setup, **setup["variants"][name]})
        return metered(step, lambda loss: loss.item(), torch.distributed.barrier)

    return OnDemand(make, lambda name: "all")


def _step_of(setup: dict[str, Any]) -> Step:
    options = ("optimizer", "sharded", "reshard_after_forward")
    given = {name: setup[name] for name in options if name in setup}
    return training_step(Model(**setup["model"]), setup["batch_size"], **given)


def make_variants(setup: dict[str, Any]) -> Variants:
    join(setup)
    variants_of = memory_variants if setup["benchmark"] == "memory" else time_variants
    return variants_of(setup)


if __name__ == "__main__":
    work(make_variants)
