"""The quick tier runs each feature, and each feature on each of its set-ups."""

from __future__ import annotations

import collections

from tests.harness.registry import load_cases

CASES = load_cases()
STANDARD = [case for case in CASES.values() if case.setups]
QUICK = [case for case in STANDARD if case.quick_setup]


def test_a_case_that_is_left_out_names_one_of_the_quick_tier():
    named = {case.name: case.same_as for case in CASES.values() if case.same_as}
    quick = {case.name for case in QUICK}
    assert {name: other for name, other in named.items() if other not in quick} == {}
    assert not quick & set(named)


def test_the_set_up_of_the_quick_tier_is_one_of_the_case():
    for case in QUICK:
        assert case.quick_setup in case.setups + case.full_setups, case.name


def test_more_than_half_of_the_cases_of_the_standard_tier_are_in_the_quick_one():
    assert len(QUICK) > 0.5 * len(STANDARD)


def test_in_the_quick_tier_each_module_of_cases_sees_each_of_its_set_ups():
    ways = collections.defaultdict(list)
    for case in QUICK:
        ways[case.module, case.setups].append(case.quick_setup)
    for (module, setups), chosen in ways.items():
        # A new case of too few set-ups names a missing one: `quick_setup=`.
        is_covered = len(set(chosen) & set(setups)) == min(len(setups), len(chosen))
        assert is_covered, f"{module}: {set(chosen)} of {setups}"


def test_one_of_the_cases_that_another_stands_for_is_in_the_standard_tier():
    left_out = [case for case in STANDARD if case.same_as]
    standard = {case.same_as for case in left_out if not case.full_only}
    assert {case.same_as for case in left_out} == standard
