"""What the plan says is what the traced step does."""

from __future__ import annotations

import html.parser
from collections.abc import Sequence
from typing import Any

import pytest

import tfdp
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tfdp.ground.plans.buckets import Bucket, Entry
from tfdp.training.compression.algorithm_choice import AlgorithmChoice, WireFormat
from tfdp.training.reduction.communication_plan import CommunicationPlan

CASE_MODULES = ("reduction.cases_plans",)


@pytest.mark.core
def test_plan(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


def plan_of_buckets(names: Sequence[str], **settings: Any) -> CommunicationPlan:
    """The plan of a bucket for each variable of one float32."""
    buckets = [
        Bucket((index,), (Entry(name, (1,), "float32", 4),), "float32")
        for index, name in enumerate(names)
    ]
    return CommunicationPlan(
        **{
            "buckets": tuple(buckets),
            "sparse": (),
            "num_replicas": 2,
            "backend": "ring",
            "routes": (AlgorithmChoice(),) * len(buckets),
            "node_size": 2,
            "traced": True,
            **settings,
        }
    )


class Shown(html.parser.HTMLParser):
    """Tags and texts of a table in a notebook."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.styles: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.styles += [value for name, value in attrs if name == "style"]

    def handle_data(self, data):
        self.texts.append(data)


TABLE_TAGS = {"div", "table", "caption", "thead", "tbody", "tr", "th", "td"}


@pytest.mark.parametrize("count", [1, 200])
def test_a_plan_in_a_notebook_is_a_table_with_a_row_for_each_bucket(count: int):
    plan = plan_of_buckets([f"dense_{i}/kernel" for i in range(count)])
    shown = Shown(plan._repr_html_())
    assert shown.tags.count("tr") == 1 + count
    assert f"dense_{count - 1}/kernel" in shown.texts
    # A long one scrolls, and both themes of a notebook keep their own colors.
    assert "overflow: auto" in shown.styles[0]
    assert not any("color" in style or "background" in style for style in shown.styles)
    assert set(shown.tags) == TABLE_TAGS


@pytest.mark.parametrize("name", ["<script>a & b</script>", "a[/red]b", "[bold]c"])
def test_a_variable_may_have_any_name_in_a_plan(name: str):
    plan = plan_of_buckets([name], sparse=(name,))
    assert str(plan).count(name) == 2
    shown = Shown(plan._repr_html_())
    assert shown.texts.count(name) == 2
    assert set(shown.tags) == TABLE_TAGS


@pytest.mark.parametrize(
    ("count", "replicas", "sharding", "title"),
    [
        (1, 1, "none", "1 all-reduce of 4 bytes over 1 replica (ring)"),
        (2, 2, "none", "2 all-reduces of 8 bytes over 2 replicas (ring)"),
        (1, 2, "optimizer", "1 reduce-scatter and 1 all-gather of 4 bytes"),
        (0, 2, "none", "0 all-reduces of 0 bytes over 2 replicas (ring)"),
    ],
)
def test_the_title_of_a_plan_counts_in_singular_and_plural(
    count: int, replicas: int, sharding: str, title: str
):
    plan = plan_of_buckets(["a"] * count, num_replicas=replicas, sharding=sharding)
    assert title in " ".join(str(plan).split())
    assert title in plan._repr_html_()


def test_sharded_gradients_that_are_compressed_whole_are_all_reduced():
    """PowerSGD halves an all-reduce's bytes here, TopK those of a reduce-scatter."""
    sent: dict[str, int] = {}
    for compressor in (tfdp.compression.PowerSGD(), tfdp.compression.TopK()):
        route = AlgorithmChoice(inner=WireFormat(compressor, ratio=0.5))
        plan = plan_of_buckets(["a"], routes=(route,), sharding="gradients")
        sent[str(plan).split()[1]] = plan.wire_bytes
    assert sent == {"all-reduce": 2 + 2, "reduce-scatter": 1 + 2}
