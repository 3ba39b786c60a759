"""Learning rates and accumulation as plain functions, checked without TensorFlow."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.harness.commands import run_python
from tfdp.ground.plans.schedules import check_steps, scale_learning_rate, steps_at_epoch

NAN, INF = float("nan"), float("inf")
NO_COUNTS = [0, -1, 1.0, 2.5, True, False, "4", None, [4]]


def test_importing_schedules_does_not_import_tensorflow():
    code = "import sys, tfdp.ground.plans.schedules; print('tensorflow' in sys.modules)"
    done = run_python("-c", code, deadline_seconds=60)
    assert done.output.split() == ["False"]


def test_linear_rule_multiplies_by_the_scale():
    assert scale_learning_rate(0.25, 8) == 2.0
    assert scale_learning_rate(0.25, 8, rule="linear") == 2.0
    assert scale_learning_rate(3, 0.5) == 1.5


def test_square_root_rule_multiplies_by_its_root():
    assert scale_learning_rate(0.25, 16, rule="sqrt") == 1.0
    assert scale_learning_rate(0.5, 2, rule="sqrt") == 0.5 * math.sqrt(2)


def test_scaled_rate_is_a_python_float_that_keras_takes():
    assert type(scale_learning_rate(np.float32(0.5), np.int64(2))) is float
    assert type(scale_learning_rate(1, 2)) is float


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_scaling_twice_is_scaling_by_the_product(rule: str):
    twice = scale_learning_rate(scale_learning_rate(0.1, 3, rule=rule), 5, rule=rule)
    assert twice == pytest.approx(scale_learning_rate(0.1, 15, rule=rule), rel=1e-15)


@pytest.mark.parametrize("value", [0, -1, -0.5, NAN, INF, True, "8", None, [8]])
def test_rate_or_scale_that_is_no_positive_number_is_refused(value: object):
    with pytest.raises(ValueError, match="`scale` must be a number") as caught:
        scale_learning_rate(0.1, value)
    assert str(caught.value).endswith(f"Received: scale={value!r}")
    with pytest.raises(ValueError, match="`learning_rate` must be") as caught:
        scale_learning_rate(value, 8)
    assert str(caught.value).endswith(f"Received: learning_rate={value!r}")


@pytest.mark.parametrize("rule", ["Linear", "root", "", None, 1])
def test_unknown_rule_is_refused_and_the_known_ones_listed(rule: object):
    with pytest.raises(ValueError, match='"linear" or "sqrt"') as caught:
        scale_learning_rate(0.1, 8, rule=rule)
    assert str(caught.value).endswith(f"Received: rule={rule!r}")


def test_a_number_of_steps_holds_for_all_epochs():
    assert [steps_at_epoch(4, epoch) for epoch in (0, 1, 1000)] == [4, 4, 4]


def test_a_dict_of_steps_holds_from_each_epoch_to_the_next():
    steps = {0: 8, 5: 4, 6: 1}
    assert [steps_at_epoch(steps, e) for e in range(8)] == [8] * 5 + [4, 1, 1]


def test_the_order_of_a_dict_of_steps_does_not_matter():
    steps = {6: 1, 0: 8, 5: 4}
    assert [steps_at_epoch(steps, e) for e in range(8)] == [8] * 5 + [4, 1, 1]


def test_nothing_is_accumulated_before_the_first_epoch_of_a_dict():
    assert [steps_at_epoch({3: 4}, epoch) for epoch in range(5)] == [1, 1, 1, 4, 4]


def test_integers_of_numpy_are_integers():
    steps = {np.int64(0): np.int32(8), np.int64(2): np.int64(4)}
    assert [steps_at_epoch(steps, np.int64(epoch)) for epoch in (1, 2)] == [8, 4]
    assert type(steps_at_epoch(np.int64(8), 0)) is int


@pytest.mark.parametrize("value", NO_COUNTS)
def test_steps_that_are_no_positive_integer_are_refused(value: object):
    expected = "`steps` must be an integer of at least 1"
    with pytest.raises(ValueError, match=expected) as caught:
        steps_at_epoch(value, 0)
    assert str(caught.value).endswith(f"Received: steps={value!r}")


@pytest.mark.parametrize(
    "steps",
    [{}]
    + [{0: 8, 5: value} for value in NO_COUNTS]
    + [{key: 4} for key in (-1, 0.0, 1.5, True, "0", None)],
)
def test_dict_that_does_not_map_epochs_to_steps_is_refused(steps: dict):
    with pytest.raises(ValueError, match="`steps` must map at least one epoch") as e:
        steps_at_epoch(steps, 0)
    assert str(e.value).endswith(f"Received: steps={steps!r}")


@pytest.mark.parametrize("epoch", [-1, 0.0, True, "0", None])
def test_epoch_that_is_no_integer_is_refused(epoch: object):
    expected = "`epoch` must be an integer of at least 0"
    with pytest.raises(ValueError, match=expected) as caught:
        steps_at_epoch({0: 8}, epoch)
    assert str(caught.value).endswith(f"Received: epoch={epoch!r}")


def test_steps_are_checked_under_the_name_that_the_caller_uses():
    with pytest.raises(ValueError, match="Received: accumulation_steps=0"):
        check_steps(0, name="accumulation_steps")
    check_steps(1, name="accumulation_steps")
    check_steps({0: 1})
