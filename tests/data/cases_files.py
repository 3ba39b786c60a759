"""Files of which each worker reads its own: `tfdp.data.shard_files`.

A step takes from each of two workers the rows of half a global batch. One device is
given the rows of both, step by step. 25 rows stand in five files: by their sizes the
first worker has 14 rows and the second one 11, of which a step takes four.
"""

from __future__ import annotations

import collections
import contextlib
import typing
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.data.cases_distribute import (
    NUM,
    Policy,
    counted_model,
    with_policy,
)
from tests.data.cases_uneven import Interrupt, Interrupted, counted, train, uneven
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.harness.results import flatten_results
from tfdp.ground.plans.file_owners import balance_files
from tfdp.training.data import file_shards

BATCH = common.BATCH_SIZE
ROWS_OF_FILES = (6, 5, 7, 3, 4)
ROWS_OF_WORKERS = (14, 11)
FILES_OF_WORKERS = ([2, 3, 4], [0, 1])
SHORTEST, LONGEST = 3, 4
EPOCHS = 2
SHAPES = {"x": (common.NUM_FEATURES,), "y": (1,)}
Read = collections.Counter


def write_files(
    env: Env, rows_of_files: typing.Sequence[int] = ROWS_OF_FILES, name: str = "part"
) -> str:
    """Writes files with as many rows, for all workers, and returns their pattern."""
    x, y = common.regression_data(sum(rows_of_files))
    cuts = np.cumsum(rows_of_files)[:-1]
    is_done = (env.tmp / f"{name}-0").exists()  # the others may be reading it
    if env.is_chief and not is_done:
        parts = zip(np.split(x, cuts), np.split(y, cuts), strict=True)
        for number, rows in enumerate(parts):
            with tf.io.TFRecordWriter(str(env.tmp / f"{name}-{number}")) as writer:
                for row in zip(*rows, strict=True):
                    writer.write(np.concatenate(row).tobytes())
    env.wait_for_all(name)
    return str(env.tmp / f"{name}-*")


def parse(record: tf.Tensor) -> tuple:
    row = tf.io.decode_raw(record, tf.float32)
    return tf.ensure_shape(row[:-1], SHAPES["x"]), tf.ensure_shape(row[-1:], (1,))


def rows_of(files: tf.data.Dataset, read: Read | None = None) -> tf.data.Dataset:
    """The rows of files; counts the files that are opened and the rows prepared."""

    def opened(name: bytes) -> bytes:
        read[name.decode().rpartition("-")[2]] += 1
        return name

    def prepared(row: bytes) -> bytes:
        read["rows"] += 1
        return row

    def note(function: typing.Callable, value: tf.Tensor) -> tf.Tensor:
        if read is None:
            return value
        value = tf.numpy_function(function, [value], tf.string)
        return tf.ensure_shape(value, ())

    rows = files.interleave(
        lambda name: tf.data.TFRecordDataset(note(opened, name)), cycle_length=2
    )
    return rows.shuffle(6, seed=1).map(lambda row: parse(note(prepared, row)))


def steps_of_both(env: Env, how: str = "join") -> tf.data.Dataset:
    """What one device is given: the rows that two workers take, step by step."""
    names = sorted(tf.io.gfile.glob(write_files(env)))
    sizes = [tf.io.gfile.stat(name).length for name in names]
    owners = balance_files(sizes, 2)
    parts = [
        rows_of(
            file_shards._dataset_of_shard(
                names, owners, file_shards.FileShard(2, rank, "of"), seed=3
            )
        ).batch(BATCH // 2)
        for rank in range(2)
    ]

    def steps() -> typing.Iterator:
        pending = [list(part.as_numpy_iterator()) for part in parts]
        lengths = [len(part) for part in pending]
        for step in range(min(lengths) if how == "stop" else max(lengths)):
            found = [part[step] for part in pending if step < len(part)]
            yield tuple(np.concatenate(rows) for rows in zip(*found, strict=True))

    spec = tuple(tf.TensorSpec((None, *each), tf.float32) for each in SHAPES.values())
    return tf.data.Dataset.from_generator(steps, output_signature=spec)


@case(
    "`shard_files`: losses, weights and predictions of one device on the same rows",
    setups=("two_workers", "two_by_two"),
)
def own_files_train_as_one_device_on_the_same_rows(env: Env) -> dict:
    read: Read = collections.Counter()
    results = _train_on_own_files(env, "join", read)
    if not env.is_reference:
        expected = {"rows": EPOCHS * ROWS_OF_WORKERS[env.rank]}
        expected |= {str(n): EPOCHS for n in FILES_OF_WORKERS[env.rank]}
        assert read == expected, read
    return results


@case("`shard_files` with `stop`", setups=("two_workers", "two_by_two"))
@same_as("own_files_train_as_one_device_on_the_same_rows")
def own_files_stop_with_the_first_that_end(env: Env) -> dict:
    return _train_on_own_files(env, "stop", collections.Counter())


def _train_on_own_files(env: Env, how: str, read: Read) -> dict:
    if env.is_reference:
        data = steps_of_both(env, how)
    else:
        files = tfdp.data.shard_files(write_files(env), seed=3)
        assert len(files) == len(FILES_OF_WORKERS[env.rank])
        data = rows_of(files, read).batch(BATCH).prefetch(1)
    num_steps = SHORTEST if how == "stop" else LONGEST
    with uneven(env, how):
        return counted(env, num_steps, data, is_known=False)


@case(
    "`shard_files` with `steps_per_execution`, class weights, `evaluate` and `predict`",
    setups=("two_workers", "two_by_two"),
)
@same_as("own_files_train_as_one_device_on_the_same_rows")
def own_files_in_other_loops(env: Env) -> dict:

    def own_rows() -> tf.data.Dataset:
        return rows_of(tfdp.data.shard_files(write_files(env), seed=3))

    data = steps_of_both(env) if env.is_reference else own_rows().batch(BATCH)
    results = {"in pairs": train(env, data, steps_per_execution=2)}
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    # The rows of one worker after those of the other one: another order.
    results["evaluate"] = model.evaluate(data, verbose=0)
    predicted = model.predict(data, verbose=0)
    assert len(predicted) == sum(ROWS_OF_FILES)
    results["predict"] = np.sort(predicted.ravel())
    # From the first epoch on.
    rows = steps_of_both(env) if env.is_reference else own_rows()
    classes = rows.map(lambda x, y: (x, tf.cast(y > 0, tf.int32)))
    classes = classes if env.is_reference else classes.batch(BATCH)
    results["classes"] = train(env, classes, class_weight={0: 1.0, 1: 3.0})
    return results


@case(
    "`shard_files` in one process: all files, as on one device",
    setups=("mirrored",),
)
@same_as("own_files_train_as_one_device_on_the_same_rows")
def files_of_one_process(env: Env) -> dict:
    read: Read = collections.Counter()
    files = tfdp.data.shard_files(write_files(env), seed=3)
    results = train(env, rows_of(files, read).batch(BATCH))
    assert read["rows"] == EPOCHS * sum(ROWS_OF_FILES)
    return results


def _ids(files: tf.data.Dataset) -> tf.data.Dataset:
    """The rows of files of ids, each of which counts as a sample."""
    rows = files.interleave(tf.data.TFRecordDataset, cycle_length=2)
    return rows.map(lambda row: tf.ensure_shape(tf.io.decode_raw(row, "float32"), (1,)))


def _lines(files: tf.data.Dataset) -> tf.data.Dataset:
    """The ids in files of text, which TensorFlow's dataset of lines is given all."""
    lines = tf.data.TextLineDataset(files)
    return lines.map(lambda line: tf.strings.to_number(line)[tf.newaxis])


def _write_ids(env: Env, num_files: int) -> str:
    ids = np.arange(NUM, dtype="float32")
    if env.is_chief:
        for number, part in enumerate(np.array_split(ids, num_files)):
            path = str(env.tmp / f"ids{num_files}-{number}")
            with tf.io.TFRecordWriter(path) as writer:
                for each in part:
                    writer.write(each.tobytes())
    env.wait_for_all(f"ids{num_files}")
    return str(env.tmp / f"ids{num_files}-*")


def _write_lines(env: Env, num_files: int) -> str:
    if env.is_chief:
        for number, part in enumerate(np.array_split(np.arange(NUM), num_files)):
            text = "\n".join(map(str, part))
            (env.tmp / f"lines-{number}").write_text(text, "utf-8")
    env.wait_for_all("lines")
    return str(env.tmp / "lines-*")


def _pairs(rows: tf.data.Dataset) -> tf.data.Dataset:
    return rows.map(lambda row: (row, row))


@case(
    "`shard_files`: each row once, however the pipeline goes on",
    compare=False,
    setups=("two_workers", "two_by_two"),
    deadline_seconds=240.0,  # 15 s of processors, and many waits
)
@same_as("own_files_train_as_one_device_on_the_same_rows")
def each_row_of_own_files_once(env: Env) -> dict:
    results = {}
    pattern = _write_ids(env, 5)

    def files(seed: int | None = 0) -> tf.data.Dataset:
        return tfdp.data.shard_files(pattern, seed=seed)

    ids = _ids(files())
    pipelines = {
        "batch of 9": _pairs(ids).batch(9),  # which is 5 rows and 4
        "map after batch": _pairs(ids.batch(8)),
        "padded": _pairs(ids).padded_batch(8),
        "captured": tf.data.Dataset.range(1).flat_map(lambda _: _pairs(ids)).batch(8),
        "captured files": tf.data.Dataset.range(1)
        .flat_map(lambda _: _pairs(_ids(files(None))))
        .batch(8),
        "lines": _pairs(_lines(tfdp.data.shard_files(_write_lines(env, 5)))).batch(8),
        "with options": with_policy(_pairs(ids).batch(8), Policy.OFF),
    }
    # As on GPUs: read by TensorFlow's own iterators.
    pipelines["with input options"] = env.distribution.experimental_distribute_dataset(
        _pairs(_ids(files())).batch(8), tf.distribute.InputOptions()
    )
    for name, dataset in pipelines.items():
        history = common.fit(counted_model(env), dataset, epochs=2)
        for seen in history["seen"]:
            np.testing.assert_array_equal(seen, np.ones(NUM), name)
        results[name] = history
    return results


@case(
    "`shard_files` with fewer files than workers: rows of all are divided",
    setups=("two_workers", "two_by_two"),
)
@same_as("a_file_per_worker")
def fewer_files_than_workers(env: Env) -> dict:
    pattern = write_files(env, (21,), name="one")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        files = tfdp.data.shard_files(pattern)
    texts = [str(each.message) for each in caught]
    is_told = env.is_chief and not env.is_reference
    is_found = any("1 file for 2 workers: all workers read" in text for text in texts)
    assert is_found == is_told, texts
    return train(env, rows_of(files).batch(BATCH))


@case(
    "`shard_files`: a run that is interrupted within an epoch goes on",
    compare=False,
    setups=("two_workers", "two_by_two"),
)
@same_as("checkpoints_at_one_path")
def backup_within_an_epoch_of_own_files(env: Env) -> dict:
    num_read = 0

    def count(part: np.ndarray) -> np.ndarray:
        nonlocal num_read
        num_read += 1
        return part

    def note(part: tf.Tensor, *others: tf.Tensor) -> tuple:
        # A variable that counts would be a state, which no run can restore.
        counted = tf.numpy_function(count, [part], part.dtype, stateful=False)
        return tf.ensure_shape(counted, part.shape), *others

    def fit(*callbacks: keras.callbacks.Callback) -> dict:
        nonlocal num_read
        num_read = 0
        files = tfdp.data.shard_files(write_files(env), seed=3)
        data = rows_of(files).map(note).batch(BATCH)
        return train(env, data, epochs=3, callbacks=list(callbacks))

    def backup() -> keras.callbacks.Callback:
        return tfdp.callbacks.BackupAndRestore(str(env.tmp / "backup"), save_freq=5)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole, first, second = Interrupt(), Interrupt(after=11), Interrupt()
        expected = fit(whole)
        with contextlib.suppress(Interrupted):
            fit(backup(), first)
        env.wait_for_all("interrupted")
        results = fit(backup(), second)
    texts = [str(each.message) for each in caught]
    assert not [text for text in texts if "position in the data" in text], texts
    assert len(whole.seen) == 3 * LONGEST
    assert first.seen[:10] + second.seen == whole.seen
    # The third epoch alone is read again: not the two before it.
    assert num_read == ROWS_OF_WORKERS[env.rank], num_read
    for name, value in flatten_results(expected).items():
        np.testing.assert_array_equal(flatten_results(results)[name], value, name)
    return results


@case(
    "`shard_files` with wrong files: one error on every worker",
    compare=False,
    setups=("two_workers", "two_by_two"),
    quick_setup="two_by_two",
)
def wrong_files_are_refused_by_all(env: Env) -> dict:
    pattern = write_files(env)
    own = f"{pattern[:-1]}{env.rank}"  # one file, another one on each worker
    shard = tfdp.data.shard_files

    def refused(text: str, call: typing.Callable, *args, **kwargs) -> None:
        with pytest.raises(ValueError, match=text):
            call(*args, **kwargs)

    nowhere = str(env.tmp / "nothing-*")
    refused("matches no file on worker 1", shard, [pattern, nowhere][env.rank])
    refused("matches a file 2 times, .*-0' on worker 0", shard, [pattern, own])
    refused("Workers see different files.*part-0' has .* no entry on", shard, own)
    refused(
        "different seeds.*seed=0 on worker 0, 1 on worker 1",
        shard,
        pattern,
        seed=env.rank,
    )
    refused("`pattern` must be a string", shard, [])
    refused("`pattern` must be a string", shard, 3)
    refused("`seed` must be an integer", shard, pattern, seed="1")
    refused("cannot be listed .*foo", shard, ["foo://b/*", pattern][env.rank])
    first, other = (rows_of(shard(pattern, seed=n)).batch(BATCH) for n in (0, 1))
    distribute = env.strategy.experimental_distribute_dataset
    for policy in Policy.FILE, Policy.DATA:
        refused("Remove `auto_shard_policy`", distribute, with_policy(first, policy))
        only_one = [with_policy(first, policy), first][env.rank]
        refused("Remove `auto_shard_policy`", distribute, only_one)
    refused("not the parts of one set", distribute, [first, other][env.rank])
    shorter = rows_of(shard(pattern)).map(lambda *row: row[:1]).batch(BATCH)
    refused("whose elements differ", distribute, [first, shorter][env.rank])
    return {}
