"""The layout of a data file is that by which TensorFlow wrote it."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tfdp.checkpoint.bundle import read_layout

# Their keys fill more than one block of the table, which takes 256 kB.
COUNT = 4000


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    """Files of TensorFlow with many tensors, which were not saved in order."""
    prefix = str(tmp_path_factory.mktemp("bundle") / "shard")
    numbers = np.random.default_rng(0).permutation(COUNT)
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=[key(number) for number in numbers],
        shape_and_slices=[""] * COUNT,
        tensors=[tf.fill([1 + number % 3], int(number)) for number in numbers],
    )
    return prefix


def key(number: int) -> str:
    return f"{number % 7}/{'a long name of a layer ' * 4}{number}:0"


def test_every_tensor_is_where_the_layout_says(prefix):
    layout = read_layout(pathlib.Path(f"{prefix}.index").read_bytes())
    data = pathlib.Path(f"{prefix}.data-00000-of-00001").read_bytes()
    assert sum(place.size for place in layout.values()) == len(data)
    assert len(layout) == COUNT
    for number in range(COUNT):
        place = layout[key(number)]
        found = np.frombuffer(data, "int32", place.size // 4, place.offset)
        assert place.dtype == tf.int32.as_datatype_enum
        assert found.tolist() == [number] * (1 + number % 3)


def test_what_is_no_index_is_refused(prefix):
    content = pathlib.Path(f"{prefix}.index").read_bytes()
    for wrong in (b"", content[:-1]):
        with pytest.raises(ValueError, match="index of a checkpoint"):
            read_layout(wrong)


def test_a_number_without_an_end_is_refused(prefix):
    magic = pathlib.Path(f"{prefix}.index").read_bytes()[-8:]
    with pytest.raises(ValueError, match="more than 64 bits"):
        read_layout(b"\xff" * 40 + magic)
