"""`tfdp.ray` on a real Ray of this machine: training, failures, elasticity, tuning.

They need Ray, which `tools/test_ray` installs in an environment of its own.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import tfdp
from tests.cluster.test_howto_prologues import names_of
from tests.harness.commands import ROOT
from tests.ray import loops

ray = pytest.importorskip("ray", reason="Ray is not installed: tools/test_ray")
pytest.importorskip("ray.train", reason="Ray Train is not installed: tools/test_ray")

pytestmark = [pytest.mark.full, pytest.mark.processes, pytest.mark.timeout(300)]

TWO = {"num_workers": 2, "resources_per_worker": {"CPU": 1}}
ENV = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def one_machine():
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": ENV})
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    """Weights of one device."""
    model = loops.build()
    model.fit(
        *loops.data(),
        batch_size=loops.BATCH_SIZE,
        epochs=loops.EPOCHS,
        shuffle=False,
        verbose=0,
    )
    return model.get_weights()


def _trainer(tmp_path: Path, function=loops.train, *, scaling=TWO, failures=0, **given):
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from tfdp.ray import KerasTrainer

    return KerasTrainer(
        function,
        scaling_config=ScalingConfig(**scaling),
        run_config=RunConfig(
            name="run",
            storage_path=str(tmp_path / "storage"),
            failure_config=FailureConfig(max_failures=failures),
        ),
        **given,
    )


def _check(result, expected: list[np.ndarray]) -> None:
    """The reported model, read by plain Keras, has the weights of one device."""
    with result.checkpoint.as_directory() as folder:
        model = keras.saving.load_model(os.path.join(folder, "model.keras"))
    for own, other in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)
    assert result.metrics["loss"] > 0


def test_two_workers_train_like_one_device(one_machine, tmp_path, expected):
    notes = tmp_path / "notes"
    result = _trainer(tmp_path, train_loop_config={"notes": str(notes)}).fit()
    _check(result, expected)
    assert notes.read_text() == 2 * "2 workers\n"


def test_a_killed_worker_is_started_again_and_goes_on(one_machine, tmp_path, expected):
    marker = tmp_path / "died"
    config = {
        "backup": str(tmp_path / "backup"),
        "dies_at": 2,
        "marker": str(marker),
        "notes": str(tmp_path / "notes"),
    }
    result = _trainer(tmp_path, failures=1, train_loop_config=config).fit()
    assert marker.exists()
    _check(result, expected)
    assert (tmp_path / "notes").read_text().count("2 workers") == 4


def test_a_checkpoint_of_all_workers_is_reported(one_machine, tmp_path, expected):
    config = {"report": {"checkpoint": "tfdp", "metrics": {"error": "loss"}}}
    result = _trainer(tmp_path, train_loop_config=config).fit()
    assert set(result.metrics) == {"error"}
    model = loops.build()
    tfdp.checkpoint.restore(model, result.checkpoint.path)
    for own, other in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


def test_logs_are_reported_under_the_names_that_are_asked_for():
    from tfdp.features.ray.report import _reported_logs

    logs = {"loss": 2, "mae": np.float32(0.5)}
    assert _reported_logs(logs, None) == {"loss": 2.0, "mae": 0.5}
    assert _reported_logs(logs, ["mae"]) == {"mae": 0.5}
    assert _reported_logs(logs, {"error": "mae"}) == {"error": 0.5}
    with pytest.raises(ValueError, match="There are: loss, mae"):
        _reported_logs(logs, ["accuracy"])


def test_a_failure_without_a_retry_is_raised(one_machine, tmp_path):
    config = {"dies_at": 1, "marker": str(tmp_path / "died")}
    with pytest.raises(ray.train.TrainingFailedError):
        _trainer(tmp_path, train_loop_config=config).fit()


def test_tune_finds_the_better_rate(one_machine, tmp_path):
    from ray import tune

    def trial(config: dict) -> None:
        folder = tmp_path / f"rate-{config['rate']}"
        few = {"num_workers": 2, "resources_per_worker": {"CPU": 0.9}}
        given = {"rate": config["rate"]}
        result = _trainer(folder, scaling=few, train_loop_config=given).fit()
        tune.report({"loss": result.metrics["loss"]})

    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.1}),
        param_space={"rate": tune.grid_search([1e-4, 0.05])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune")),
    )
    best = tuner.fit().get_best_result("loss", "min")
    assert best.config["rate"] == 0.05


def test_each_row_of_ray_data_counts_once(one_machine, tmp_path):
    rows = [{"x": float(i % 3), "y": float(i)} for i in range(40)]
    trainer = _trainer(
        tmp_path,
        loops.train_on_shard,
        train_loop_config={"batch_size": 8},
        datasets={"train": ray.data.from_items(rows)},
    )
    assert trainer.fit().metrics["loss"] == pytest.approx(19.5)


def test_keras_2_in_a_worker_is_refused(one_machine, tmp_path):
    from tfdp.features.ray.trainer import _set_up

    @ray.remote
    def worker() -> str:
        import sys
        import types

        sys.modules["tf_keras"] = types.ModuleType("tf_keras")
        try:
            _set_up(["localhost:1"], 0)
        except RuntimeError as error:
            return str(error)
        return ""

    told = ray.get(worker.remote())
    assert "tfdp needs Keras 3" in told
    assert "TF_USE_LEGACY_KERAS" in told


def test_wrong_arguments_of_the_callback_are_refused():
    from tfdp.ray import ReportCallback

    for given, text in (
        ({"checkpoint": "h5"}, "`checkpoint` must be one of"),
        ({"every": 0}, "`every` must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=text):
            ReportCallback(**given)


def test_an_actor_that_is_killed_is_replaced_by_one_that_joins(
    one_machine, tmp_path, monkeypatch
):
    names = names_of("ray.md", "train_on_ray.py", {}, monkeypatch)
    results = names["run_on_ray"](
        *(loops.train_in_actor, str(tmp_path)),
        num_workers=2,
        replacements=1,
        num_cpus=1,
    )
    model = loops.build()
    options = {"batch_size": loops.BATCH_SIZE, "epochs": loops.LONG_EPOCHS}
    model.fit(*loops.data(), shuffle=False, verbose=0, **options)
    assert (tmp_path / "killed").exists()
    for weights, replicas in results:
        assert replicas == 2
        for own, other in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


def test_a_lost_node_shrinks_the_job(tmp_path, expected):
    """Two nodes of one CPU; when one is gone, one worker goes on."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, runtime_env={"env_vars": ENV})
    try:
        marker = tmp_path / "marker"
        config = {
            "backup": str(tmp_path / "backup"),
            "waits_for": 2,
            "marker": str(marker),
            "notes": str(tmp_path / "notes"),
        }
        killer = threading.Thread(
            target=_remove_at, args=(cluster, node, marker), daemon=True
        )
        killer.start()
        elastic = {**TWO, "num_workers": (1, 2)}
        result = _trainer(
            tmp_path, scaling=elastic, failures=3, train_loop_config=config
        ).fit()
        _check(result, expected)
        assert "1 workers" in (tmp_path / "notes").read_text()
    finally:
        ray.shutdown()
        cluster.shutdown()


def _remove_at(cluster, node, marker: Path) -> None:
    while not marker.exists():
        time.sleep(0.1)
    cluster.remove_node(node, allow_graceful=False)
