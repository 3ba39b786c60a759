"""Deletion of iterators and groups: no thread waits for it that has other work."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import tensorflow as tf

import tfdp
from tests.test_forks import in_fork
from tfdp.ground.base.finalizers import FinalizerThread
from tfdp.training.data import uneven_inputs
from tfdp.training.data.per_replica_dataset import divide_and_prefetch

DEADLINE_SECONDS = 30.0
SPEC = tf.TensorSpec([], tf.int64)


class Thing:
    """Something that can be deleted."""


def test_a_finalizer_may_take_a_lock_of_the_thread_that_collects_the_garbage():
    finalizers, lock = FinalizerThread("test"), threading.Lock()
    done = threading.Event()

    def finish() -> None:
        with lock:
            done.set()

    thing = Thing()
    thing.itself = thing
    finalizers.register(thing, finish)
    with lock:
        del thing
        gc.collect()
    assert done.wait(DEADLINE_SECONDS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_finalizer_that_fails_does_not_keep_others_from_running(capsys):
    finalizers, done = FinalizerThread("test"), threading.Event()
    for function in (lambda: 1 / 0), done.set:
        thing = Thing()
        finalizers.register(thing, function)
        del thing
    assert done.wait(DEADLINE_SECONDS)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_finalizers_of_a_parent_do_not_run_in_a_fork_and_its_own_do():
    finalizers, calls = FinalizerThread("test"), []
    thing = Thing()
    finalizers.register(thing, calls.append, "of the parent")

    def fails() -> bool:
        nonlocal thing
        del thing
        own, done = Thing(), threading.Event()
        finalizers.register(own, done.set)
        del own
        return not done.wait(DEADLINE_SECONDS) or bool(calls)

    assert in_fork(fails) == 0


def _thread_that_deletes(dataset: tf.data.Dataset) -> str:
    """Returns the name of the thread that deletes TensorFlow's iterator."""
    batches = tfdp.MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(dataset)
    iterator = iter(batches)
    next(iterator)
    names, done = [], threading.Event()

    def deleted(_: object) -> None:
        names.append(threading.current_thread().name)
        done.set()

    known = weakref.ref(iterator.components, deleted)
    del iterator
    assert done.wait(DEADLINE_SECONDS)
    assert known() is None
    return names[0]


def _numbers() -> tf.data.Dataset:
    return tf.data.Dataset.range(8).batch(4)


def test_the_iterator_of_an_epoch_is_deleted_on_another_thread():
    assert _thread_that_deletes(_numbers()) == "tfdp-iterators"
    assert _thread_that_deletes(_numbers().cache()) == "tfdp-iterators"


class AtOnce:
    """Runs a finalizer on a thread, which ends before the deletion goes on."""

    def register(self, owned_by: object, function: Callable, *args: object) -> None:
        def run() -> None:
            thread = threading.Thread(target=function, args=args, name="first")
            thread.start()
            thread.join(DEADLINE_SECONDS)

        weakref.finalize(owned_by, run)


def test_an_iterator_is_deleted_there_also_if_that_thread_comes_first(monkeypatch):
    monkeypatch.setattr(uneven_inputs, "_deletions", AtOnce())
    assert _thread_that_deletes(_numbers()) == "first"


def test_an_iterator_is_deleted_at_once_where_the_user_sees_it(tmp_path):
    here = threading.current_thread().name
    generated = tf.data.Dataset.from_generator(lambda: range(8), output_signature=SPEC)
    assert _thread_that_deletes(generated.batch(4)) == here
    assert _thread_that_deletes(_numbers().cache(str(tmp_path / "cache"))) == here
    assert _thread_that_deletes(_numbers().snapshot(str(tmp_path / "saved"))) == here


def test_no_autotuning_of_a_generator_that_nothing_could_make_faster():
    spec = tf.TensorSpec([None], tf.int64)
    plain = tf.data.Dataset.from_generator(lambda: [range(4)], output_signature=spec)
    assert not divide_and_prefetch(plain, [0], 1).options().autotune.enabled
    for tuned in plain.map(lambda x: x + 1), _numbers():
        divided = divide_and_prefetch(tuned, [0], 1)
        assert divided.options().autotune.enabled is None
