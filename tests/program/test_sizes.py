"""Sizes with the number of rows as an unknown hold for any number of rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tfdp.training.program import sizes
from tfdp.training.program.sizes import FREE, ONE, UNKNOWN, ZERO, Size, number, rows

OPERATIONS = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "subtract": (lambda a, b: a - b, lambda a, b: a - b),
    "multiply": (lambda a, b: a * b, lambda a, b: a * b),
    "divide": (lambda a, b: a // b, lambda a, b: a // b),
    "remainder": (lambda a, b: a % b, lambda a, b: a % b),
    "maximum": (lambda a, b: a.maximum(b), max),
    "minimum": (lambda a, b: a.minimum(b), min),
}
OPERANDS = [number(n) for n in (-1, 0, 1, 2, 3, 6, 0.5)] + [
    rows(n) for n in (1, 2, 3, 6, None)
]
# A multiple that is not known, and a size that is the same for any batch.
MULTIPLE, SAME = 5, 7


def value_of(size: Size, count: int):
    """The value of a size in a batch of some rows."""
    if size == FREE:
        return SAME
    if size.kind == "rows":
        return count * (MULTIPLE if size.number is None else size.number)
    return size.number


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_known_of_a_result_holds_for_any_number_of_rows(name):
    symbolic, exact = OPERATIONS[name]
    checked = 0
    for one, other in itertools.product([*OPERANDS, FREE], repeat=2):
        found = symbolic(one, other)
        pairs = {n: (value_of(one, n), value_of(other, n)) for n in range(1, 9)}
        if name in ("divide", "remainder") and any(not b for _, b in pairs.values()):
            continue
        values = {n: exact(*pair) for n, pair in pairs.items()}
        what = f"{one} {name} {other} is {found}"
        if found.kind == "number":
            assert all(value == found.number for value in values.values()), what
        elif found.kind == "rows" and found.number is not None:
            assert all(v == n * found.number for n, v in values.items()), what
        elif found.kind == "rows":
            assert all(v > 0 and v % n == 0 for n, v in values.items()), what
        elif found.kind == "free":
            assert len(set(values.values())) == 1, what
        checked += found.kind != "unknown"
    assert checked > 20


@pytest.mark.parametrize(
    ("one", "other", "result"),
    [
        (rows(2), number(3), rows(6)),
        (rows(6), number(4), rows(24)),
        (rows(4), number(0.5), rows(2)),
        (rows(1), number(0.5), UNKNOWN),
        (rows(1), rows(1), UNKNOWN),
        (rows(1), FREE, rows(None)),
        (rows(1), ZERO, ZERO),
        (FREE, number(2), FREE),
        (UNKNOWN, number(2), UNKNOWN),
    ],
)
def test_products(one, other, result):
    assert one * other == other * one == result


@pytest.mark.parametrize(
    ("one", "other", "result"),
    [
        (rows(6), number(3), rows(2)),
        (rows(6), rows(3), number(2)),
        (rows(1), number(2), UNKNOWN),
        (rows(None), rows(1), FREE),
        (rows(None), number(2), UNKNOWN),
        (number(7), number(2), number(3)),
        (number(7), ZERO, UNKNOWN),
    ],
)
def test_quotients(one, other, result):
    assert one // other == result


@pytest.mark.parametrize(
    ("shapes", "result"),
    [
        ([(rows(1), number(3)), (number(3),)], (rows(1), number(3))),
        ([(rows(1), ONE), (ONE, rows(1))], (rows(1), rows(1))),
        ([(FREE,), (number(4),)], (number(4),)),
        ([(ONE,), ()], (ONE,)),
    ],
)
def test_shapes_broadcast(shapes, result):
    assert sizes.broadcast(shapes) == result


def test_arrays_of_numbers_are_found_again_and_others_are_not_numbers():
    known = np.array([[1, 2], [3, 4]])
    assert np.array_equal(sizes.numbers(sizes.array(known)), known)
    assert sizes.numbers(sizes.array([ONE, rows(1)])) is None
    assert sizes.numbers(None) is None
    assert sizes.product([rows(2), number(3), ONE]) == rows(6)
