"""The quick tier runs each feature, and each feature on each of its set-ups."""

from __future__ import annotations

import collections
import fnmatch

from tests.harness.quick import LEFT_OUT
from tests.harness.registry import load_cases

CASES = load_cases()


def test_each_pattern_leaves_out_a_case_and_names_one_that_stays():
    kept = [name for name, case in CASES.items() if case.quick_setup]
    for pattern, instead in LEFT_OUT.items():
        left = fnmatch.filter(CASES, pattern)
        assert any(CASES[name].setups for name in left), pattern
        assert not set(left) & set(kept), pattern
        if "_" in instead and "..." not in instead:
            assert fnmatch.filter(kept, instead), instead


def test_more_than_half_of_the_cases_of_the_standard_tier_are_in_the_quick_one():
    standard = [case for case in CASES.values() if case.setups]
    quick = [case for case in standard if case.quick_setup]
    assert len(quick) > 0.5 * len(standard)


def test_in_the_quick_tier_each_module_of_cases_sees_each_of_its_set_ups():
    ways = collections.defaultdict(list)
    for case in CASES.values():
        if case.quick_setup:
            ways[case.module, case.setups].append(case.quick_setup)
    for (_, setups), chosen in ways.items():
        assert len(set(chosen) & set(setups)) == min(len(setups), len(chosen))


def test_one_of_the_cases_that_another_stands_for_is_in_the_standard_tier():
    standard = {
        name
        for name, case in CASES.items()
        if case.setups and not case.quick_setup and not case.full_only
    }
    for instead in set(LEFT_OUT.values()):
        patterns = [p for p, other in LEFT_OUT.items() if other == instead]
        found = [fnmatch.filter(standard, pattern) for pattern in patterns]
        assert any(found), instead
