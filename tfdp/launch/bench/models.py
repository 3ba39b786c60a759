"""The models that are timed: three families, each of any size."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from tfdp.ground.text import pluralize

FAMILIES = ("mlp", "cnn", "transformer")
# Inputs and classes of the MLP: those of handwritten digits.
NUM_INPUTS, NUM_CLASSES = 784, 10
# Side and channels of the images that the CNN sees, and its stages.
IMAGE_SIDE, IMAGE_CHANNELS, NUM_STAGES = 32, 3, 3
# The transformer reads characters.
VOCABULARY, CONTEXT = 128, 64
_BLOCKS, _HEADS = 4, 4
# Of eight, or four channels, in the width of a model.
_MOST_UNITS = 1 << 24


@dataclasses.dataclass(frozen=True)
class Model:
    """Shape of a model, for Keras and for PyTorch to build it.

    Args:
        family: String, `"mlp"` (two hidden layers), `"cnn"` (three stages of two
            3 x 3 convolutions, each with twice the channels of the one before) or
            `"transformer"` (pre-norm blocks that read characters).
        width: Int, units of a hidden layer, channels of the first stage, or size of
            the embeddings.
        num_blocks: Int, of a transformer. Defaults to `4`.
        num_heads: Int, of a transformer. Defaults to `4`.

    Example:

    >>> Model("mlp", 1024).num_parameters
    1863690
    """

    family: str
    width: int
    num_blocks: int = _BLOCKS
    num_heads: int = _HEADS

    @property
    def channels(self) -> tuple[int, ...]:
        """Tuple of ints, those of each stage of a CNN."""
        return tuple(self.width * 2**stage for stage in range(NUM_STAGES))

    @property
    def num_parameters(self) -> int:
        """Int, all of them are trained."""
        width = self.width
        if self.family == "mlp":
            hidden = (NUM_INPUTS + 1) * width + (width + 1) * width
            return hidden + (width + 1) * NUM_CLASSES
        if self.family == "cnn":
            inputs = (IMAGE_CHANNELS, *self.channels)
            stages = itertools.pairwise(inputs)
            convolutions = sum(
                (9 * given + 1) * made + (9 * made + 1) * made for given, made in stages
            )
            return convolutions + (inputs[-1] + 1) * NUM_CLASSES
        # Two norms, attention (query, key, value, output), and two dense layers.
        block = 4 * width + 4 * (width + 1) * width + 8 * width * width + 5 * width
        ends = (VOCABULARY + CONTEXT) * width + 2 * width + (width + 1) * VOCABULARY
        return self.num_blocks * block + ends

    def __str__(self) -> str:
        size = f"{self.num_parameters / 1e6:.3g} million parameters"
        if self.family == "mlp":
            layers = (NUM_INPUTS, self.width, self.width, NUM_CLASSES)
            return f"MLP {'-'.join(map(str, layers))}, {size}"
        if self.family == "cnn":
            channels = "-".join(map(str, self.channels))
            return (
                f"CNN, 2 convolutions of {channels} channels each, "
                f"images of {IMAGE_SIDE} x {IMAGE_SIDE}, {size}"
            )
        return (
            f"transformer, {pluralize(self.num_blocks, 'block')} of width "
            f"{self.width}, sequence length {CONTEXT}, {size}"
        )


def model_of_size(family: str, millions: float) -> Model:
    """The model of a family that has about so many parameters.

    Args:
        family: String, one of `FAMILIES`.
        millions: Float, parameters in millions.

    Returns:
        A `Model`.

    Raises:
        ValueError: If there is no such model: too small, or of no such family.

    Example:

    >>> print(model_of_size("mlp", 5))
    MLP 784-1872-1872-10, 4.99 million parameters
    """
    if family not in FAMILIES:
        raise ValueError(
            f"The family of models must be one of {FAMILIES}. Received: {family!r}"
        )
    # Widths are full vectors. A CNN has few channels, of which its later stages have
    # multiples.
    unit = 4 if family == "cnn" else 8
    asked = millions * 1e6

    def size(number: int) -> int:
        return Model(family, unit * number).num_parameters

    above = bisect.bisect(range(_MOST_UNITS), asked, key=size)
    models = [Model(family, unit * n) for n in (max(0, above - 1), above)]
    model = min(models, key=lambda model: abs(model.num_parameters - asked))
    if model.width < unit:
        least = Model(family, unit).num_parameters / 1e6
        raise ValueError(
            f"The smallest {family} has {least:.2g} million parameters. "
            f"Received: {millions:g}"
        )
    return model


class ModelSettings:
    """Settings of a benchmark that say which models of a family are trained.

    It adds no field, so that those of each benchmark stay in their own order.
    """

    family: str
    millions: Sequence[float]

    @property
    def models(self) -> dict[str, Model]:
        """The models by what they are called."""
        return {f"{m:g}M": model_of_size(self.family, m) for m in self.millions}
