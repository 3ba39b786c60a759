"""Bad input through Keras: one clear sentence on every worker, and soon."""

from __future__ import annotations

import pytest

from tests.harness.pool import ClusterPool
from tests.harness.registry import load_cases
from tests.harness.tiers import standard

# Set-ups of this file have clusters of their own: an error may spoil them.
GROUP = "bad_input"
WITHIN_SECONDS = 10.0


def _errors(clusters: ClusterPool, name: str, setup_name: str) -> list[str]:
    """Returns what was raised on each worker, all in time."""
    case = load_cases(("keras_hooks.cases_bad_input",))[name]
    texts = []
    for results in clusters.run(case, setup_name, group=GROUP):
        assert results["local/type"] == "ValueError", results["local/text"]
        assert results["local/seconds"] < WITHIN_SECONDS
        texts.append(str(results["local/text"]))
    return texts


@pytest.mark.parametrize("setup_name", [standard("mirrored"), "two_workers"])
def test_model_built_outside_the_scope_is_refused(clusters, setup_name):
    for text in _errors(clusters, "model_built_outside_the_scope", setup_name):
        assert "scope" in text


@pytest.mark.parametrize("setup_name", [standard("mirrored"), "two_workers"])
def test_batch_size_smaller_than_the_replicas_is_refused(clusters, setup_name):
    name = "batch_size_smaller_than_the_replicas"
    for text in _errors(clusters, name, setup_name):
        assert "replicas, 2" in text
        assert "Received: batch_size=1" in text


@pytest.mark.parametrize("setup_name", [standard("mirrored"), "two_workers"])
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


ROWS = "All parts of a batch must have the same number of rows"
FEATURES = "The data holds no features"
SENTENCES = {
    "arrays": (ROWS, "x['a'] with 8 rows, x['b'] with 6, y with 8"),
    "arrays of predict": (ROWS, "x['a'] with 8 rows, x['b'] with 6"),
    "a batch": (ROWS, "x[0] with 8 rows, y with 7"),
    "a dataset": (ROWS, "batch[0] with 8 rows, batch[1] with 1"),
    "unknown rows": (ROWS, "batch[0]['a'] with 8 rows, batch[1] with 7"),
    "no list": (FEATURES, "Received: x=[]"),
    "no dict": (FEATURES, "Received: x={}"),
    "no tuple": (FEATURES, "Received: x=()"),
    "None": (FEATURES, "Received: x=None"),
    "None in a dataset": (FEATURES, "Received: x=None"),
    "a scalar": ("`x[1]` must have the samples", "Received: the scalar 3.0"),
    "a generator": (
        "All batches of a generator must have the same structure",
        "batch 3 of ({'b': array}, array), after ({'a': array}, array)",
    ),
}


@pytest.mark.parametrize("setup_name", [standard("mirrored"), "two_workers"])
def test_structures_that_do_not_fit_are_refused_by_every_worker(clusters, setup_name):
    case = load_cases(("keras_hooks.cases_bad_input",))["structures_that_do_not_fit"]
    for results in clusters.run(case, setup_name, group=GROUP):
        for name, (begin, end) in SENTENCES.items():
            text = str(results[f"local/{name}/text"])
            assert results[f"local/{name}/type"] == "ValueError", (name, text)
            assert text.startswith(begin), (name, text)
            assert text.endswith(end), (name, text)
            assert results[f"local/{name}/seconds"] < WITHIN_SECONDS, name
