"""The first difference between workers' settings is named by its path."""

from __future__ import annotations

import math

import pytest

from tfdp.communication.coordination.facts import describe_difference


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (({"a": {"b": 1.0}}, {"a": {"b": None}}), "a/b: 1.0 on worker 0, None on"),
        (({"a": [1, 2]}, {"a": [1]}), "a/1: 2 on worker 0, nothing on worker 1"),
        (({}, {"a": {"b": "c"}}), "a: nothing on worker 0, {'b': 'c'} on worker 1"),
        (({"a": 1}, {"a": [1]}), "a: 1 on worker 0, [1] on worker 1"),
        ((2, 2, 3), ": 2 on worker 0, 2 on worker 1, 3 on worker 2"),
        (({"a": 1, "b": 2}, {"b": 3, "a": 4}), "a: 1 on worker 0, 4 on worker 1"),
    ],
)
def test_the_first_difference_is_named_with_each_workers_value(values, expected):
    assert describe_difference(dict(enumerate(values))).startswith(expected)


def test_long_values_are_cut():
    text = describe_difference({0: {"a": "x" * 500}, 3: {"a": "y"}})
    assert len(text) < 100
    assert text.endswith("... on worker 0, 'y' on worker 3")


@pytest.mark.parametrize(
    "value", [{"a": [1, {"b": None}]}, [math.nan], {"a": 1.0}, "text", None]
)
def test_equal_values_have_no_difference(value):
    assert describe_difference({0: value, 1: value}) == ""


def test_the_order_of_a_dict_is_no_difference():
    assert describe_difference({0: {"a": 1, "b": 2}, 1: {"b": 2, "a": 1}}) == ""


def test_not_a_number_is_like_itself():
    assert describe_difference({0: float("nan"), 1: float("nan")}) == ""
