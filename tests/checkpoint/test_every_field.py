"""Every field of every JSON that tfdp reads, with junk in its place: one sentence."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import keras
import numpy as np
import pytest

from tests.checkpoint import forged, fuzzing
from tests.harness.tiers import full
from tfdp import checkpoint
from tfdp.checkpoint import index_file
from tfdp.checkpoint.run_schema import check_run
from tfdp.communication.cluster import clouds
from tfdp.communication.cluster.spec import Cluster
from tfdp.features.tuning.plan_cache import KeptPlan, PlanChoice, load_plan
from tfdp.ground.links import DEFAULT_LINKS
from tfdp.launch.cli.convert import convert
from tfdp.launch.cli.remote_line import banner, version_of
from tfdp.launch.cli.screen import OutputEntry
from tfdp.training.reduction.cache_file import load_links

Read = Callable[[Any], Any]


def sentence_of(read: Read, value: Any) -> str:
    """What a reader says of a value that it refuses, which is one sentence."""
    try:
        read(value)
    except (ValueError, OSError) as error:
        said = str(error)
    except click.ClickException as error:
        said = error.format_message()
    else:
        return ""
    assert not fuzzing.problem_of([said])
    return said


def index_of(folder: Path) -> tuple[Any, Read]:
    """An index, and its reader, which gets it with a checksum that fits."""
    forged.save(folder)

    def read(body: Any) -> None:
        if isinstance(body, dict) and "content" in body:
            body = {**body, "checksum": index_file._checksum(body["content"])}
        index_file.from_text(json.dumps(body))

    return json.loads((folder / "index.json").read_text()), read


def links_of(folder: Path) -> tuple[Any, Read]:
    def read(entries: Any) -> None:
        path = folder / "links.json"
        path.write_text(json.dumps(entries))
        found = load_links("a", path)
        assert found is None or found.inside.seconds(1.0) >= 0

    return {"a": dataclasses.asdict(DEFAULT_LINKS["ring"])}, read


def plans_of(folder: Path) -> tuple[Any, Read]:
    def read(entry: Any) -> None:
        path = folder / "plans.json"
        path.write_text(json.dumps({"a": json.dumps(entry)}))
        found = load_plan("a", path)
        assert found is None or KeptPlan.from_json(found.to_json()) == found
        path.write_text(json.dumps({"a": entry}))
        assert load_plan("a", path) is None

    kept = KeptPlan(PlanChoice(2048, 1024, "ring"), "12 % faster")
    return json.loads(kept.to_json()), read


def tf_config_of(folder: Path) -> tuple[Any, Read]:
    return fuzzing.CLUSTER, lambda v: Cluster.from_tf_config(json.dumps(v))


def vertex_of(folder: Path) -> tuple[Any, Read]:
    spec = {
        "cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1", "c:1"]},
        "task": {"type": "workerpool1", "index": 1},
    }
    return spec, lambda value: clouds.read_vertex({"CLUSTER_SPEC": json.dumps(value)})


def sagemaker_of(folder: Path) -> tuple[Any, Read]:
    def read(value: Any) -> None:
        environ = {"SM_HOSTS": json.dumps(value), "SM_CURRENT_HOST": "algo-1"}
        clouds.read_sagemaker(environ)

    return ["algo-1", "algo-2"], read


def log_line_of(folder: Path) -> tuple[Any, Read]:
    def read(fields: Any) -> None:
        entry = OutputEntry.from_line(json.dumps(fields))
        if entry is not None:
            assert OutputEntry.from_line(entry.to_line()) is not None
            assert {entry.rank, entry.node}  # they are keys of the screen's tables

    return json.loads(OutputEntry("Epoch 1", "worker", node=0, rank=1).to_line()), read


def banner_of(folder: Path) -> tuple[Any, Read]:
    return json.loads(banner()), lambda value: version_of(json.dumps(value))


READERS = {
    "the index of a checkpoint": (index_of, True),
    "links.json": (links_of, False),
    "plans.json": (plans_of, False),
    "TF_CONFIG": (tf_config_of, True),
    "CLUSTER_SPEC": (vertex_of, True),
    "SM_HOSTS": (sagemaker_of, True),
    "a line of a log": (log_line_of, False),
    "the first line of a launcher": (banner_of, False),
}


@pytest.mark.parametrize("name", READERS)
def test_junk_in_any_field_is_refused_in_one_sentence_or_passed_over(name, tmp_path):
    make, refuses = READERS[name]
    value, read = make(tmp_path)
    read(value)
    said = {what: sentence_of(read, junk) for what, junk in fuzzing.everywhere(value)}
    assert any(said.values()) == refuses


def test_deep_json_of_another_program_is_no_line_of_ours():
    deep = "[" * 100_000
    assert OutputEntry.from_line(deep) is None
    assert version_of(deep) is None


# The run of a backup.


class Cut(Exception):
    """Ends a training."""


class CutAt(keras.callbacks.Callback):
    """Cuts training off after a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) == self._step:
            raise Cut


X = np.arange(12, dtype="float32").reshape(6, 2) / 12


def build() -> keras.Model:
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


def fit(model: keras.Model, folder: Path, *callbacks: Any, epochs: int = 3) -> Any:
    from tfdp.callbacks import BackupAndRestore

    keep = [
        keras.callbacks.EarlyStopping("loss", patience=9),
        keras.callbacks.ReduceLROnPlateau("loss", patience=9),
        keras.callbacks.ModelCheckpoint(str(folder) + ".keras", "loss"),
        BackupAndRestore(folder, save_freq=1, delete_at_end=False),
    ]
    options = {"epochs": epochs, "batch_size": 2, "shuffle": False, "verbose": 0}
    return model.fit(X, X[:, :1], callbacks=[*keep, *callbacks], **options)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    """Backups of three steps to the second one of the second epoch."""
    folder = tmp_path_factory.mktemp("interrupted") / "backups"
    with pytest.raises(Cut):
        fit(build(), folder, CutAt(6))
    return folder


@pytest.fixture
def run(interrupted) -> dict[str, Any]:
    run = index_file.load_index(str(interrupted / "step-5")).run
    check_run(run)
    return run


@pytest.mark.full
def test_junk_in_any_field_of_a_run_is_refused_in_one_sentence(run):
    said = [sentence_of(check_run, junk) for _, junk in fuzzing.everywhere(run)]
    assert all(text.startswith("its ") for text in said if text)
    assert sum(map(bool, said)) > len(said) / 2


@pytest.mark.parametrize(
    ("callback", "name", "may_be"),
    [
        ("EarlyStopping-1", "wait", False),
        ("EarlyStopping-1", "stopped_epoch", False),
        ("EarlyStopping-1", "best", True),
        ("ReduceLROnPlateau-1", "cooldown_counter", False),
        ("ModelCheckpoint-1", "_last_batch_seen", True),
        ("ModelCheckpoint-1", "_batches_seen_since_last_saving", False),
        ("History-1", "epoch", False),
        ("History-1", "history", False),
    ],
)
def test_only_values_that_keras_begins_without_may_be_null(run, callback, name, may_be):
    values = run["callbacks"][callback]["values"]
    assert name in values
    values[name] = None
    assert (sentence_of(check_run, run) == "") == may_be


def test_no_run_is_stopped_within_an_epoch(run):
    run["is_stopped"] = True
    assert "run.is_stopped must be false within an epoch" in sentence_of(check_run, run)


def test_a_backup_from_beyond_the_last_epoch_is_loaded(interrupted, tmp_path, capfd):
    """From within the second epoch, by a script that now trains one."""
    model = build()
    fit(model, interrupted, epochs=1)
    assert "no epochs are left to train" in capfd.readouterr().err
    assert int(model.optimizer.iterations) == 5


# The model of an index, for `tfdp convert`.


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    model = build()
    model.fit(X, X[:, :1], verbose=0)
    checkpoint.save(model, folder)
    return folder


@pytest.fixture
def converted(trained, tmp_path) -> tuple[Any, Read]:
    """The model as the index has it, and what converts another one in its place."""
    saved = shutil.copytree(trained, tmp_path / "saved")
    body = json.loads((saved / "index.json").read_text())

    def read(model: Any) -> None:
        text = model if isinstance(model, str) else json.dumps(model)
        body["content"]["model"] = text
        body["checksum"] = index_file._checksum(body["content"])
        (saved / "index.json").write_text(json.dumps(body))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras's, of what it finds
            convert.callback(str(saved), str(tmp_path / "model.keras"), True)

    return json.loads(body["content"]["model"]), read


LAYER = json.dumps(keras.saving.serialize_keras_object(keras.layers.Dense(1)))
OPTIMIZER = json.dumps(keras.saving.serialize_keras_object(keras.optimizers.SGD()))


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "{}", '"a"', "1", "NaN", "[[]]", "", "[" * 9000, LAYER, OPTIMIZER],
    ids=range(11),
)
def test_convert_refuses_what_is_no_model_in_one_sentence(converted, text, tmp_path):
    model, convert_one = converted
    said = sentence_of(convert_one, text)
    assert said.startswith("The model cannot be built without its script (")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    convert_one(model)
    assert (tmp_path / "model.keras").exists()


@pytest.mark.parametrize("of_each", [40, full(15), full(1)])
def test_convert_refuses_junk_in_any_field_of_a_model(converted, of_each):
    model, convert_one = converted
    refused = 0
    for place, (what, junk) in enumerate(fuzzing.everywhere(model)):
        # Layers of that size are built, 25 GB, before it is compared.
        if place % of_each == 0 and str(2**31) not in what:
            refused += bool(sentence_of(convert_one, copy.deepcopy(junk)))
    assert refused > 20
