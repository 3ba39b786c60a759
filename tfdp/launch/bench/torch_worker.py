"""Worker of PyTorch DistributedDataParallel with Gloo; needs no TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdp.launch.bench.channel import OnDemand, Variant, Variants, timed, work
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
    """Build the PyTorch model with the same layers as in `tfdp.launch.bench.fit`.

    Args:
        model: `Model`, the shape to build.

    Returns:
        A `torch.nn.Module` whose outputs are logits.
    """
    import torch

    torch.manual_seed(0)
    families = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer}
    return families[model.family](model)


def _mlp(model: Model) -> Any:
    """Build the MLP: two hidden layers with ReLU, and a linear head.

    Args:
        model: `Model`, whose `width` is the number of units of a hidden layer.

    Returns:
        A `torch.nn.Sequential`.
    """
    from torch import nn

    width = model.width
    return nn.Sequential(
        *(nn.Linear(NUM_INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, NUM_CLASSES),
    )


def _cnn(model: Model) -> Any:
    """Build the CNN: stages of two convolutions and pooling, and a linear head.

    Args:
        model: `Model`, whose `channels` are those of the convolutions of each stage.

    Returns:
        A `torch.nn.Sequential`.
    """
    from torch import nn

    num_inputs, layers = IMAGE_CHANNELS, []
    for channels in model.channels:
        for inputs in (num_inputs, channels):
            layers += [nn.Conv2d(inputs, channels, 3, padding="same"), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        num_inputs = channels
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, *pooled, nn.Linear(num_inputs, NUM_CLASSES))


def _transformer(model: Model) -> Any:
    """Build the pre-norm transformer with causal attention, and a linear head.

    Args:
        model: `Model`, with the width and the numbers of blocks and attention heads.

    Returns:
        A `torch.nn.Module` that maps token ids of shape `[batch, CONTEXT]` to logits of
        shape `[batch, CONTEXT, VOCABULARY]`.
    """
    import torch
    from torch import nn

    class Transformer(nn.Module):
        """Module of the transformer: embeddings, pre-norm blocks and a linear head."""

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

        def forward(self, ids: Any) -> Any:
            """Return the logits of token ids, int64 of shape `[batch, CONTEXT]`."""
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
    """Build a model, and return its training step on a fixed batch with SGD.

    Args:
        model: `Model`, the shape to build.
        batch_size: Int, number of samples of each replica.
        tuned: Bool, whether to use the fastest settings of DDP and SGD instead of
            their defaults. Defaults to `False`.
        alone: Bool, whether to leave out DDP, and so communication. Defaults to
            `False`.

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
    """Return a training step on a fixed batch.

    Args:
        network: `torch.nn.Module` built from `model`, which DDP may wrap.
        optimizer: `torch.optim.Optimizer` of the network's parameters.
        model: `Model`, the shape of the network.
        batch_size: Int, number of samples of each replica.

    Returns:
        Callable that takes the step and returns the loss.
    """
    from torch import nn

    x, y = _batch(model, batch_size)
    loss_function = nn.CrossEntropyLoss()

    def step() -> Any:
        """Take a step and return the loss, a tensor."""
        optimizer.zero_grad()
        loss = loss_function(network(x).flatten(0, -2), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _batch(model: Model, size: int) -> tuple[Any, Any]:
    """Generate `size` random inputs and labels, a pair of tensors for the model."""
    import torch

    if model.family != "transformer":
        images = (IMAGE_CHANNELS, IMAGE_SIDE, IMAGE_SIDE)
        shape = (NUM_INPUTS,) if model.family == "mlp" else images
        return torch.randn(size, *shape), torch.randint(0, NUM_CLASSES, (size,))
    ids = torch.randint(0, VOCABULARY, (size, CONTEXT + 1))
    return ids[:, :-1], ids[:, 1:].flatten()


def join(setup: dict[str, Any]) -> None:
    """Set PyTorch's number of threads, and join its process group by Gloo.

    Args:
        setup: Dict with this worker's `rank`, all `addresses`, and optionally its
            number of `threads`, which is one by default.
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


def make_variants(
    setup: dict[str, Any],
    make_step: Callable[..., Callable[[], Any]] = training_step,
    timed: Callable[[Callable[[], Any]], Variant] = _timed,
) -> Variants:
    """Join the process group, and create the measured variants of this worker.

    Args:
        setup: Dict for `join`, which also has `variants`: the settings of each variant
            by name.
        make_step: Callable that maps a model, a batch size and further settings of a
            variant to a training step. Defaults to `training_step`.
        timed: Callable that maps a training step to a measured variant. Defaults to
            one that measures seconds per step.
    """
    join(setup)
    variant_settings = setup["variants"]

    def make(name: str) -> Variant:
        """Build the model of a named variant, and return a `Variant` that times it."""
        variant = dict(variant_settings[name])
        model, batch_size = Model(**variant.pop("model")), variant.pop("batch_size")
        return timed(make_step(model, batch_size, **variant))

    return OnDemand(make, lambda name: str(variant_settings[name]["model"]))


if __name__ == "__main__":
    work(make_variants)
