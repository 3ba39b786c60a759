"""The benchmark's models: three families of any size."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from tfdp.ground.text import pluralize

FAMILIES = ("mlp", "cnn", "transformer")
# The MLP's inputs have the size of MNIST's images, 28 x 28 pixels. The MLP and the CNN
# have 10 classes, like MNIST and CIFAR-10.
NUM_INPUTS, NUM_CLASSES = 784, 10
# As in CIFAR-10, the CNN's images have 32 x 32 pixels of 3 channels. Each stage halves
# the side, so three stages leave 4 x 4.
IMAGE_SIDE, IMAGE_CHANNELS, NUM_STAGES = 32, 3, 3
# The transformer reads sequences of 64 ASCII characters: with only 128 of these, most
# parameters are in the blocks, not in the embeddings.
VOCABULARY, CONTEXT = 128, 64
_BLOCKS, _HEADS = 4, 4
# The search for a width ends here, in units of 8 (of 4 for a CNN): a wider model would
# not fit in any memory.
_MAX_UNITS = 1 << 24
_WEIGHT_BYTES = 4  # Keras and PyTorch create weights as float32


@dataclasses.dataclass(frozen=True)
class Model:
    """Shape of a model, from which Keras or PyTorch builds it.

    Args:
        family: String, `"mlp"` (two hidden layers), `"cnn"` (three stages of two
            3 x 3 convolutions; each stage has twice the channels of the previous one)
            or `"transformer"` (pre-norm blocks on characters).
        width: Int, units of a hidden layer, channels of the first stage, or size of
            the embeddings.
        num_blocks: Int, number of blocks of a transformer. Defaults to `4`.
        num_heads: Int, number of attention heads of a transformer. Defaults to `4`.

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
        """Tuple of ints, the channels of each stage of a CNN."""
        return tuple(self.width * 2**stage for stage in range(NUM_STAGES))

    @property
    def num_parameters(self) -> int:
        """Int, number of parameters, all of which are trained."""
        width = self.width
        if self.family == "mlp":
            hidden = (NUM_INPUTS + 1) * width + (width + 1) * width
            return hidden + (width + 1) * NUM_CLASSES
        if self.family == "cnn":
            inputs = (IMAGE_CHANNELS, *self.channels)
            stages = itertools.pairwise(inputs)
            convolutions = sum(
                (9 * num_inputs + 1) * num_outputs + (9 * num_outputs + 1) * num_outputs
                for num_inputs, num_outputs in stages
            )
            return convolutions + (inputs[-1] + 1) * NUM_CLASSES
        # The parameters are counted by a formula, since `model_of_size` tries many
        # widths. A transformer's block has two norms, attention (query, key, value,
        # output) and two dense layers. Outside of the blocks are the embeddings, the
        # last norm and the linear head.
        block = 4 * width + 4 * (width + 1) * width + 8 * width * width + 5 * width
        ends = (VOCABULARY + CONTEXT) * width + 2 * width + (width + 1) * VOCABULARY
        return self.num_blocks * block + ends

    def __str__(self) -> str:
        """Describe the layers and the size: "MLP 784-8-8-10, 0.00644 million ..."."""
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
    """Return the model of a family whose size is closest to a requested one.

    Args:
        family: String, one of `FAMILIES`.
        millions: Float, requested number of parameters in millions.

    Returns:
        `Model`.

    Raises:
        ValueError: If the size is below the smallest of the family, or the weights do
            not fit in memory.

    Example:

    >>> print(model_of_size("mlp", 5))
    MLP 784-1872-1872-10, 4.99 million parameters
    """
    # Widths are multiples of 8, which fill vector registers. The channels of a CNN
    # double from stage to stage, so 4 in the first stage are enough.
    unit = 4 if family == "cnn" else 8
    requested = millions * 1e6

    def size(num_units: int) -> int:
        """Return the number of parameters of a model.

        Args:
            num_units: Int, width of the model in units of 8, or of 4 for a CNN.
        """
        return Model(family, unit * num_units).num_parameters

    above = bisect.bisect(range(_MAX_UNITS), requested, key=size)
    models = [Model(family, unit * n) for n in (max(0, above - 1), above)]
    model = min(models, key=lambda model: abs(model.num_parameters - requested))
    if model.width < unit:
        least = Model(family, unit).num_parameters / 1e6
        raise ValueError(
            f"The smallest {family} has {least:.2g} million parameters. "
            f"Received: {millions:g}"
        )
    # `free_bytes` needs psutil, and is imported late: another library in the comparison
    # may run in its own Python environment, which also imports this module, and may
    # lack psutil.
    from tfdp.ground.base.memory import free_bytes

    needed, free = _WEIGHT_BYTES * model.num_parameters, free_bytes()
    if needed > free:
        raise ValueError(
            f"The weights of such a model need {needed / 2**30:,.1f} GB, but "
            f"{free / 2**30:,.1f} GB of memory are free. Received: {millions:g}"
        )
    return model


class ModelSettings:
    """Base class of settings of a benchmark that trains models of one family.

    It is not a dataclass, so that each benchmark orders its own fields.

    Attributes:
        family: String, one of `FAMILIES`.
        millions: Sequence of floats, sizes of the models in million parameters.
    """

    family: str
    millions: Sequence[float]

    @property
    def models(self) -> dict[str, Model]:
        """Dict of `Model` by name, such as `"5M"`."""
        return {f"{m:g}M": model_of_size(self.family, m) for m in self.millions}
