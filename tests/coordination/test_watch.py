"""Who is lost, and who is behind: what follows from what was heard."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import inspect
import json
import pathlib
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tensorflow as tf

import tfdp
from tests.harness.timing import wait_until
from tests.store.clusters import cluster_of, members_of
from tfdp.communication.cluster import ProbeResult, free_ports, probe_port
from tfdp.communication.coordination import watch as watch_module
from tfdp.communication.coordination.clock import ProcessClock
from tfdp.communication.coordination.flight_record import (
    TEXTS,
    CollectiveIdentity,
    CollectiveRing,
)
from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.communication.coordination.progress import ProgressRecorder, WorkerProgress
from tfdp.communication.coordination.watch import failure_detector as module
from tfdp.communication.coordination.watch import heartbeat as heartbeat_module
from tfdp.communication.coordination.watch import recorder as recorder_module
from tfdp.communication.coordination.watch import stragglers as stragglers_module
from tfdp.communication.coordination.watch import watchdog as watchdog_module
from tfdp.communication.coordination.watch.errors import (
    WorkerFailure,
    bucket_of_error,
    failure_message,
)
from tfdp.communication.coordination.watch.failure_detector import FailureDetector
from tfdp.communication.coordination.watch.heartbeat import Heartbeat, IdleMeter
from tfdp.communication.coordination.watch.watchdog import Watchdog
from tfdp.communication.store import HostLost
from tfdp.communication.store import server as server_module
from tfdp.communication.store.contents import Contents
from tfdp.ground._compat import runtime
from tfdp.ground.base.process_identity import ProcessIdentity


class Store:
    """A store that answers each heartbeat alike."""

    host = 0

    def __init__(self, **answer: object) -> None:
        self.answer = {"beats": {}, "ages": {}, "lost": [], **answer}
        self.sent: list[dict[str, Any]] = []

    def beat(self, text: str, **options: bool) -> dict[str, Any]:
        self.sent.append({**json.loads(text), **options})
        return self.answer

    def wake(self) -> None:
        """Nobody waits for texts."""


def membership(rank: int = 0) -> types.SimpleNamespace:
    """What a watchdog asks its membership for, in a job of two workers."""
    cluster = types.SimpleNamespace(workers=("a:1", "b:1"), rank=rank)
    return types.SimpleNamespace(cluster=cluster, store=Store())


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.clock, "now", lambda: self.now)


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """The folder of flight records, which is that of the logs otherwise."""
    monkeypatch.setattr(recorder_module, "record_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_who_is_heard_of_is_not_suspected(clock: Clock):
    known = FailureDetector([1, 2], limit_seconds=60, host=0)
    clock.now += 2
    known.record_heartbeat(1)
    clock.now += 2
    known.record_answer(dated={1, 2})
    assert known.suspects() == [2]
    assert known.cause(2) == ""


def test_who_is_listed_without_an_age_is_not_suspected(clock: Clock):
    known = FailureDetector([1, 2], limit_seconds=60, host=0)
    clock.now += 70
    known.record_answer(dated={2})
    assert known.suspects() == [2]
    assert known.cause(1) == ""
    assert known.cause(2).startswith("no sign of life for 70 s")


@pytest.mark.parametrize("host", [0, 1])
def test_while_the_store_does_not_answer_only_its_host_is_suspected(
    clock: Clock, host: int
):
    known = FailureDetector([0, 1, 2], limit_seconds=60, host=host)
    clock.now += 70
    assert known.suspects() == [host]
    assert [rank for rank in range(3) if known.cause(rank)] == [host]
    known.record_answer(dated={0, 2})
    assert known.suspects() == [0, 2]


class SharedStore(Store):
    """The store of a job whose workers all send heartbeats, but for a silent one."""

    def __init__(self, clock: Clock, num_workers: int, silent: int) -> None:
        super().__init__()
        self.server = server_module.Server(num_workers, 0, Contents())
        self.clock, self.silent = clock, silent
        self.beat_seconds = server_module.beat_seconds(num_workers)

    def beat(self, text: str, **options: bool) -> dict[str, Any]:
        now, late = self.clock.now, 1.0
        for rank, beat in self.server._beats.items():
            if rank != self.silent and now - beat.received_at > self.beat_seconds:
                received_at = beat.received_at + self.beat_seconds + late
                if received_at <= now:
                    self.server._beats[rank] = server_module._Beat("", False, now)
        return self.server._summary(False)


def test_a_silent_worker_of_256_is_suspected_within_ten_seconds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    now = types.SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr(server_module, "time", now)
    store, begin = SharedStore(clock, 256, silent=1), clock.now
    others = [rank for rank in range(256) if rank != 2]
    # Workers send their heartbeats at different times: one that knows is enough.
    known = [FailureDetector(others, limit_seconds=60, host=0) for _ in range(8)]
    beats = [Heartbeat(2, store, one) for one in known]
    beat = store.beat_seconds
    suspected: dict[float, list[int]] = {}
    for tick in range(1, 400):
        clock.now = begin + tick * beat / 80
        if tick % 10 == 0:
            beats[tick // 10 % 8]._beat()
        for one in known:
            if suspects := one.suspects():
                suspected.setdefault(clock.now - begin, suspects)
    assert {tuple(suspects) for suspects in suspected.values()} == {(1,)}
    assert 1.4 * beat < min(suspected) < 10


def test_who_has_no_connection_is_suspected_at_once_unless_it_has_left(clock: Clock):
    known = FailureDetector([1, 2, 3], limit_seconds=60, host=0)
    known.record_status(1, is_disconnected=True)
    known.record_status(2, is_disconnected=True, has_left=True)
    assert known.suspects() == [1]
    clock.now += 70
    known.record_answer(dated=set())
    assert known.cause(1).startswith("no sign of life for 70 s")
    assert known.cause(2) == known.cause(3) == ""


def test_a_port_that_refuses_twice_in_a_row_is_that_of_a_process_that_has_ended(
    clock: Clock,
):
    known = FailureDetector([1], limit_seconds=60, host=0)
    known.record_probe(1, refused=True, accepted=False)
    known.record_probe(1, refused=False, accepted=True)
    known.record_probe(1, refused=True, accepted=False)
    assert known.cause(1) == ""
    known.record_probe(1, refused=True, accepted=False)
    assert "its process has ended" in known.cause(1)


def test_a_port_that_a_forked_process_holds_is_no_sign_of_life(clock: Clock):
    known = FailureDetector([1, 2], limit_seconds=60, host=0)
    own = ProcessIdentity.current()
    other = dataclasses.replace(own, started="before this one")
    known.record_status(1, process=other)
    known.record_status(2, process=own)
    for rank in (1, 2):
        for _ in range(2):
            known.record_probe(rank, refused=False, accepted=True)
    assert known.cause(1) == (
        f"its process has ended (process {own.pid} of this machine)"
    )
    assert known.cause(2) == ""


def test_who_stands_still_is_lost_at_the_limit_and_not_before(clock: Clock):
    known = FailureDetector([1], limit_seconds=60, host=0)
    known.record_heartbeat(
        1, progress=WorkerProgress(7, "step 3 of epoch 1 of fit", 0.0)
    )
    clock.now += 59
    known.record_answer(dated={1})
    assert known.cause(1) == ""
    clock.now += 2
    assert known.cause(1).startswith("no sign of life for 61 s")
    assert known.cause(1).endswith("hangs, last seen at step 3 of epoch 1 of fit")
    known.record_probe(1, refused=False, accepted=False)
    assert "its host does not answer" in known.cause(1)


def test_who_has_left_in_good_order_is_lost_only_to_those_who_wait(clock: Clock):
    known = FailureDetector([1], limit_seconds=60, host=0)
    known.record_status(1, has_left=True, last_error="")
    clock.now += 100
    known.record_probe(1, refused=True, accepted=False)
    known.record_probe(1, refused=True, accepted=False)
    assert known.cause(1) == ""
    assert known.cause_of_exit(1) == "its script has ended"


def test_the_error_that_ended_a_script_is_told(clock: Clock):
    known = FailureDetector([1], limit_seconds=60, host=0)
    known.record_status(1, has_left=False, last_error="ValueError: bad data")
    assert known.cause(1) == ""  # it may have caught it
    known.record_status(1, has_left=True, last_error="ValueError: bad data")
    assert known.cause_of_exit(1).endswith("after ValueError: bad data")


def test_a_clock_stands_still_while_its_process_does(monkeypatch):
    real = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: real[0])
    own = ProcessClock()
    real[0] += 60.0  # nobody reads it yet
    own.watch()
    begin = own.now()
    assert own.recent_pause_seconds(4.0) == 0.0
    for _ in range(5):
        real[0] += 1.2
        own.now()
    assert own.now() - begin == pytest.approx(6.0)
    assert own.recent_pause_seconds(60.0) == 0.0
    real[0] += 9.0  # stopped
    assert own.now() - begin == pytest.approx(7.0)
    assert own.recent_pause_seconds(4.0) == 9.0
    for _ in range(5):
        real[0] += 1.0
        own.now()
    assert own.recent_pause_seconds(4.0) == 0.0


def test_who_was_suspended_itself_hears_of_the_others_before_it_blames_them(
    monkeypatch,
):
    real = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: real[0])
    own = ProcessClock()
    own.watch()
    monkeypatch.setattr(module, "clock", own)
    known = FailureDetector([1], limit_seconds=6.0, host=0)
    real[0] += 9.0  # stopped
    assert known.suspects() == []
    assert known.cause(1) == ""
    for _ in range(5):
        assert known.cause(1) == ""
        real[0] += 1.0
        known.record_answer(dated={1})
    assert known.cause(1).startswith("no sign of life for 6 s")


def test_who_stood_still_for_too_long_blames_itself(monkeypatch):
    watchdog = Watchdog(membership(), 8.0)
    monkeypatch.setattr(
        watchdog_module.clock, "recent_pause_seconds", lambda seconds: 9.0
    )
    watchdog._declare_lost(1, "its process has ended")
    assert watchdog._failure == WorkerFailure(0, "it was suspended for 9 s")
    assert "declared this worker lost: it was suspended for 9 s" in watchdog._message(
        watchdog._failure, "fit"
    )


WAITING = WorkerProgress(5, "step 5", 20.0, is_computing=True, reductions=1)


@pytest.mark.parametrize(
    ("reductions", "limit", "idle", "failure", "said"),
    [
        (2, 15.0, 20.0, True, ""),
        (2, 30.0, 20.0, False, "all workers wait at step 5"),
        (2, None, 20.0, False, "all workers wait at step 5"),
        # Data that does not come is no reason to end; nor is a long computation.
        (1, 15.0, 20.0, False, "all workers wait at step 5"),
        (2, 15.0, 0.0, False, ""),
    ],
)
def test_workers_that_wait_for_different_things_are_told_and_end_after_the_timeout(
    reductions, limit, idle, failure, said, capsys
):
    watchdog = Watchdog(membership(), limit)
    watchdog._detector.record_status(
        1, has_left=False, last_error="", idle_seconds=idle
    )
    watchdog._heartbeat._idle.seconds = 20.0
    for count in (5, 5, 6):
        own = dataclasses.replace(WAITING, count=count)
        other = dataclasses.replace(own, reductions=reductions)
        watchdog._detector.record_heartbeat(1, progress=other)
        watchdog._stragglers._check_deadlock(own)
    assert (watchdog._failure is not None) == failure
    assert capsys.readouterr().err.count("all workers wait") == bool(said)


@pytest.mark.parametrize(
    ("own", "others", "said"),
    [
        ("", "", "for 20 s, for data (the dataset) or in different collectives"),
        ("", "the arrays", "for 20 s, worker 1 for a batch of the arrays."),
        ("a", "b", "worker 0 for a batch of a; worker 1 for a batch of b."),
    ],
)
def test_who_waits_for_data_is_told(own, others, said, capsys):
    watchdog = Watchdog(membership(), None)
    watchdog._detector.record_status(
        1, has_left=False, last_error="", idle_seconds=20.0
    )
    watchdog._heartbeat._idle.seconds = 20.0
    other = dataclasses.replace(WAITING, source=others)
    watchdog._detector.record_heartbeat(1, progress=other)
    watchdog._stragglers._check_deadlock(dataclasses.replace(WAITING, source=own))
    assert said in capsys.readouterr().err


def test_who_has_no_data_says_so_itself_and_is_named_by_the_others(monkeypatch):
    failure = WorkerFailure(1, "its data source, x, has none", own="X has none.")
    for rank, words in (1, "X has none."), (0, "Worker 1 (b:1) was lost at fit: its "):
        watchdog = Watchdog(membership(rank), 8.0)
        assert watchdog._message(failure, "fit").startswith(words)
    watchdog = Watchdog(membership(1), 8.0)
    monkeypatch.setattr(watchdog._data, "update", lambda: 9.0)
    monkeypatch.setattr(watchdog._data, "failure", lambda rank: failure)
    watchdog._check_data()
    assert watchdog._heartbeat.failure == watchdog._failure == failure
    assert watchdog._heartbeat.progress.source == "the dataset"


@pytest.mark.parametrize("source", ["", "the generator `batches`"])
def test_who_waits_for_its_data_is_not_given_up_by_the_others(source, monkeypatch):
    watchdog = Watchdog(membership(), 8.0)
    own = dataclasses.replace(WAITING, seconds=11.0)
    monkeypatch.setattr(Heartbeat, "progress", own)
    other = dataclasses.replace(own, count=own.count - 1, source=source)
    watchdog._detector.record_heartbeat(1, progress=other)
    watchdog._stragglers.check()
    assert (watchdog._failure is None) == bool(source)


@pytest.mark.parametrize("num_ahead", [0, 2])
@pytest.mark.parametrize(
    ("idle_seconds", "error"), [(0.0, "ValueError: x"), (11.0, ""), (11.0, "OSError")]
)
def test_who_has_left_a_step_is_given_up_by_those_that_wait_in_it(
    idle_seconds, error, num_ahead, monkeypatch
):
    watchdog = Watchdog(membership(), 8.0)
    own = dataclasses.replace(WAITING, seconds=11.0)
    monkeypatch.setattr(Heartbeat, "progress", own)
    watchdog._heartbeat._idle.seconds = idle_seconds
    other = WorkerProgress(own.count + num_ahead, "evaluate", 3.0)
    watchdog._detector.record_heartbeat(1, progress=other)
    watchdog._detector.record_status(1, has_left=False, last_error=error)
    watchdog._stragglers.check()
    is_lost = bool(idle_seconds and error)
    assert (watchdog._failure is not None) == is_lost
    if is_lost:
        assert "it is at evaluate" in watchdog._failure.cause


@pytest.mark.parametrize(
    ("limit", "others", "source", "failure", "said"),
    [
        (None, {}, "", False, True),
        (8.0, {"0/0": 6}, "", True, False),
        (30.0, {"0/0": 6}, "", False, True),
        (8.0, {"0/0": 6}, "the dataset", False, True),
        # A worker that has entered the collective is not late, whatever it does.
        (8.0, {"0/0": 7}, "", False, False),
        (8.0, {"0/0": 9}, "", False, False),
    ],
)
def test_who_is_late_in_a_custom_loop_is_named_with_its_line(
    limit, others, source, failure, said, monkeypatch, clock, capsys
):
    ring = CollectiveRing()
    for module_with_ring in (stragglers_module, heartbeat_module):
        monkeypatch.setattr(module_with_ring, "collective_ring", ring)
    identity = CollectiveIdentity("0/0", (0, 1), "all_reduce", "float32", "7", "a")
    for number in 6, 7:
        with contextlib.suppress(OSError), ring.entered(identity, number, num_bytes=8):
            raise OSError  # a failed step
    watchdog = Watchdog(membership(), limit)
    other = WorkerProgress(
        9, "", 0.0, line="b.py:3: `sleep()`", collectives=others, source=source
    )
    watchdog._detector.record_heartbeat(1, progress=other)

    def check(seconds: float) -> None:
        clock.now += seconds
        watchdog._stragglers.check()

    check(0.0)
    check(12.0)
    assert capsys.readouterr().err == ""
    texts = dataclasses.replace(identity, kind=TEXTS)
    with ring.entered(texts, 3, num_bytes=8), ring.entered(identity, 7, num_bytes=8):
        check(1.0)
        assert watchdog._heartbeat.progress.collectives == {"0/0": 7}
        check(12.0)
        check(1.0)
    text = capsys.readouterr().err
    assert text.count(", which is at b.py:3: `sleep()`.") == said
    assert not said or "waiting at " + str(pathlib.Path(__file__)) in text
    assert (watchdog._failure is not None) == failure
    if watchdog._failure:
        assert "within 12 s; it is at b.py:3: `sleep()`" in watchdog._failure.cause
    assert ring.awaited() is None


def test_a_process_is_idle_while_it_uses_next_to_no_processor(monkeypatch, clock):
    cpu = [5.0]
    monkeypatch.setattr("time.process_time", lambda: cpu[0])
    meter = IdleMeter()
    for spent, idle in (0.01, 1.0), (0.1, 2.0), (0.5, 0.0), (0.0, 1.0):
        cpu[0] += spent
        clock.now += 1.0
        meter.update()
        assert meter.seconds == idle


def test_a_call_of_tensorflow_that_lasts_is_a_wait_outside_of_loops_too(
    monkeypatch, clock, capsys
):
    heartbeat = Heartbeat(0, Store(), FailureDetector([1], 60.0, host=0))
    calls = [object()]
    monkeypatch.setattr("time.process_time", lambda: 5.0)
    monkeypatch.setattr(runtime, "call_in_progress", lambda: calls[-1])

    def wait(seconds: int) -> bool:
        for _ in range(seconds):
            clock.now += 1.0
            heartbeat._idle.update()
        return heartbeat.progress.is_computing

    assert not wait(5)
    assert wait(10)
    calls.append(object())  # the next one
    assert not wait(2)
    watchdog = Watchdog(membership(), 8.0)
    watchdog._stragglers._heartbeat = heartbeat
    assert wait(20)
    other = WorkerProgress(99, "", 20.0, is_computing=True, reductions=0)
    watchdog._detector.record_heartbeat(1, progress=other)
    watchdog._detector.record_status(
        1, has_left=False, last_error="", idle_seconds=20.0
    )
    watchdog._stragglers.check()
    assert "all workers wait at an operation of TensorFlow" in capsys.readouterr().err
    assert watchdog._failure is None  # data that does not come
    other = dataclasses.replace(other, reductions=7)
    watchdog._detector.record_heartbeat(1, progress=other)
    watchdog._stragglers.check()
    assert watchdog._failure is not None
    assert "its step reduces other tensors" in watchdog._failure.cause


def test_the_call_in_which_the_main_thread_waits_is_found():
    queue = tf.queue.FIFOQueue(1, [tf.int32], shapes=[[]])
    dequeue = tf.function(queue.dequeue).get_concrete_function()
    found = []

    def look() -> None:
        found.extend([runtime.call_in_progress(), runtime.call_in_progress()])
        queue.enqueue(1)

    threading.Timer(0.5, look).start()
    dequeue()
    assert found[0] is found[1]
    assert found[0] is not None
    assert runtime.call_in_progress() is None


class Finalized:
    """Garbage that notes which function collects it."""

    def __init__(self, collectors: list[str]) -> None:
        self.collectors, self.itself = collectors, self

    def __del__(self) -> None:
        self.collectors.append(sys._getframe(1).f_code.co_name)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="only 3.11 collects there")
def test_no_garbage_is_collected_where_the_main_thread_is_looked_at():
    """A finalizer that releases the GIL there deadlocks the process."""
    collectors: list[str] = []
    ends = threading.Event()
    threads = [threading.Thread(target=ends.wait) for _ in range(40)]
    for thread in threads:
        thread.start()
    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        Finalized(collectors)
        gc.set_threshold(20)  # the frames of the threads are more
        gc.enable()
        runtime.call_in_progress()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        ends.set()
    for thread in threads:
        thread.join()
    gc.collect()
    assert len(collectors) == 1
    assert collectors != ["_current_frames"]


def test_who_is_behind_is_told_by_the_count_of_places(clock: Clock):
    known = FailureDetector([1, 2, 3], limit_seconds=60, host=0)
    known.record_heartbeat(1, progress=WorkerProgress(4, "step 4", 0.0))
    known.record_heartbeat(2, progress=WorkerProgress(5, "step 5", 0.0))
    behind = known.stragglers(WorkerProgress(5, "step 5", 11.0))
    assert {rank: place.name for rank, place in behind.items()} == {1: "step 4"}


def test_a_place_tells_loop_epoch_step_and_exchange():
    recorder = ProgressRecorder()
    assert recorder.current.name == ""
    with recorder.looping("fit"):
        assert recorder.current.name == "fit"
        recorder.epoch_begins()
        recorder.step_begins(0)
        assert recorder.current.name == "the callbacks of step 1 of epoch 1 of fit"
        with recorder.computing():
            assert recorder.current.name == "step 1 of epoch 1 of fit"
        with recorder.looping("evaluate"):
            recorder.epoch_begins()
            assert recorder.current.name == "evaluate"
        with recorder.all_gathering("a seed"):
            assert recorder.current.is_all_gathering
            assert recorder.current.name.startswith(
                "'a seed' in the callbacks of step 1"
            )
        recorder.epoch_begins()
        assert recorder.current.name == "epoch 2 of fit"
    assert recorder.current.name == ""


def test_places_count_alike_for_the_same_calls():
    first, second = ProgressRecorder(), ProgressRecorder()
    for recorder in first, second:
        with recorder.looping("fit"):
            recorder.epoch_begins()
            recorder.step_begins(0)
            with recorder.computing():
                pass
    assert first.current.count == second.current.count > 0


class SlowStore(Store):
    """A store whose first answer takes as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def beat(self, text: str, **options: bool) -> dict[str, Any]:
        answer = super().beat(text, **options)
        self.begun.set()
        self.goes_on.wait(10.0)
        return answer


def test_who_leaves_while_it_beats_says_so_in_another_beat():
    store = SlowStore()
    heartbeat = Heartbeat(0, store, FailureDetector([1], 60.0, host=0))
    heartbeat.start()
    assert store.begun.wait(10.0)
    heartbeat.has_left = True
    threading.Timer(0.1, store.goes_on.set).start()
    heartbeat.beat_now(10.0)
    assert [sent["has_left"] for sent in store.sent] == [False, True]
    heartbeat.join(10.0)
    assert not heartbeat.is_alive()


def test_a_report_is_for_all_if_it_is_news_or_of_one_that_waits(monkeypatch):
    store = Store()
    heartbeat = Heartbeat(0, store, FailureDetector([1], 60.0, host=0))
    for seconds in (0.0, 2.0, 6.0):
        own = dataclasses.replace(WAITING, seconds=seconds)
        monkeypatch.setattr(Heartbeat, "progress", own)
        heartbeat._beat()
    found = [(sent["is_notable"], sent["wants_all"]) for sent in store.sent]
    assert found == [(False, False), (False, True), (True, True)]
    monkeypatch.setattr(Heartbeat, "progress", dataclasses.replace(WAITING, seconds=0))
    for change in {"last_error": "OSError"}, {"has_left": True}, {}:
        vars(heartbeat).update(change)
        heartbeat._beat()
    found = [(sent["is_notable"], sent["is_news"]) for sent in store.sent[3:]]
    assert found == [(True, True), (True, True), (True, False)]


@pytest.fixture
def watchdogs() -> Iterator[list[Watchdog]]:
    """The watchdogs of three members of a job, which do nothing by themselves."""
    with members_of(cluster_of(3)) as members:
        yield [Watchdog(member) for member in members]


def test_all_learn_the_place_the_error_and_the_end_of_each(watchdogs: list[Watchdog]):
    first, second, third = watchdogs
    third._heartbeat.last_error = "ValueError: bad data"
    third._heartbeat._beat()

    def status(watchdog: Watchdog) -> Any:
        return watchdog._detector.status(2)

    for watchdog in first, second:
        wait_until(lambda w=watchdog: status(w).last_error, "the error")
        assert status(watchdog).last_error == "ValueError: bad data"
        assert status(watchdog).progress is not None
        assert status(watchdog).process == ProcessIdentity.current()
        assert not status(watchdog).has_left
    third._heartbeat.has_left = True
    third._heartbeat._beat()
    for watchdog in first, second:
        wait_until(lambda w=watchdog: status(w).has_left, "the end")


@pytest.mark.parametrize("teller", [0, 1])
def test_who_leaves_because_of_another_one_is_not_to_blame(
    watchdogs: list[Watchdog], teller: int
):
    telling, waiting = watchdogs[teller], watchdogs[1 - teller]
    failure = WorkerFailure(2, "its process has ended")
    telling._heartbeat.failure, telling._heartbeat.has_left = failure, True
    telling._heartbeat._beat()
    for watchdog in waiting, watchdogs[2]:
        assert watchdog._wakes.wait(5.0)
        wait_until(
            lambda w=watchdog: w._detector.status(teller).has_left, "its end is known"
        )
        watchdog._is_urgent.set()  # an end is a cause, too, while an error waits
        watchdog._check_workers()
        assert watchdog._failure == failure


def test_a_failure_is_recorded_before_the_end_of_who_tells_it(monkeypatch):
    detector = FailureDetector([1], 60.0, host=0)
    teller = Heartbeat(1, Store(), FailureDetector([0], 60.0, host=0))
    heartbeat = Heartbeat(0, Store(), detector)
    failure = WorkerFailure(2, "its process has ended")
    teller.failure, teller.has_left = failure, True
    seen = []
    monkeypatch.setattr(
        detector, "record_status", lambda rank, **_: seen.append(heartbeat.failure)
    )
    heartbeat._receive({"beats": {"1": [0.0, json.dumps(teller._report())]}})
    assert seen == [failure]


def test_a_failure_that_is_known_from_others_is_no_news_of_this_worker():
    store = Store()
    teller = Heartbeat(1, Store(), FailureDetector([0], 60.0, host=0))
    heartbeat = Heartbeat(0, store, FailureDetector([1], 60.0, host=0))
    teller.failure = WorkerFailure(2, "its process has ended")
    heartbeat._receive({"beats": {"1": [0.0, json.dumps(teller._report())]}})
    heartbeat._beat()
    assert store.sent[-1]["failure"]["rank"] == 2
    assert not store.sent[-1]["is_news"]
    heartbeat.last_error = "ValueError: x"
    heartbeat._beat()
    assert store.sent[-1]["is_news"]


def test_the_end_of_a_connection_is_learned_by_all_at_once(watchdogs: list[Watchdog]):
    watchdogs[2].membership.leave()
    for watchdog in watchdogs[:2]:
        assert watchdog._wakes.wait(5.0)
        assert watchdog._detector.suspects() == [2]


def test_the_end_of_the_host_is_learned_by_all_at_once(watchdogs: list[Watchdog]):
    watchdogs[0].membership.leave()
    for watchdog in watchdogs[1:]:
        assert watchdog._wakes.wait(5.0)
        assert watchdog._detector.suspects() == [0]


def test_the_next_host_is_suspected_where_it_does_not_answer(
    watchdogs: list[Watchdog],
):
    watchdog = watchdogs[2]
    watchdog._heartbeat._beat()
    watchdogs[0].membership.leave()
    wait_until(lambda: watchdog.membership.store.host == 1, "the next host")
    watchdog._detector.record_status(0, has_left=True)
    watchdog._check_workers()
    watchdog._detector.record_heartbeat(1, age_seconds=30.0)
    watchdog._detector._answered_at -= 30.0
    watchdog._detector._status[1].last_heartbeat -= 30.0
    assert watchdog._detector.suspects() == [1]


def test_a_worker_that_waits_in_an_agreement_is_woken_by_a_failure(
    watchdogs: list[Watchdog],
):
    texts = watchdogs[0].membership.store.gather("call", "").texts
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(texts, 60.0)
        watchdogs[0]._set_failure(WorkerFailure(2, "its process has ended"))
        assert waiting.result(5.0) is None


def test_calls_of_a_host_that_is_lost_and_has_no_successor_end(
    watchdogs: list[Watchdog], monkeypatch: pytest.MonkeyPatch
):
    store = watchdogs[1].membership.store
    server = watchdogs[0].membership.server
    monkeypatch.setattr(server, "_serve", lambda member, message: None)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(store.put, "key", "text")
        watchdogs[1]._is_raised.set()  # the main thread has raised the error
        watchdogs[1]._abort(WorkerFailure(0, "its process exists but hangs"))
        with pytest.raises(HostLost, match="is lost: worker 0 is lost"):
            waiting.result(5.0)
    monkeypatch.undo()


@pytest.mark.parametrize("listed", ["beats", "ages"])
def test_a_beat_that_is_read_again_is_no_new_sign_of_life(listed: str, clock: Clock):
    known = FailureDetector([1, 2], limit_seconds=60, host=0)
    store = Store()
    report = json.dumps(Heartbeat(1, store, known)._report())
    heartbeat = Heartbeat(0, store, known)
    for age in 0.0, 10.0, 70.0:
        clock.now = 1000.0 + age
        found = {"1": [age, report]} if listed == "beats" else {"1": age}
        store.answer = Store(**{listed: found}).answer
        heartbeat._beat()
        assert known.suspects() == ([1] if age else [])
        cause = "no sign of life for 70 s" if age > known.limit_seconds else ""
        assert known.cause(1).partition(";")[0] == cause
        assert known.cause(2) == ""


def test_a_worker_that_sends_no_beats_is_suspected_by_those_that_wait(
    watchdogs: list[Watchdog], monkeypatch
):
    monkeypatch.setattr(server_module, "_BEAT_SECONDS", 0.2)
    monkeypatch.setattr(Heartbeat, "progress", WAITING)
    for watchdog in watchdogs:
        watchdog._detector.beat_seconds = 0.2
        watchdog._heartbeat._beat()

    def is_suspected() -> bool:
        for watchdog in watchdogs[:2]:
            watchdog._heartbeat._beat()
        return all(w._detector.suspects() == [2] for w in watchdogs[:2])

    wait_until(is_suspected, "the third is suspected")


@pytest.mark.parametrize(
    ("rank", "behind", "left"),
    [
        *[(0, 1, None), (0, 2, None), (1, 0, None), (1, 2, None), (2, 0, None)],
        *[(1, 2, 0), (2, 1, 0)],
    ],
)
def test_stragglers_are_warned_of_by_the_lowest_rank_that_waits(
    rank: int,
    behind: int,
    left: int | None,
    watchdogs: list[Watchdog],
    monkeypatch,
    capsys,
):
    watchdog = watchdogs[rank]
    monkeypatch.setattr(Heartbeat, "progress", WAITING)
    for other in watchdog._detector.ranks():
        count = WAITING.count - (other == behind)
        progress = dataclasses.replace(WAITING, name="step 4", count=count)
        watchdog._detector.record_heartbeat(other, progress=progress)
        watchdog._detector.record_status(other, has_left=other == left)
    for _ in range(2):
        watchdog._stragglers.check()
    address = watchdog.membership.cluster.workers[behind]
    text = (
        f"tfdp: waiting at step 5 for 20 s for worker {behind} ({address}), which is "
        "at step 4.\n"
    )
    is_lowest = rank == min({0, 1, 2} - {behind, left})
    assert capsys.readouterr().err == text * is_lowest


def test_a_message_names_worker_address_place_and_bucket():
    text = failure_message(
        WorkerFailure(3, "its process has ended"), "h:1", "step 2 of fit", "b"
    )
    assert text.startswith(
        "Worker 3 (h:1) was lost at step 2 of fit, while b was reduced: its process "
    )


@pytest.mark.parametrize(
    ("text", "bucket"),
    [
        ("[[{{node sgd/bucket_12/CollectiveReduceV2}}]]", "bucket 12"),
        ("[[{{node adam/parameters_0_1/CollectiveGatherV2}}]]", "parameters 0"),
        ("[[{{node sgd/CollectiveReduceV2}}]]", ""),
        ("[[{{node bucket_3/Reshape}}]]", ""),
    ],
)
def test_the_bucket_of_an_error_is_that_of_its_node(text: str, bucket: str):
    assert bucket_of_error(text) == bucket


def test_a_closed_port_refuses_and_an_unknown_host_does_not_answer():
    (port,) = free_ports(1)
    assert probe_port(f"127.0.0.1:{port}", 1.0) is ProbeResult.REFUSED
    assert probe_port("host.invalid:1", 0.5) is ProbeResult.NONE


def test_a_process_that_ends_itself_leaves_no_generated_file():
    converted = tf.autograph.to_graph(lambda x: x + 1)
    path = pathlib.Path(inspect.getfile(converted))
    assert path.exists()
    runtime.remove_generated_files()
    assert not path.exists()
    runtime.remove_generated_files()  # what is gone is no error


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (ArithmeticError("one"), "ArithmeticError: one"),
        (SystemExit(7), "SystemExit: 7"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (SystemExit(PREEMPTED), ""),
    ],
)
def test_what_ends_a_loop_of_keras_is_told_unless_it_ends_all_of_them(
    error: BaseException, reported: str, monkeypatch: pytest.MonkeyPatch
):
    watchdog = Watchdog(membership())
    monkeypatch.setattr(watchdog._heartbeat, "beat_now", lambda seconds: None)
    with pytest.raises(type(error)), watchdog.translate_errors():
        raise error
    assert watchdog._heartbeat.last_error == reported


@pytest.mark.parametrize(
    ("timeout_seconds", "silent_seconds"), [(None, 54.0), (600.0, 594.0), (8.0, 6.0)]
)
def test_who_stands_still_is_given_up_in_time_for_all_to_end_within_the_timeout(
    timeout_seconds: float | None, silent_seconds: float
):
    watchdog = Watchdog(membership(), timeout_seconds)
    assert watchdog._detector.limit_seconds == silent_seconds


def test_an_error_that_has_waited_for_a_name_once_does_not_wait_again_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
):
    watchdog = Watchdog(membership())
    waits = []
    monkeypatch.setattr(
        watchdog, "_await_failure", lambda *seconds: bool(waits.append(1))
    )
    error = tf.errors.InternalError(None, None, "of this worker")
    with pytest.raises(tf.errors.InternalError), watchdog.translate_errors():
        raise error
    watchdog.explain_uncaught(error)
    assert len(waits) == 1
    # In a loop of the user's own nothing has looked at it before.
    watchdog.explain_uncaught(tf.errors.InternalError(None, None, "another one"))
    assert len(waits) == 2
    assert watchdog._heartbeat.last_error == "InternalError: another one"


def test_ctrl_c_is_one_line_that_names_the_scripts(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *what: shown.append(what[0]))
    explained = []
    monkeypatch.setattr(Watchdog, "explain_uncaught", lambda _, e: explained.append(e))
    watchdogs = [Watchdog.__new__(Watchdog)]
    monkeypatch.setattr(watch_module, "_watchdogs", watchdogs)
    watch_module._explain_uncaught()
    library = compile("raise KeyboardInterrupt", json.__file__, "exec")
    script = compile("import json\nexec(library)", "train.py", "exec")
    with pytest.raises(KeyboardInterrupt) as raised:
        exec(script, {"library": library})
    trace = raised.value.__traceback__
    sys.excepthook(KeyboardInterrupt, raised.value, trace)
    assert capsys.readouterr().err == "tfdp: interrupted at line 2 of train.py\n"
    assert not shown
    sys.excepthook(ValueError, ValueError("x"), None)
    assert shown == [ValueError]
    assert len(explained) == 1


def test_lines_of_tfdp_are_known_where_it_is_imported_through_a_link(tmp_path):
    package = pathlib.Path(tfdp.__file__).resolve().parent
    (tmp_path / "tfdp").symlink_to(package)
    room = tmp_path / "tfdp" / "communication" / "coordination"
    path = room / "watch" / "__init__.py"
    spec = importlib.util.spec_from_file_location("linked_watch", path)
    linked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(linked)
    own = compile("raise KeyboardInterrupt", str(tmp_path / "tfdp" / "x.py"), "exec")
    script = compile("import json\nexec(own)", "train.py", "exec")
    with pytest.raises(KeyboardInterrupt) as raised:
        exec(script, {"own": own})
    trace = raised.value.__traceback__.tb_next  # without the line of this test
    assert linked._line_of_script(trace) == " at line 2 of train.py"


ABORT_THAT_HANGS = """
import ctypes, types
from tfdp.ground._compat import runtime
hang = lambda *_: ctypes.PyDLL(None).sleep(60)
context = types.SimpleNamespace(abort_collective_ops=hang)
runtime.context = types.SimpleNamespace(context=lambda: context)
runtime._ABORT_SECONDS = 1.0
runtime.abort_collectives("worker 1 is lost")
"""


@pytest.mark.full
def test_an_abort_that_keeps_the_lock_of_the_interpreter_ends_the_process():
    command = [sys.executable, "-c", ABORT_THAT_HANGS]
    done = subprocess.run(command, timeout=50, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "in abort_collectives" in done.stderr
