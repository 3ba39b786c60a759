"""The file of tuned plans: what is kept, and what anybody may have written."""

from __future__ import annotations

import json
import types

import pytest

from tfdp.features.tuning.plan_cache import (
    KeptPlan,
    PlanChoice,
    load_plan,
    plan_key,
    plans_path,
    store_plan,
)

KEPT = KeptPlan(PlanChoice(4096, 1024, "tree"), "12 % faster than the default [9, 14]")


def variables(*shapes: tuple[int, ...], dtype: str = "float32") -> list:
    return [types.SimpleNamespace(shape=shape, dtype=dtype) for shape in shapes]


def test_plans_are_kept_by_their_keys_beside_each_other(tmp_path):
    path = tmp_path / "deep" / "plans.json"
    assert load_plan("a", path) is None
    assert store_plan("a", KEPT, path)
    assert store_plan("b", KeptPlan(None), path)
    assert load_plan("a", path) == KEPT
    assert load_plan("b", path) == KeptPlan(None)
    assert load_plan("c", path) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        '{"a": 3}',
        '{"a": "3"}',
        '{"a": "{}"}',
        '{"a": "' + "[" * 100_000,
        json.dumps({"a": json.dumps({"choice": 3, "gain": ""})}),
        json.dumps({"a": json.dumps({"choice": None, "gain": 3})}),
        json.dumps({"a": json.dumps({"choice": None, "gain": "x" * 1000})}),
        json.dumps({"a": json.dumps({"choice": None, "gain": "\x1b[2J"})}),
        json.dumps({"a": json.dumps({"choice": {"bucket_bytes": -1}, "gain": ""})}),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_plan_counts_as_none(tmp_path, content: str):
    path = tmp_path / "plans.json"
    path.write_text(content, "utf-8")
    assert load_plan("a", path) is None
    assert store_plan("a", KEPT, path)
    assert load_plan("a", path) == KEPT


def test_the_file_lies_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plans_path() == tmp_path / "tfdp" / "plans.json"
    assert store_plan("a", KEPT)
    assert load_plan("a") == KEPT


def test_a_plan_is_for_its_model_its_cluster_and_its_settings():
    keys = [
        plan_key("two hosts", variables((3, 4), (4,)), ["ring", 1]),
        plan_key("one host", variables((3, 4), (4,)), ["ring", 1]),
        plan_key("two hosts", variables((3, 5), (5,)), ["ring", 1]),
        plan_key("two hosts", variables((3, 4), (4,), dtype="float64"), ["ring", 1]),
        plan_key("two hosts", variables((3, 4), (4,)), ["tree", 1]),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == plan_key("two hosts", variables((3, 4), (4,)), ["ring", 1])
