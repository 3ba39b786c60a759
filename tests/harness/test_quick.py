"""The quick tier runs each feature, and each subject on each of its set-ups."""

from __future__ import annotations

import collections

from tests.harness.registry import load_cases

CASES = load_cases()
QUICK = [case for case in CASES.values() if case.quick_setup]


def test_a_case_that_is_left_out_names_one_of_the_quick_tier():
    named = {case.name: case.same_as for case in CASES.values() if case.same_as}
    quick = {case.name for case in QUICK}
    assert {name: other for name, other in named.items() if other not in quick} == {}
    assert not quick & set(named)


def test_the_set_up_of_the_quick_tier_is_one_of_the_case():
    for case in QUICK:
        assert case.quick_setup in case.setups, case.name


def test_in_the_quick_tier_each_subject_sees_each_of_its_set_ups():
    seen, possible = collections.defaultdict(list), collections.defaultdict(set)
    for case in QUICK:
        subject = case.module.partition(".")[0]
        seen[subject].append(case.quick_setup)
        possible[subject].update(case.setups)
    for subject, chosen in seen.items():
        # A cheap case of the subject names the set-up that is missing: `quick_setup=`.
        missing = possible[subject].difference(chosen)
        has_more_cases = len(chosen) > len(set(chosen))
        assert not missing or not has_more_cases, f"{subject}: {missing}"
