"""Workers exchange texts, and who is missing is named by all alike."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow as tf

from tfdp.communication.coordination import worker_group as module
from tfdp.communication.coordination.progress import ProgressRecorder, WorkerProgress
from tfdp.communication.coordination.worker_group import WorkerGroup


class Store:
    """The key-value store of the coordination service, in one process."""

    def __init__(self) -> None:
        self.is_leaving = False
        self._known: dict[str, str] = {}
        self._changed = threading.Condition()

    def set_key_value(self, key: str, value: str) -> None:
        with self._changed:
            self._known[key] = value
            self._changed.notify_all()
        if self.is_leaving and "/seen/" in key:
            raise tf.errors.UnavailableError(None, None, "Socket closed")

    def get_key_value(self, key: str, timeout_seconds: float) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._known, timeout_seconds):
                raise tf.errors.DeadlineExceededError(None, None, key)
            return self._known[key]

    def delete_key_value(self, key: str) -> None:
        with self._changed:
            self._known.pop(key, None)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store of a cluster."""
    store = Store()
    for name in ("set_key_value", "get_key_value", "delete_key_value"):
        monkeypatch.setattr(module._compat, name, getattr(store, name))
    return store


@pytest.fixture
def workers(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[WorkerGroup]:
    """Three workers of one cluster."""
    monkeypatch.setattr(module.forks, "at_exit", lambda function: None)
    made = [WorkerGroup(rank, 3, timeout_seconds=0.6) for rank in range(3)]
    for worker in made:
        worker._prefix = "cluster"
    return made


def exchange(worker: WorkerGroup, after_seconds: float = 0.0) -> list[str]:
    time.sleep(after_seconds)
    return worker.all_gather("topic", f"from {worker.rank}")


def test_all_get_the_texts_of_all(workers: list[WorkerGroup]):
    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(exchange, workers))
    assert texts == [["from 0", "from 1", "from 2"]] * 3


def test_a_first_worker_that_ends_once_all_have_its_answer_is_no_error(
    workers: list[WorkerGroup], store: Store
):
    store.is_leaving = True
    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(exchange, workers))
    assert texts == [["from 0", "from 1", "from 2"]] * 3


def test_who_waits_for_the_first_worker_names_the_one_that_it_waits_for(
    workers: list[WorkerGroup],
):
    with ThreadPoolExecutor(2) as pool:
        # It has waited for as long as it would before the first worker has.
        last = pool.submit(exchange, workers[2])
        first = pool.submit(exchange, workers[0], 0.3)
        for waiting in (first, last):
            with pytest.raises(TimeoutError, match="s for worker 1 at 'topic'"):
                waiting.result()


def test_who_waits_for_too_long_says_where_the_missing_one_is(
    workers: list[WorkerGroup],
):
    found = {
        "fit": WorkerProgress(1, "fit", 1.0),
        "an operation of TensorFlow": WorkerProgress(1, "", 1.0, is_computing=True),
        "no call of Keras or tfdp": WorkerProgress(1, "", 1.0),
    }
    for name, progress in found.items():
        workers[0].progress_of = {1: progress, 2: None}.get
        words = rf"for worker 1 \(at {name}\), worker 2 at 'topic'. Start"
        with pytest.raises(TimeoutError, match=words):
            exchange(workers[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_who_takes_no_part_after_all_has_made_no_call(
    workers: list[WorkerGroup], rank: int
):
    seen = []

    def check(missing: int) -> None:
        seen.append(missing)
        raise ValueError("others have left")

    for worker in workers:
        worker.timeout_seconds = 20.0
    with pytest.raises(ValueError, match="others have left"):
        workers[rank].all_gather("scope", check=check)
    assert seen == [1 - rank]
    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(exchange, workers))
    assert texts == [["from 0", "from 1", "from 2"]] * 3


def test_a_scope_is_left_by_who_has_passed_its_line_once_more_since_the_last_call():
    own, other = ProgressRecorder(), ProgressRecorder()
    assert not own.has_left_scope(other.current, "a")
    for recorder in own, other:
        recorder.scope_left("a")
    assert not own.has_left_scope(other.current, "a")  # in a loop, the time before
    other.scope_left("a")
    assert own.has_left_scope(other.current, "a")
    assert not own.has_left_scope(other.current, "b")
    own.texts_gathered()  # what is known of the other one is from before
    assert not own.has_left_scope(other.current, "a")
    other.texts_gathered()
    assert not own.has_left_scope(other.current, "a")
