"""Shapes of the trainable variables of published models, layer by layer.

Nothing is built: gradients of these shapes are what data-parallel training of the
model reduces in each step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

Shape = tuple[int, ...]
ITEM_BYTES = 4  # float32


@dataclasses.dataclass(frozen=True)
class Layer:
    """Trainable variables of a layer.

    Args:
        name: String.
        shapes: Dict from the name of a variable to its shape.
    """

    name: str
    shapes: dict[str, Shape]

    @property
    def num_parameters(self) -> int:
        """Int, elements of all its variables."""
        return sum(map(math.prod, self.shapes.values()))


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """Trainable variables of a model, in the order of the forward pass.

    Args:
        name: String, as on the command line.
        title: String, for people.
        published_parameters: Int, as its authors or a well-known implementation
            give it.
        layers: Tuple of `Layer`.
    """

    name: str
    title: str
    published_parameters: int
    layers: tuple[Layer, ...]

    @property
    def shapes(self) -> dict[str, Shape]:
        """Dict from `layer/variable` to its shape."""
        return {
            f"{layer.name}/{variable}": shape
            for layer in self.layers
            for variable, shape in layer.shapes.items()
        }

    @property
    def num_parameters(self) -> int:
        """Int, elements of all layers."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """Int, size of its gradients in float32."""
        return ITEM_BYTES * self.num_parameters

    def __str__(self) -> str:
        return (
            f"{self.title}: {self.num_parameters:,} parameters in {len(self.shapes)} "
            f"variables of {len(self.layers)} layers"
        )


def _dense(name: str, num_inputs: int, units: int) -> Layer:
    return Layer(name, {"kernel": (num_inputs, units), "bias": (units,)})


def _norm(name: str, width: int) -> Layer:
    return Layer(name, {"gamma": (width,), "beta": (width,)})


def _conv(name: str, size: int, channels: int, filters: int) -> Layer:
    return Layer(name, {"kernel": (size, size, channels, filters)})


def _with_bias(layer: Layer) -> Layer:
    filters = layer.shapes["kernel"][-1]
    return Layer(layer.name, {**layer.shapes, "bias": (filters,)})


@functools.cache
def resnet50() -> PublishedModel:
    """ResNet-50 for 1000 classes, without biases in convolutions.

    Returns:
        `PublishedModel`.

    Example:

    >>> resnet50().num_parameters
    25557032

    Source: He et al. 2016, "Deep Residual Learning for Image Recognition",
    https://arxiv.org/abs/1512.03385, table 1; the number is torchvision's.
    """
    layers = [*_conv_and_norm("conv1", 7, 3, 64)]
    channels = 64
    for stage, num_blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(num_blocks):
            name = f"conv{stage + 2}_block{block + 1}"
            layers += _bottleneck(name, channels, width, has_shortcut=block == 0)
            channels = 4 * width
    layers.append(_dense("classifier", channels, 1000))
    return PublishedModel("resnet50", "ResNet-50", 25_557_032, tuple(layers))


def _conv_and_norm(name: str, size: int, channels: int, filters: int) -> list[Layer]:
    return [_conv(name, size, channels, filters), _norm(f"{name}_norm", filters)]


def _bottleneck(
    name: str, channels: int, width: int, *, has_shortcut: bool
) -> Iterator[Layer]:
    yield from _conv_and_norm(f"{name}_1", 1, channels, width)
    yield from _conv_and_norm(f"{name}_2", 3, width, width)
    yield from _conv_and_norm(f"{name}_3", 1, width, 4 * width)
    if has_shortcut:
        yield from _conv_and_norm(f"{name}_0", 1, channels, 4 * width)


@functools.cache
def vgg16() -> PublishedModel:
    """VGG-16 (configuration D) for 1000 classes.

    Returns:
        `PublishedModel`.

    Example:

    >>> vgg16().num_parameters
    138357544

    Source: Simonyan and Zisserman 2015, "Very Deep Convolutional Networks for
    Large-Scale Image Recognition", https://arxiv.org/abs/1409.1556, table 1 D.
    """
    layers, channels = [], 3
    for stage, (depth, filters) in enumerate(
        ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), start=1
    ):
        for number in range(1, depth + 1):
            conv = _conv(f"block{stage}_conv{number}", 3, channels, filters)
            layers.append(_with_bias(conv))
            channels = filters
    layers.append(_dense("fc1", 7 * 7 * channels, 4096))
    layers.append(_dense("fc2", 4096, 4096))
    layers.append(_dense("predictions", 4096, 1000))
    return PublishedModel("vgg16", "VGG-16", 138_357_544, tuple(layers))


@functools.cache
def bert_large() -> PublishedModel:
    """BERT-large, uncased: embeddings, 24 blocks and the pooler.

    The heads of pre-training are left out. Devlin et al. round to 340 million; the
    number is that of the published checkpoint.

    Returns:
        `PublishedModel`.

    Example:

    >>> bert_large().num_parameters
    335141888

    Source: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional
    Transformers for Language Understanding", https://arxiv.org/abs/1810.04805,
    section 3.
    """
    width, num_blocks = 1024, 24
    layers = [
        Layer("word_embeddings", {"table": (30522, width)}),
        Layer("position_embeddings", {"table": (512, width)}),
        Layer("token_type_embeddings", {"table": (2, width)}),
        _norm("embeddings_norm", width),
    ]
    for block in range(num_blocks):
        layers += _encoder_block(f"block{block}", width)
    layers.append(_dense("pooler", width, width))
    return PublishedModel("bert_large", "BERT-large", 335_141_888, tuple(layers))


def _encoder_block(name: str, width: int) -> Iterator[Layer]:
    for part in ("query", "key", "value", "attention_output"):
        yield _dense(f"{name}_{part}", width, width)
    yield _norm(f"{name}_attention_norm", width)
    yield _dense(f"{name}_intermediate", width, 4 * width)
    yield _dense(f"{name}_output", 4 * width, width)
    yield _norm(f"{name}_output_norm", width)


PUBLISHED_MODELS: dict[str, Callable[[], PublishedModel]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "bert_large": bert_large,
}
