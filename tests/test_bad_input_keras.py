"""Bad input through Keras: one clear sentence on every worker, and soon."""

from __future__ import annotations

import pytest

from harness.pool import ClusterPool
from harness.registry import load_cases

# Set-ups of this file have clusters of their own: an error may spoil them.
GROUP = "bad_input"
WITHIN_SECONDS = 10.0


def _errors(clusters: ClusterPool, name: str, setup_name: str) -> list[str]:
    """Returns what was raised on each worker, all in time."""
    case = load_cases(("bad_input",))[name]
    texts = []
    for results in clusters.run(case, setup_name, group=GROUP):
        assert results["local/type"] == "ValueError", results["local/text"]
        assert results["local/seconds"] < WITHIN_SECONDS
        texts.append(str(results["local/text"]))
    return texts


@pytest.mark.parametrize("setup_name", ["mirrored", "two_workers"])
def test_model_built_outside_the_scope_is_refused(clusters, setup_name):
    for text in _errors(clusters, "model_built_outside_the_scope", setup_name):
        assert "scope" in text


@pytest.mark.parametrize("setup_name", ["mirrored", "two_workers"])
def test_batch_size_smaller_than_the_replicas_is_refused(clusters, setup_name):
    name = "batch_size_smaller_than_the_replicas"
    for text in _errors(clusters, name, setup_name):
        assert "replicas, 2" in text
        assert "Received: batch_size=1" in text


@pytest.mark.parametrize("setup_name", ["mirrored", "two_workers"])
def test_static_batch_smaller_than_the_replicas_is_refused(clusters, setup_name):
    name = "static_batch_smaller_than_the_replicas"
    for text in _errors(clusters, name, setup_name):
        assert "replicas, 2" in text
        assert "Received: batch_size=1" in text


def test_dataset_shuffled_with_other_seeds_on_two_workers_is_refused(clusters):
    for text in _errors(clusters, "shuffled_dataset_of_other_seeds", "two_workers"):
        assert "same `seed` on every worker" in text


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("other_shapes_on_two_workers", "other/kernel"),
        ("another_order_on_two_workers", "left/kernel"),
        ("another_dtype_on_two_workers", "last/kernel"),
        ("another_layer_on_one_worker", "last/kernel"),
        ("another_order_of_calls_on_two_workers", "right/"),
    ],
)
def test_different_models_on_two_workers_are_refused_by_both(clusters, name, variable):
    for text in _errors(clusters, name, "two_workers"):
        assert variable in text
