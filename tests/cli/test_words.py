"""Singular and plural agree in what the command line and the cluster say."""

from __future__ import annotations

import pathlib

import pytest

from tfdp.communication.cluster import Cluster
from tfdp.ground.text import pluralize
from tfdp.launch.cli import nonblocking_stream, run
from tfdp.launch.rendezvous.failure import Failure
from tfdp.launch.rendezvous.restarts import Restarts


class Heard:
    """A screen that keeps what it is told."""

    def __init__(self):
        self.said = []

    def message(self, text):
        self.said.append(text)

    warn = message


@pytest.mark.parametrize(
    ("workers", "cores", "words"),
    [
        (1, 1, "starting 1 worker, 1 of 1 CPU core; logs in logs"),
        (1, 8, "starting 1 worker, 8 of 8 CPU cores; logs in logs"),
        (3, 8, "starting 3 workers, 2 of 8 CPU cores each; logs in logs"),
    ],
)
def test_the_start_of_a_job_is_told(monkeypatch, workers, cores, words):
    monkeypatch.setattr(run, "num_cores", lambda: cores)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if workers > 1 else "")
    screen = Heard()
    run._announce(screen, workers, None, pathlib.Path("logs"))
    assert screen.said[0] == f"tfdp: {words}"
    if workers > 1:
        assert "there are 3 workers but 1 GPU, and NCCL" in screen.said[1]


def test_a_job_of_one_worker_is_stopped_and_started_as_one():
    restarts = Restarts(2, max_restarts=3, min_workers=1)
    failure = Failure(rank=1, code=1, reason="failed")
    line = restarts.decide(failure, 3.0).line
    assert line.endswith("; 2 workers start again in 0.1 s")
    line = restarts.decide(failure, 3.0).line
    assert "; 1 worker (without slot 1) starts again" in line
    line = restarts.decide(None, 700.0, saved_to_grow=True).line
    assert "with 1 worker; 2 workers start again" in line


def test_one_dropped_line_is_one(tmp_path):
    with open(tmp_path / "output", "w") as stream:
        output = nonblocking_stream.NonBlockingStream(stream)
        output._num_dropped = 1
        assert output.drain(10.0)
    text = (tmp_path / "output").read_text()
    assert "; 1 line is only in the logs" in text


def test_counted_puts_numbers_before_nouns():
    assert pluralize(1, "GPU") == "1 GPU"
    assert pluralize(2048, "GPU") == "2,048 GPUs"
    assert pluralize(2, "line is", "lines are") == "2 lines are"


def test_one_task_of_a_cluster_is_one():
    with pytest.raises(ValueError, match=r"Received: 1 task in job 'worker'"):
        Cluster.from_tf_config(
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}'
        )
