"""Bad input through Keras: one clear sentence on every worker, and soon."""

from __future__ import annotations

import pytest

from tests.harness.pool import ClusterPool
from tests.harness.registry import load_cases
from tests.harness.tiers import full

# Set-ups of this file have clusters of their own: an error may spoil them.
GROUP = "bad_input"
# Far below the deadline of a case, and above what a busy machine needs.
WITHIN_SECONDS = 30.0


def _errors(clusters: ClusterPool, name: str, setup_name: str) -> list[str]:
    """Returns what was raised on each worker, all in time."""
    case = load_cases(("keras_hooks.cases_bad_input",))[name]
    texts = []
    for results in clusters.run(case, setup_name, group=GROUP):
        assert results["local/type"] == "ValueError", results["local/text"]
        assert results["local/seconds"] < WITHIN_SECONDS
        texts.append(str(results["local/text"]))
    return texts


@pytest.mark.parametrize("setup_name", [full("mirrored"), "two_workers"])
def test_model_built_outside_the_scope_is_refused(clusters, setup_name):
    for text in _errors(clusters, "model_built_outside_the_scope", setup_name):
        assert "scope" in text


@pytest.mark.parametrize("setup_name", [full("mirrored"), "two_workers"])
def test_batch_size_smaller_than_the_replicas_is_refused(clusters, setup_name):
    name = "batch_size_smaller_than_the_replicas"
    for text in _errors(clusters, name, setup_name):
        assert "replicas, 2" in text
        assert "Received: batch_size=1" in text


@pytest.mark.parametrize("setup_name", [full("mirrored"), "two_workers"])
def test_static_batch_smaller_than_the_replicas_is_refused(clusters, setup_name):
    name = "static_batch_smaller_than_the_replicas"
    for text in _errors(clusters, name, setup_name):
        assert "replicas, 2" in text
        assert "Received: batch_size=1" in text


@pytest.mark.parametrize("setup_name", [full("mirrored"), "two_workers"])
def test_own_functions_of_a_step_that_use_one_replica_are_refused(clusters, setup_name):
    case = load_cases(("keras_hooks.cases_bad_input",))["own_functions_of_a_step"]
    for results in clusters.run(case, setup_name, group=GROUP):
        for name in ("train", "test", "predict"):
            text = str(results[f"local/{name}/text"])
            assert text.startswith(f"The function that `make_{name}_function` of"), text
            assert f"Override `{name}_step` in its place" in text
        assert not results["moved"]
        assert results["is_whole"]


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


def test_training_on_less_or_apart_is_warned_of_at_the_users_line(clusters):
    case = load_cases(("keras_hooks.cases_bad_input",))["silent_mistakes"]
    for results in clusters.run(case, "two_workers", group=GROUP):
        texts = {
            key.removeprefix("local/"): str(value) for key, value in results.items()
        }
        sharded = texts.pop("shards")
        assert sharded.startswith("This dataset is divided twice")
        assert sharded.endswith("`shard(2, 0)` on worker 0, `shard(2, 1)` on worker 1")
        for name, call in {
            "outside": "fit",
            "outside by hand": "train_on_batch",
        }.items():
            text = texts.pop(name)
            assert "each of the 2 workers trains a separate model" in text
            assert f"`{call}`" in text
        assert set(texts.values()) == {""}, texts


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


@pytest.mark.parametrize("setup_name", [full("mirrored"), "two_workers"])
def test_structures_that_do_not_fit_are_refused_by_every_worker(clusters, setup_name):
    case = load_cases(("keras_hooks.cases_bad_input",))["structures_that_do_not_fit"]
    for results in clusters.run(case, setup_name, group=GROUP):
        for name, (begin, end) in SENTENCES.items():
            text = str(results[f"local/{name}/text"])
            assert results[f"local/{name}/type"] == "ValueError", (name, text)
            assert text.startswith(begin), (name, text)
            assert text.endswith(end), (name, text)
            assert results[f"local/{name}/seconds"] < WITHIN_SECONDS, name


VALUES = "Workers give `{}` arrays of different values, so that some rows would be"
SOURCES = "Workers have data of different values, so that some rows would be read twice"
ORDER = " with the same rows in another order on worker 1 than on worker 0"
OTHER = " with other values on worker 1 than on worker 0"
KEYS = ("method", "type", "text", "seconds")
SETTINGS = "Workers call `{}` with different settings."
ARRAYS = "Workers give `{}` different arrays."
ASSIGNED = "Workers have assigned different values to weights or the learning rate."
CONFIGS = "Workers have models, optimizers, losses, metrics or callbacks with different"
OF_CALLS = {
    "steps of fit": (SETTINGS, "steps_per_execution: 1 on worker 0, 2 on worker 1"),
    "steps of evaluate": (
        SETTINGS,
        "steps_per_execution: 2 on worker 0, 1 on worker 1",
    ),
    "steps of predict": (SETTINGS, "steps_per_execution: 1 on worker 0, 2 on worker 1"),
    "eager": (SETTINGS, "run_eagerly: False on worker 0, True on worker 1"),
    "XLA": (SETTINGS, "jit_compile: True on worker 0, False on worker 1"),
    "epochs": (SETTINGS, "epochs: 2 on worker 0, 3 on worker 1"),
    "first epoch": (SETTINGS, "initial_epoch: 0 on worker 0, 1 on worker 1"),
    "steps of an epoch": (SETTINGS, "steps_per_epoch: 2 on worker 0, None on worker 1"),
    "steps of prediction": (SETTINGS, "steps: 1 on worker 0, 2 on worker 1"),
    "validation": (
        SETTINGS,
        "validation_data: nothing on worker 0, 'given' on worker 1",
    ),
    "when to validate": (SETTINGS, "validation_freq: 1 on worker 0, 2 on worker 1"),
    "rows": (ARRAYS, "x/rows: 16 on worker 0, 8 on worker 1"),
    "rows of evaluate": (ARRAYS, "x/rows: 16 on worker 0, 15 on worker 1"),
    "rows of predict": (ARRAYS, "x/rows: 16 on worker 0, 8 on worker 1"),
    "rows of validation": (
        ARRAYS,
        "validation_data[0]/rows: 8 on worker 0, 9 on worker 1",
    ),
    "batch size": (ARRAYS, "batch_size: 4 on worker 0, 8 on worker 1"),
    "dtype": (ARRAYS, "y/dtype: 'float32' on worker 0, 'int32' on worker 1"),
    "shape": (ARRAYS, "y/shape/1: 1 on worker 0, nothing on worker 1"),
    "weights": (
        ARRAYS,
        "sample_weight: nothing on worker 0, {'rows': 16, 'shape': [None], 'dtype': "
        "'float32'} on worker 1",
    ),
    "order of rows": (VALUES, f"Received: x, y{ORDER}"),
    "values of evaluate": (VALUES, f"Received: y{OTHER}"),
    "values of predict": (VALUES, f"Received: x{OTHER}"),
    "values of weights": (VALUES, f"Received: sample_weight{ORDER}"),
    "order of validation": (VALUES, f"Received: validation_data[1]{ORDER}"),
    "order of a dataset": (
        SOURCES,
        f"Received: from_tensor_slices[0], from_tensor_slices[1]{ORDER}",
    ),
    "validation by a dataset": (SOURCES, f"Received: from_tensor_slices[1]{ORDER}"),
    "order of files": (SOURCES, f"Received: from_tensor_slices[0]{ORDER}"),
    "order of shards": (SOURCES, f"Received: from_tensor_slices[0]{ORDER}"),
    "order of a generator": (SOURCES, f"Received: y{OTHER}"),
    "order of a PyDataset": (SOURCES, f"Received: y{OTHER}"),
    "order of a batch": (VALUES, f"Received: x{ORDER}"),
    "train_on_batch": (ARRAYS, "x/rows: 16 on worker 0, 15 on worker 1"),
    "test_on_batch": (ARRAYS, "y/shape/1: 1 on worker 0, nothing on worker 1"),
    "predict_on_batch": (ARRAYS, "x/rows: 16 on worker 0, 15 on worker 1"),
    **{
        f"assigned before {method}": (
            ASSIGNED,
            "Received: sequential/dense/kernel, sequential/dense/bias, "
            f"sequential/dense/kernel#2, sequential/dense/bias#2{OTHER}",
        )
        for method in ("fit", "evaluate", "predict", "train_on_batch")
    },
    "rate before fit": (ASSIGNED, f"Received: adam/learning_rate{OTHER}"),
    "rate within fit": (
        "Workers have set different learning rates within `fit`",
        "Received: [[1.0], [0.01]], by worker",
    ),
    "a later batch": (ARRAYS, " on worker 1"),
    "optimizer": (
        CONFIGS,
        "optimizer/config/clipnorm: 1.0 on worker 0, None on worker 1",
    ),
    "optimizer of a batch": (
        CONFIGS,
        "optimizer/config/momentum: 0.0 on worker 0, 0.5 on worker 1",
    ),
    "loss": (CONFIGS, "loss: 'mse' on worker 0, 'mae' on worker 1"),
    "callback": (CONFIGS, "callbacks/0/steps: 2 on worker 0, 3 on worker 1"),
    "callback of Keras": (CONFIGS, ", nothing on worker 1"),
    "weights of classes": (
        SETTINGS,
        "class_weight/1: 2.0 on worker 0, 3.0 on worker 1",
    ),
    "eager functions": (
        SETTINGS,
        "tf.config.functions_run_eagerly: False on worker 0, True on worker 1",
    ),
    "limit of epochs": (
        SETTINGS,
        "keras.config.max_epochs: 2 on worker 0, 1 on worker 1",
    ),
    "limit of steps": (
        SETTINGS,
        "keras.config.max_steps_per_epoch: 1 on worker 0, 2 on worker 1",
    ),
    "activation": (CONFIGS, "/activation: 'relu' on worker 0, 'tanh' on worker 1"),
    "called outside": (
        SETTINGS,
        "weights created outside `strategy.scope()`: 2 on worker 0, 0 on worker 1",
    ),
}


def test_workers_that_call_a_model_differently_are_told_how(clusters):
    case = load_cases(("keras_hooks.cases_bad_input",))["different_calls"]
    for results in clusters.run(case, "two_workers", group=GROUP):
        wrong = {}
        for name, (begin, end) in OF_CALLS.items():
            found = {key: results[f"local/{name}/{key}"] for key in KEYS}
            text = str(found["text"])
            is_told = text.startswith(begin.format(found["method"]))
            is_right = found["type"] == "ValueError" and text.endswith(end)
            if not (is_told and is_right and found["seconds"] < WITHIN_SECONDS):
                wrong[name] = found
        assert not wrong, wrong


# Of each kind of data: its order and length, and its number of steps.
OF_DATA = ["a dataset's order and length", "the number of batches"]


@pytest.mark.full
def test_workers_compare_what_they_call_by_one_message_and_none_in_a_step(clusters):
    case = load_cases(("keras_hooks.cases_bad_input",))["messages_of_loops"]
    for results in clusters.run(case, "two_workers", group=GROUP):
        topics = {
            name: [str(topic) for topic in found if topic != "kept links"]
            for name, found in results.items()
        }
        of_fit = [
            *OF_DATA,
            *OF_DATA,
            "stop_training",
            "stop_training",
            "the end of fit",
        ]
        assert sorted(topics["fit"]) == sorted(["the settings of fit", *of_fit])
        settings = {
            name: f"the settings of {name}"
            for name in ("evaluate", "predict", "train_on_batch")
        }
        assert topics["evaluate"] == [settings["evaluate"], *OF_DATA]
        assert topics["evaluate what all have assigned"] == topics["evaluate"]
        # A step that is traced for the first time is compared, with what it has
        # created, and when Keras leaves its scope.
        first = {
            name: [f"the first step of `{name}`", *["leaving strategy.scope()"] * 2]
            for name in ("predict", "train_on_batch")
        }
        of_predict = [settings["predict"], *OF_DATA]
        assert topics["predict"] == [*of_predict, *first["predict"]]
        assert topics["predict again"] == of_predict
        # Of calls 1 to 3, 4 to 6 and 7 to 9 those that are powers of two.
        setting = settings["train_on_batch"]
        assert topics["batch"] == [setting, *first["train_on_batch"], setting]
        assert topics["batch again"] == [setting]
        assert topics["batch of another size"] == [setting]
