"""Units of sharded parameters, which are gathered together, and owners' ranges.

A unit is a group of parameters that is gathered as one, as in PyTorch's FSDP.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from tfdp.ground import user_code
from tfdp.ground.arguments import check_choice, checked_integer, plain
from tfdp.ground.plans.buckets import Entry
from tfdp.ground.plans.shards import Row, Segment, ShardBucket

# An owner's elements are contiguous in a flattened parameter, so each owner has one
# range: the first element, and the one after the last.
Ranges = tuple[tuple[int, int], ...]

_RESHARDS = (True, False, "node")


@dataclasses.dataclass(frozen=True)
class UnitOptions:
    """Options of units, the groups of parameters that are gathered as one.

    Args:
        layers: Sequence of strings, names of layers. Each named layer is a unit, with
            all layers inside it. Parameters of other layers are divided by size.
            Defaults to none.
        reshard_after_forward: Bool, whether gathered parameters are freed after the
            forward pass of their layers and gathered again for the backward pass. Or
            `"node"`: each replica of a node keeps a part, and the second gather is
            inside nodes only. Defaults to `True`.
        prefetch: Int, the number of units that are gathered ahead of the one that
            computes. Defaults to 1.
        gather_compression: String, `"int8"`, the dtype in which matrices and larger
            tensors are gathered; or `None`. Defaults to `None`.

    Raises:
        ValueError: If an argument has another value.

    Example:

    >>> UnitOptions(layers=["block_0", "block_1"]).layers
    ('block_0', 'block_1')

    Source: `fully_shard` of PyTorch,
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    layers: Sequence[str] = ()
    reshard_after_forward: bool | str = True
    prefetch: int = 1
    gather_compression: str | None = None

    def __post_init__(self) -> None:
        names = self.layers
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_list or not all(isinstance(n, str) and n for n in names):
            raise ValueError(
                "`gather_groups` must be a list of names of layers. "
                f"Received: gather_groups={names!r}"
            )
        object.__setattr__(self, "layers", tuple(dict.fromkeys(names)))
        reshard = self.reshard_after_forward
        if not isinstance(plain(reshard), (bool, str)) or reshard not in _RESHARDS:
            raise ValueError(
                f"`reshard_after_forward` must be one of {_RESHARDS}. "
                f"Received: reshard_after_forward={reshard!r}"
            )
        object.__setattr__(self, "reshard_after_forward", plain(reshard))
        prefetch = checked_integer("prefetch", self.prefetch, 0)
        object.__setattr__(self, "prefetch", prefetch)
        check_choice("gather_compression", self.gather_compression, (None, "int8"))

    @property
    def text(self) -> str:
        """String, the options as arguments of `ShardedOptimizer`."""
        return (
            f"gather_groups={list(self.layers)}, reshard_after_forward="
            f"{self.reshard_after_forward!r}, prefetch={self.prefetch}, "
            f"gather_compression={self.gather_compression!r}"
        )


DEFAULT_UNITS = UnitOptions()


def resolve_gather_groups(
    gather_groups: Sequence[str], units: Sequence[str] | None
) -> Any:
    """Return the names of layers in `gather_groups` or in `units`, its old name.

    If `units` is given, the user is warned that it is deprecated.

    Raises:
        ValueError: If both are given.
    """
    if units is None:
        return gather_groups
    if gather_groups:
        raise ValueError(
            "Give `gather_groups` alone; `units` is its old name. "
            f"Received: gather_groups={gather_groups!r}, units={units!r}"
        )
    user_code.warn("`units` is deprecated and will be removed. Use `gather_groups`.")
    return units


def equal_ranges(size: int, num_owners: int) -> Ranges:
    """Divide the elements of a parameter equally; the last owners may have fewer.

    Args:
        size: Int, elements of the parameter.
        num_owners: Int, the number of owners.

    Returns:
        Tuple with a range, a pair of ints, for each owner.

    Example:

    >>> equal_ranges(7, 3)
    ((0, 3), (3, 6), (6, 7))

    Source: Zhao et al. 2023, https://arxiv.org/abs/2304.11277, section 4.2.
    """
    length = -(-size // num_owners)
    bounds = [min(owner * length, size) for owner in range(num_owners + 1)]
    return tuple(itertools.pairwise(bounds))


def range_of_owner(size: int, num_owners: int, owner: int) -> Ranges:
    """Return ranges that give all elements of a parameter to one owner.

    Arguments are those of `equal_ranges`, and the rank of the owner.

    Example:

    >>> range_of_owner(7, 3, 1)
    ((0, 0), (0, 7), (7, 7))
    """
    return tuple(
        (0, size) if number == owner else (0 if number < owner else size,) * 2
        for number in range(num_owners)
    )


def layer_of(path: str, named: Sequence[str]) -> str:
    """Return the layer whose parameters are gathered with a variable.

    Args:
        path: String, the path of a variable.
        named: Sequence of strings, names of layers. The parameters of a named layer and
            of all layers inside it are gathered together.

    Returns:
        String, the first of `named` that contains the variable, or else the path of
        its layer.

    Example:

    >>> layer_of("model/block_0/dense/kernel", ["block_0"])
    'block_0'
    >>> layer_of("model/dense/kernel", ["block_0"])
    'model/dense'
    """
    inside = [name for name in named if f"/{name}/" in f"/{path}"]
    return inside[0] if inside else path.rpartition("/")[0]


def check_layers(named: Sequence[str], paths: Sequence[str]) -> None:
    """Check that each named layer has parameters.

    Args:
        named: Sequence of strings, names of layers.
        paths: Sequence of strings, the paths of all parameters.

    Raises:
        ValueError: If a layer has no parameters.

    Example:

    >>> check_layers(["dense"], ["model/dense/kernel"])
    """
    for name in named:
        if not any(f"/{name}/" in f"/{path}" for path in paths):
            layers = list(dict.fromkeys(path.rpartition("/")[0] for path in paths))
            raise ValueError(
                f"`gather_groups` names a layer that has no parameters: {name!r}. "
                f"Layers with parameters: {', '.join(layers)}"
            )


def plan_units(
    entries: Sequence[Entry], unit_bytes: int, named: Sequence[str] = ()
) -> list[tuple[int, ...]]:
    """Divide parameters into units: named layers, and runs of other layers by size.

    The parameters of a unit are gathered together.

    Args:
        entries: Sequence of `Entry`, in the order in which a forward pass reads them.
        unit_bytes: Int, largest size of a unit of several layers. A layer is not
            divided.
        named: Sequence of strings, names of layers that are units. Defaults to none.

    Returns:
        List of tuples of ints, for each unit the positions of its parameters in
        `entries`.

    Example:

    >>> paths = "x/kernel", "x/bias", "y/kernel", "z/kernel"
    >>> entries = [Entry(path, (10,), "float32", 4) for path in paths]
    >>> plan_units(entries, 80)
    [(0, 1), (2, 3)]
    >>> plan_units(entries, 200, ["y"])
    [(0, 1), (2,), (3,)]
    """
    units: list[list[int]] = []
    of_layer: dict[str, list[int]] = {}
    room = 0
    layers = [layer_of(entry.name, named) for entry in entries]
    for name, run in itertools.groupby(range(len(entries)), key=layers.__getitem__):
        layer = list(run)
        num_bytes = sum(entries[index].num_bytes for index in layer)
        if name in of_layer:
            of_layer[name] += layer
            continue
        if name in named or not units or num_bytes > room:
            units.append([])
            room = 0 if name in named else unit_bytes
        units[-1] += layer
        room -= num_bytes
        if name in named:
            of_layer[name] = units[-1]
    return [tuple(unit) for unit in units]


def peak_gathered_bytes(unit_bytes: Sequence[int], prefetch: int) -> int:
    """Return the most bytes of parameters that a step has gathered at a time.

    The parameters of a unit, a group of layers, are gathered together. Gathered at a
    time are those of the unit that computes, of the previous unit, whose layers may
    still run, and of the units that are gathered ahead.

    Args:
        unit_bytes: Sequence of ints, the bytes of each unit, in the order of the step.
        prefetch: Int, the number of units that are gathered ahead.

    Returns:
        Int, bytes.

    Example:

    >>> peak_gathered_bytes([10, 40, 10, 10, 30], prefetch=1)
    60
    """
    window = 2 + prefetch
    starts = range(max(1, len(unit_bytes) - window + 1))
    return max(sum(unit_bytes[start : start + window]) for start in starts)


def unit_bucket(
    indices: Sequence[int], ranges: Sequence[Ranges], dtype: str
) -> ShardBucket:
    """Return the bucket of some parameters: one row of concatenated parts per owner.

    Args:
        indices: Sequence of ints, positions of parameters of one dtype.
        ranges: Sequence of `Ranges`, for each of these parameters the range of elements
            of every owner.
        dtype: String, the dtype of the parameters.

    Returns:
        `ShardBucket`.

    Example:

    >>> unit_bucket([0], [((0, 2), (2, 3))], "float32").slice_size
    2
    """
    num_owners = len(ranges[0])
    rows = tuple(
        _row(indices, [ranges_of[owner] for ranges_of in ranges])
        for owner in range(num_owners)
    )
    size = max(sum(segment.size for segment in row) for row in rows)
    return ShardBucket(rows, size, dtype)


def _row(indices: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Row:
    """Return the segments of one owner, given its range of each parameter."""
    return tuple(
        Segment(index, start, stop)
        for index, (start, stop) in zip(indices, ranges, strict=True)
        if start < stop
    )
