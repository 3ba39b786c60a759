"""What the monitor and the timeline say of real training on several replicas."""

from __future__ import annotations

import contextlib
import csv
import gc
import io
import json
import math
import threading
import time
import typing

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tests.monitor import tags
from tests.monitor.perfetto import Bar, read_bars
from tests.reduction.cases_plans import bucket_mb, traced_step
from tests.sharding.cases_plans import small_buckets
from tfdp.features.monitor.readings import KINDS

WIDTH, ROWS, EVERY = 256, 64, 4
NUM_STEPS = 12


def data() -> tuple:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(NUM_STEPS * ROWS, WIDTH)).astype("float32")
    return x, (x[:, :1] * 0.5 + x[:, 1:2]).astype("float32")


def model_of(env: Env, optimizer: typing.Any = None) -> keras.Model:
    with env.scope():
        hidden = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(4)]
        init = keras.initializers.RandomNormal(0.0, 0.05, seed=1)
        for layer in hidden:
            layer.kernel_initializer = init
        last = keras.layers.Dense(1, kernel_initializer=init)
        model = keras.Sequential([keras.Input((WIDTH,)), *hidden, last])
        return common.compiled(model, optimizer or keras.optimizers.SGD(0.05))


def monitored(
    env: Env, model: keras.Model, *callbacks: typing.Any, epochs: int = 1
) -> str:
    """Fits with a monitor and returns what it prints."""
    monitor = tfdp.callbacks.CommunicationMonitor(env.tmp / "logs", every=EVERY)
    given = [monitor, *callbacks]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        common.fit(model, *data(), batch_size=ROWS, callbacks=given, epochs=epochs)
    return shown.getvalue()


def rows_of(env: Env) -> list[dict]:
    with (env.tmp / "logs" / "communication.csv").open() as file:
        return list(csv.DictReader(file))


class Clock(keras.callbacks.Callback):
    """The time of a step by a clock of the test's own, without the first step."""

    def on_train_begin(self, logs=None):
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.perf_counter())
        # Next to it, what another thread of Python takes in between is little.
        time.sleep(0.02)

    @property
    def step_seconds(self) -> float:
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)


@case("Monitor: rows, summary and gradient norm are those of the global batch")
def monitor_measures_what_one_device_computes(env: Env) -> dict:
    with bucket_mb(env, 0.25) if env.strategy else contextlib.nullcontext():
        # The weights stay, so that every step's gradient can be computed again.
        model = model_of(env, keras.optimizers.SGD(0.0))
        clock = Clock()
        said = monitored(env, model, clock) if env.strategy else ""
        norms = [norm_of(model, step) for step in (EVERY, 2 * EVERY, NUM_STEPS)]
        if env.strategy:
            check_rows(env, model, clock)
            norms = [float(row["gradient_norm"]) for row in rows_of(env)]
    if env.strategy:
        assert ("Communication in 11 steps" in said) == env.is_chief
    return {"norms": np.asarray(norms)}


def norm_of(model: keras.Model, step: int) -> float:
    x, y = (part[ROWS * (step - 1) : ROWS * step] for part in data())
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    values = [variable.value for variable in model.trainable_variables]
    return float(tf.linalg.global_norm(tape.gradient(loss, values)))


def check_rows(env: Env, model: keras.Model, clock: Clock) -> None:
    rows = rows_of(env)
    assert [int(row["step"]) for row in rows] == [4, 8, 12]
    plan = env.strategy.communication_plan(model)
    assert len(plan.buckets) >= 3
    for row in rows:
        # What is more are the logs, a few numbers.
        assert 0 <= float(row["sent_bytes"]) - plan.wire_bytes < 200
        for order in range(len(plan.buckets)):
            assert float(row[f"bucket{order}_seconds"]) > 0
        assert float(row["samples_per_second"]) > 0
    told = json.loads((env.tmp / "logs" / "communication.json").read_text())
    totals = told["totals"]
    parts = totals["compute_seconds"] + totals["exposed_seconds"]
    assert abs(parts / clock.step_seconds - 1) < 0.05
    assert totals["input_seconds"] < totals["compute_seconds"]
    assert len(told["workers"]) == env.setup.num_workers
    # The first step is traced and does not count.
    assert told["num_steps"] == NUM_STEPS - 1
    assert told["advice"].endswith(".")
    check_tags(env)


def check_tags(env: Env) -> None:
    """The events have the tags that the docs name, but for what the run did not use."""
    others = ["parameters0", "rows", "statistics", "norms", "sums", "all_gather"]
    others += ["unit0", "unit_again0", *KINDS]
    if env.setup.num_workers == 1:
        others.append("logs")
    unused = {f"step_by_collective/{name}_seconds" for name in others}
    unused.add("gradients/loss_scale")
    # On a busy machine one worker may be slower than the other.
    straggler = {"step_by_worker/straggler_rank"}
    expected = tags.documented() - unused - straggler
    differing = (tags.written(env.tmp / "logs") - straggler) ^ expected
    assert not differing, differing


@case(
    "Monitor: a fit that is broken off leaves no thread",
    compare=False,
)
@same_as("monitor_leaves_nothing_in_the_graph")
def monitor_ends_its_thread_with_a_fit_that_fails(env: Env) -> dict:
    def fails(batch: int, logs: dict) -> None:
        raise KeyboardInterrupt

    model = model_of(env)
    monitor = tfdp.callbacks.CommunicationMonitor(str(env.tmp / "failing"))
    interrupt = keras.callbacks.LambdaCallback(on_train_batch_end=fails)
    for _ in range(2):  # the second one ends the thread of the first
        try:
            model.fit(*data(), callbacks=[monitor, interrupt], verbose=0)
        except KeyboardInterrupt:
            (thread,) = (t for t in threading.enumerate() if t.name == "tfdp monitor")
    del monitor, interrupt
    gc.collect()
    thread.join(30.0)
    assert not thread.is_alive()
    return {}


@case(
    "Monitor: accumulation and sharded state, with the norm of micro-batches",
    compare=False,
)
@same_as("monitor_measures_what_one_device_computes")
def monitor_follows_sharding_and_accumulation(env: Env) -> dict:
    inner = keras.optimizers.Adam(0.0)
    optimizer = tfdp.DistributedOptimizer(
        inner, accumulation_steps=2, sharding="gradients", loss_scale=8.0
    )
    model = model_of(env, optimizer)
    monitored(env, model)
    if env.is_chief:
        rows = rows_of(env)
        labels = [name for name in rows[0] if name.startswith("parameters")]
        assert labels
        # Every second step has an update; its norm is that of two micro-batches.
        expected = mean_norm(model, (NUM_STEPS - 1, NUM_STEPS))
        assert math.isclose(float(rows[-1]["gradient_norm"]), expected, rel_tol=1e-4)
        assert float(rows[-1]["loss_scale"]) == 8.0
    return {}


@case(
    "Monitor: sharded parameters, and what of their gathers is exposed",
    compare=False,
)
@same_as("monitor_measures_what_one_device_computes")
def monitor_tells_the_kinds_of_gathers_apart(env: Env) -> dict:
    if env.is_reference:
        return {}
    optimizer = tfdp.DistributedOptimizer(
        keras.optimizers.SGD(0.0), sharding="parameters"
    )
    with small_buckets(env):
        monitored(env, model_of(env, optimizer))
    if env.is_chief:
        for row in rows_of(env):
            for kind in ("forward_gathers", "backward_gathers", "reduce_scatters"):
                seconds = float(row[f"{kind}_seconds"])
                exposed = float(row[f"{kind}_exposed_seconds"])
                assert seconds > 0
                assert 0 <= exposed <= seconds
            assert float(row["unit0_seconds"]) > 0
            assert any(name.startswith("unit_again") for name in row)
    return {}


def mean_norm(model: keras.Model, steps: tuple[int, ...]) -> float:
    x, y = data()
    chosen = np.concatenate([np.arange(ROWS * (s - 1), ROWS * s) for s in steps])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x[chosen]) - y[chosen]))
    values = [variable.value for variable in model.trainable_variables]
    return float(tf.linalg.global_norm(tape.gradient(loss, values)))


@case(
    "Monitor: several steps in one execution, and evaluation in a callback",
    setups=("mirrored", "two_workers"),
    compare=False,
)
@same_as("monitor_measures_what_one_device_computes")
def monitor_leaves_evaluation_alone(env: Env) -> dict:
    x, y = data()

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.evaluate(x[:ROWS], y[:ROWS], batch_size=ROWS, verbose=0)
            self.model.predict(x[:ROWS], batch_size=ROWS, verbose=0)

    with env.scope():
        model = model_of(env)
        model.compile("sgd", "mse", steps_per_execution=4)
    monitor = tfdp.callbacks.CommunicationMonitor(env.tmp / "logs", every=EVERY)
    timeline = tfdp.callbacks.Timeline(env.tmp / "t.json", steps=(8, 12))
    with contextlib.redirect_stdout(io.StringIO()):
        common.fit(
            model,
            *data(),
            batch_size=ROWS,
            epochs=2,
            validation_data=(x[:ROWS], y[:ROWS]),
            callbacks=[Evaluate(), monitor, timeline],
        )
    told = json.loads((env.tmp / "logs" / "communication.json").read_text())
    assert told["num_steps"] == 20  # of 24: the first execution is traced
    assert told["totals"]["sent_bytes"] > 0
    assert monitor.recent().exposed_seconds >= 0
    assert json.loads((env.tmp / "t.json").read_text())["traceEvents"]
    return {}


@case(
    "Monitor: the averages of moving statistics have a column of their own",
    setups=("two_workers",),
    compare=False,
)
@same_as("monitor_measures_what_one_device_computes")
def monitor_names_statistics(env: Env) -> dict:
    with env.scope():
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    monitored(env, common.compiled(model, keras.optimizers.SGD(0.01)))
    if env.is_chief:
        for row in rows_of(env):
            assert float(row["statistics_seconds"]) > 0
            assert float(row["logs_seconds"]) > 0
    return {}


@case(
    "Monitor: rows of sparse gradients are in the bytes of the step that sends them",
    setups=("two_workers",),
    compare=False,
)
@same_as("monitor_measures_what_one_device_computes")
def monitor_counts_the_bytes_of_rows(env: Env) -> dict:
    words, width = 4000, 16
    with env.scope():
        layers = [keras.layers.Embedding(words, width), keras.layers.Flatten()]
        model = keras.Sequential([keras.Input((1,)), *layers, keras.layers.Dense(1)])
    common.compiled(model, keras.optimizers.SGD(0.01))
    x = np.arange(NUM_STEPS * ROWS).reshape(-1, 1) % words
    monitor = tfdp.callbacks.CommunicationMonitor(env.tmp / "logs", every=EVERY)
    with contextlib.redirect_stdout(io.StringIO()):
        common.fit(model, x, x * 0.0, batch_size=ROWS, callbacks=[monitor])
    if env.is_chief:
        # To the other worker: half of the rows, each with its index.
        expected = ROWS // 2 * (4 * width + 4)
        for row in rows_of(env):
            assert expected <= float(row["sent_bytes"]) < 1.1 * expected
    return {}


@case("Monitor: weights are those of training without one")
@same_as("monitor_measures_what_one_device_computes")
def monitor_changes_no_weight(env: Env) -> dict:
    model = model_of(env)
    if env.strategy:
        timeline = tfdp.callbacks.Timeline(env.tmp / "t.json", steps=(3, 5))
        monitored(env, model, timeline)
    else:
        common.fit(model, *data(), batch_size=ROWS)
    return {"weights": env.weights(model)}


@case("Monitor: off means zero operations, before and after", compare=False)
def monitor_leaves_nothing_in_the_graph(env: Env) -> dict:
    def kinds(model: keras.Model) -> dict[str, int]:
        step = traced_step(model, common.regression_data())
        counts: dict[str, int] = {}
        for function in step.graph._functions.values():
            for node in function.cached_definition.node_def:
                counts[node.op] = counts.get(node.op, 0) + 1
        return counts

    with env.scope():
        model = common.compiled(common.mlp())
    before = kinds(model)
    assert "Timestamp" not in before
    monitor = tfdp.callbacks.CommunicationMonitor(env.tmp / "logs")
    timeline = tfdp.callbacks.Timeline(env.tmp / "t.json", steps=(2, 4))
    with contextlib.redirect_stdout(io.StringIO()):
        common.fit(model, *common.regression_data(), callbacks=[monitor, timeline])
    assert kinds(model) == before
    return {}


@case(
    "Monitor: a slowed worker is named within twenty steps",
    setups=("two_workers",),
    compare=False,
    side_by_side=False,
)
def monitor_names_a_slow_worker(env: Env) -> dict:
    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if env.rank == 1:
                time.sleep(0.15)

    model = model_of(env)
    said = monitored(env, model, Slow())
    if env.is_chief:
        told = json.loads((env.tmp / "logs" / "communication.json").read_text())
        assert told["straggler"]["rank"] == 1, told
        assert told["straggler"]["seconds"] > 0.05
        assert [row["straggler_rank"] for row in rows_of(env)][-1] == "1"
        assert "orker 1" in told["advice"]
        assert "worker 1" in said
    return {}


@case(
    "Monitor: a worker that stays slow is named once in each epoch, and no other",
    setups=("two_workers",),
    compare=False,
    side_by_side=False,
)
@same_as("monitor_names_a_slow_worker")
def monitor_names_a_slow_worker_once_an_epoch(env: Env) -> dict:
    """Slow for three epochs, then never, then in one of three windows."""

    class Slow(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            is_slow = self.epoch < 3 or (self.epoch == 4 and batch // EVERY == 1)
            # All sleep a little, beside which what else the machine does is little.
            time.sleep(0.05 + (0.05 if is_slow and env.rank == 1 else 0.0))

    model = model_of(env)
    said = monitored(env, model, Slow(), epochs=5)
    told = [line for line in said.splitlines() if line.startswith("CommunicationMon")]
    if env.is_chief:
        assert [line.split()[3] for line in told] == ["1", "2", "3"], said
        for line in told:
            assert " worker 1 on " in line
            assert "tfdp run --rebalance" in line
    else:
        assert not said
    return {}


@case(
    "Timeline: lanes of every worker, buckets inside their steps",
    compare=False,
    quick_setup="two_by_two",
)
def timeline_shows_all_workers(env: Env) -> dict:
    model = model_of(env)
    path = env.tmp / "timeline.json"
    first, last = 4, 6
    callback = tfdp.callbacks.Timeline(path, steps=(first, last))
    common.fit(model, *data(), batch_size=ROWS, callbacks=[callback])
    if env.is_chief:
        check_trace(env, model, path.read_text(), range(first, last + 1))
    return {}


def check_trace(env: Env, model: keras.Model, text: str, steps: range) -> None:
    bars = read_bars(text)
    plan = env.strategy.communication_plan(model)
    local = env.num_replicas // env.setup.num_workers
    assert {bar.worker for bar in bars} == set(range(env.setup.num_workers))
    for rank in range(env.setup.num_workers):
        own = [bar for bar in bars if bar.worker == rank]
        spans = {bar.name: bar for bar in own if bar.lane == "steps"}
        assert spans.keys() == {f"step {step}" for step in steps}
        for replica in range(rank * local, (rank + 1) * local):
            check_replica(own, spans, f"replica {replica}", len(plan.buckets))
        lanes = {bar.lane.partition(":")[0] for bar in own}
        assert len(lanes) == 1 + local
    trace = json.loads(text)
    offsets = trace["otherData"]["clock_offsets_seconds"]
    assert max(abs(value) for value in offsets.values()) < 0.05


def check_replica(
    bars: list[Bar], spans: dict[str, Bar], replica: str, num_buckets: int
) -> None:
    """Its buckets lie inside their steps, each of which is forward and backward."""
    reduced = [bar for bar in bars if bar.lane == f"{replica}: collectives"]
    buckets = [bar for bar in reduced if bar.name.startswith("bucket")]
    assert len(buckets) == len(spans) * num_buckets
    # Clocks of the host and of the graph may differ by a little.
    little = 500_000
    for bucket in buckets:
        step = spans[f"step {bucket.args['step']}"]
        assert step.begin - little <= bucket.begin
        assert bucket.end <= step.end + little
    computed = [bar.name for bar in bars if bar.lane == f"{replica}: compute"]
    assert computed.count("forward") == computed.count("backward")
    # A stamp of the loss that comes late cannot tell the two apart.
    known = computed.count("backward") + computed.count("forward and backward")
    assert known == len(spans), computed


@case("Bad input: log directory that cannot be written", compare=False)
def monitor_says_that_it_cannot_write(env: Env) -> dict:
    blocked = env.tmp / f"file{env.rank}"
    blocked.write_text("in the way")
    monitor = tfdp.callbacks.CommunicationMonitor(blocked / "logs")
    return raised(env, [monitor])


@case("Bad input: trace range past the end of training", compare=False)
def timeline_past_the_end_of_training(env: Env) -> dict:
    timeline = tfdp.callbacks.Timeline(env.tmp / "t.json", steps=(10, 13))
    return raised(env, [timeline])


def raised(env: Env, callbacks: list) -> dict:
    with env.scope():
        model = common.compiled(common.mlp())
    start = time.monotonic()
    try:
        common.fit(model, *common.regression_data(), callbacks=callbacks)
    except ValueError as error:
        assert time.monotonic() - start < 20
        return {"local": {"text": str(error)}}
    raise AssertionError("nothing was raised")


@case(
    "Bad input: a callback of tfdp on one worker only",
    setups=("two_workers",),
    compare=False,
)
def a_callback_on_one_worker_only(env: Env) -> dict:
    monitor = tfdp.callbacks.CommunicationMonitor(env.tmp / "logs")
    return raised(env, [monitor] if env.rank else [])
