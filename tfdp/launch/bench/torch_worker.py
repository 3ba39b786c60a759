"""One process of PyTorch DistributedDataParallel with Gloo; needs no TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdp.launch.bench.channel import Arm, Arms, OnDemand, timed, work
from tfdp.launch.bench.models import (
    CONTEXT,
    IMAGE_CHANNELS,
    IMAGE_SIDE,
    NUM_CLASSES,
    NUM_INPUTS,
    VOCABULARY,
    Model,
)


def build(model: Model) -> Any:
    """The model as `tfdp.launch.bench.fit` builds it, layer by layer.

    Args:
        model: `Model`.

    Returns:
        A `torch.nn.Module` whose outputs are logits.
    """
    import torch

    torch.manual_seed(0)
    families = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer}
    return families[model.family](model)


def _mlp(model: Model) -> Any:
    from torch import nn

    width = model.width
    return nn.Sequential(
        *(nn.Linear(NUM_INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, NUM_CLASSES),
    )


def _cnn(model: Model) -> Any:
    from torch import nn

    given, layers = IMAGE_CHANNELS, []
    for channels in model.channels:
        for inputs in (given, channels):
            layers += [nn.Conv2d(inputs, channels, 3, padding="same"), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        given = channels
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, *pooled, nn.Linear(given, NUM_CLASSES))


def _transformer(model: Model) -> Any:
    import torch
    from torch import nn

    class Transformer(nn.Module):
        """Embeddings, pre-norm blocks and a linear head."""

        def __init__(self) -> None:
            super().__init__()
            width = model.width
            self.tokens = nn.Embedding(VOCABULARY, width)
            self.positions = nn.Embedding(CONTEXT, width)
            block = nn.TransformerEncoderLayer(
                *(width, model.num_heads, 4 * width, 0.0, "gelu"),
                batch_first=True,
                norm_first=True,
            )
            self.blocks = nn.TransformerEncoder(
                block, model.num_blocks, nn.LayerNorm(width), enable_nested_tensor=False
            )
            self.head = nn.Linear(width, VOCABULARY)

        def forward(self, ids: Any) -> Any:  # [batch, CONTEXT], int64
            x = self.tokens(ids) + self.positions(torch.arange(CONTEXT))
            mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
            return self.head(self.blocks(x, mask=mask, is_causal=True))

    return Transformer()


def training_step(
    model: Model,
    batch_size: int,
    *,
    tuned: bool = False,
    alone: bool = False,
) -> Callable[[], Any]:
    """A training step on a fixed batch with SGD.

    Args:
        model: `Model`.
        batch_size: Int, samples of each replica.
        tuned: Bool, whether with the settings that serve DDP best. Defaults to
            `False`: with its own.
        alone: Bool, whether without DDP: nothing is communicated. Defaults to `False`.

    Returns:
        Callable that takes the step and returns the loss.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    network = build(model)
    if not alone:
        network = DistributedDataParallel(network, gradient_as_bucket_view=tuned)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, foreach=tuned)
    return step_of(network, optimizer, model, batch_size)


def step_of(
    network: Any, optimizer: Any, model: Model, batch_size: int
) -> Callable[[], Any]:
    """A step on a fixed batch.

    Args:
        network: `torch.nn.Module`, `model` or what is made of it.
        optimizer: `torch.optim.Optimizer` of its parameters.
        model: `Model`.
        batch_size: Int, samples of each replica.

    Returns:
        Callable that takes the step and returns the loss.
    """
    from torch import nn

    x, y = _batch(model, batch_size)
    loss_function = nn.CrossEntropyLoss()

    def step() -> Any:
        optimizer.zero_grad()
        loss = loss_function(network(x).flatten(0, -2), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _batch(model: Model, size: int) -> tuple[Any, Any]:
    import torch

    if model.family != "transformer":
        images = (IMAGE_CHANNELS, IMAGE_SIDE, IMAGE_SIDE)
        shape = (NUM_INPUTS,) if model.family == "mlp" else images
        return torch.randn(size, *shape), torch.randint(0, NUM_CLASSES, (size,))
    ids = torch.randint(0, VOCABULARY, (size, CONTEXT + 1))
    return ids[:, :-1], ids[:, 1:].flatten()


def join(setup: dict[str, Any]) -> None:
    """Make this process a member of the workers' group.

    Args:
        setup: Dict, its `rank`, all `addresses`, and its `threads`, one by default.
    """
    import torch

    torch.set_num_threads(setup.get("threads", 1))
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{setup['addresses'][0]}",
        rank=setup["rank"],
        world_size=len(setup["addresses"]),
    )


_timed = functools.partial(timed, finish=lambda loss: loss.item())


def make_arms(
    setup: dict[str, Any],
    make_step: Callable[..., Callable[[], Any]] = training_step,
    timed: Callable[[Callable[[], Any]], Arm] = _timed,
) -> Arms:
    """Make the training steps that the driver asks for.

    Args:
        setup: Dict, see `join`, and `arms`.
        make_step: Callable of a model, a batch size and what else an arm is told.
        timed: Callable of a step, which returns the arm.
    """
    join(setup)
    told = setup["arms"]

    def make(name: str) -> Arm:
        arm = dict(told[name])
        model, batch_size = Model(**arm.pop("model")), arm.pop("batch_size")
        return timed(make_step(model, batch_size, **arm))

    return OnDemand(make, lambda name: str(told[name]["model"]))


if __name__ == "__main__":
    work(make_arms)
