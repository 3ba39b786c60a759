"""A training loop of the user's own, in the processes of `job`."""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.elastic.training import Killer

NUM_SAMPLES, BATCH_SIZE, STEPS = 54, 9, 18
# Steps of one call with the form `"iterator"`, and the step after which to evaluate.
STEPS_PER_CALL, EVALUATED = 3, 6


def train(
    rank: int,
    folder: str,
    *,
    kill: dict[str, Any] | None = None,
    kill_later: dict[str, Any] | None = None,
    form: str = "function",
    sharding: str = "none",
    on_loss: str = "continue",
    disk_every: int = 100,
    evaluates: bool = False,
    step_seconds: float = 0.0,
    min_workers: int = 1,
    timeout_seconds: float = 30.0,
    misuse: str = "",
) -> dict[str, Any]:
    """Trains by `strategy.run`, and returns the weights and the loss of each step.

    Args:
        rank: Int, this worker's at the start of the job; -1 for one device.
        folder: String, a folder for all workers.
        kill: Dict, see `training.train`.
        kill_later: Dict, the same, of a worker that is killed in the load or the save
            of the state with the number `"step"`, or after so many changes, when it has
            made the parts anew.
        form: String: `"function"`, a `tf.function` of a batch around `strategy.run`;
            `"options"`, the same, and `InputOptions` of the data;
            `"iterator"`, one with a loop of three steps inside; `"eager"`; `"given"`,
            `strategy.run` of a `tf.function`; or `"inner"`, of what calls one.
        sharding: As for `DistributedOptimizer`.
        on_loss: As for the options.
        disk_every: As for `ElasticState`.
        evaluates: Bool, whether to make other calls of Keras and tfdp after one step.
        step_seconds: Float, that each step takes longer after a loss until the first
            join.
        min_workers: As for the options.
        timeout_seconds: The same.
        misuse: String, what is not made anew after a change, or after a join; or
            `"arguments"`, if those of the state differ, or `"error"`, if the block
            raises one after a change.
    """
    import keras
    import tensorflow as tf

    import tfdp

    options = tfdp.CommunicationOptions(
        on_loss=on_loss, min_workers=min_workers, timeout_seconds=timeout_seconds
    )
    strategy = (
        tf.distribute.get_strategy()
        if rank < 0
        else tfdp.MultiWorkerMirroredStrategy(communication=options)
    )
    killer = Killer(rank, kill or {}, Path(folder) / "kills")
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = _model(keras)
        optimizer = tfdp.DistributedOptimizer(
            keras.optimizers.Adam(0.02), sharding=sharding, accumulation_steps=2
        )
        model.compile(optimizer, "mse")
    later = Killer(rank, kill_later or {}, Path(folder) / "kills")
    _install(later, tfdp.ElasticState)
    state = tfdp.ElasticState(
        model,
        Path(folder) / "state",
        disk_every=disk_every + (misuse == "arguments") * rank,
        step=0,
        losses=[],
        evaluated=0.0,
    )
    parts = _Parts(strategy, model, state, killer, Path(folder), form, misuse)
    while state.step < STEPS:
        try:
            with state:
                parts.make()
                later.at("made", len(parts.changes))
                parts.calls += 1
                killer.at("before", state.step + 1)
                state.losses += [float(loss) for loss in parts.step()]
                state.step = len(state.losses)
                if getattr(strategy.extended, "generation", 0) == 1:
                    time.sleep(step_seconds)
                killer.at("step", state.step)
                if evaluates and state.step == EVALUATED:
                    state.evaluated = parts.evaluate()
                killer.at("commit", state.step)
                state.commit()
        except tfdp.WorkersChanged as change:
            parts.changes.append(str(change))
    seen = float(model.seen.result())
    state.delete()
    return {
        "weights": model.get_weights(),
        "history": {"loss": state.losses},
        "evaluated": state.evaluated,
        "seen": seen,
        "changes": parts.changes,
        "calls": parts.calls,
        "replicas": strategy.num_replicas_in_sync,
    }


def _install(killer: Killer, kind: Any) -> None:
    """Lets loads and saves of the state be places, by their number."""
    for place in ("load", "save"):
        numbers, call = itertools.count(1), getattr(kind, f"_{place}")

        def call_or_die(
            state: Any, place: str = place, numbers: Any = numbers, call: Any = call
        ) -> Any:
            killer.at(place, next(numbers))
            return call(state)

        setattr(kind, f"_{place}", call_or_die)


class _Parts:
    """What the loop makes anew after a change: the step, and its data."""

    def __init__(
        self,
        strategy: Any,
        model: Any,
        state: Any,
        killer: Killer,
        folder: Path,
        form: str,
        misuse: str,
    ) -> None:
        import tensorflow as tf

        self._strategy, self._model, self._state = strategy, model, state
        self._killer, self._form, self._misuse = killer, form, misuse
        self._optimizer = model.optimizer
        self._folder, self._record = folder, folder / "rows"
        self._record.mkdir(exist_ok=True)
        self.changes: list[str] = []
        self._num_made = -1
        self._options = None
        if form == "options":
            self._options = tf.distribute.InputOptions()
        self.calls = 0

    def make(self) -> None:
        """Makes the step and the data after a change, unless one is to be forgotten."""
        if self._num_made == len(self.changes):
            return
        self._num_made = len(self.changes)
        if self._forgets("error"):
            raise ValueError("an error of the user's own")
        if not self._forgets("step"):
            self._step = self._made_step()
        if not self._forgets("data"):
            self._data = _shuffled()
        if not self._forgets("batches"):
            batches = self._data.skip(self._state.step)
            self._batches = iter(
                self._strategy.experimental_distribute_dataset(batches, self._options)
            )

    def step(self) -> Any:
        """Makes a step, or several, and returns their losses."""
        if self._form == "iterator":
            return self._step(self._batches)
        if not self._forgets("batch"):
            self._batch = next(self._batches)
        return [self._step(*self._noted(self._batch))]

    def evaluate(self) -> float:
        """Evaluates, predicts, saves and gathers, each of which is a place."""
        import tensorflow as tf

        import tfdp

        x, y = _samples()
        at = functools.partial(self._killer.at, step=self._state.step)
        if self._misuse == "fit":
            self._model.fit(x[:, 1:], y, verbose=0)
        at("predict")
        assert self._model.predict(x[:7, 1:], verbose=0).shape == (7, 1)
        at("checkpoint")
        tfdp.checkpoint.save(self._model, self._folder / "saved", background=True)
        at("gather")
        rank = tf.distribute.get_replica_context
        gathered = self._strategy.run(
            lambda: tfdp.all_gather([rank().replica_id_in_sync_group])
        )
        local = self._strategy.experimental_local_results(gathered)
        assert len(local[0]) == self._strategy.num_replicas_in_sync
        at("evaluate")
        return self._model.evaluate(x[:7, 1:], y[:7], verbose=0)

    def _forgets(self, what: str) -> bool:
        has_joined = bool(self.changes) and "joined" in self.changes[-1]
        after_join = self._misuse == f"{what} after a join" and has_joined
        return after_join or (self._misuse == what and bool(self.changes))

    def _made_step(self) -> Any:
        import tensorflow as tf

        traces = self._form in ("given", "inner")
        given = self._traced(self._on_replica) if traces else self._on_replica
        run = (lambda *args: given(*args)) if self._form == "inner" else given

        def step(*batch: Any) -> Any:
            losses = self._strategy.run(run, args=batch)
            return self._strategy.reduce("SUM", losses, axis=None)

        def steps(batches: Any) -> Any:
            losses = tf.TensorArray(tf.float32, STEPS_PER_CALL)
            for index in tf.range(STEPS_PER_CALL):
                losses = losses.write(index, step(*next(batches)))
            return losses.stack()

        if self._form == "iterator":
            return tf.function(steps)
        return self._traced(step) if self._form in ("function", "options") else step

    def _traced(self, function: Any) -> Any:
        import tensorflow as tf

        if not self._misuse.startswith("step"):
            return tf.function(function)
        # With a signature, other numbers of rows do not trace it again.
        specs = [tf.TensorSpec([None, 5]), tf.TensorSpec([None, 1])]
        return tf.function(function, specs)

    def _on_replica(self, x: Any, y: Any) -> Any:
        import tensorflow as tf

        self._killer.at("trace", self._state.step + 1)
        model = self._model
        with tf.GradientTape() as tape:
            error = tf.square(model(x[:, 1:], training=True) - y)
            loss = tf.reduce_sum(error) / BATCH_SIZE
        model.seen.update_state(tf.ones_like(y))
        variables = model.trainable_variables
        is_kept = self._misuse.startswith("optimizer")
        optimizer = self._optimizer if is_kept else model.optimizer
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def _noted(self, batch: Any) -> Any:
        local = self._strategy.experimental_local_results(batch[0])
        rows = sorted(int(row) for part in local for row in part.numpy()[:, 0])
        generation = getattr(self._strategy.extended, "generation", 0)
        with (self._record / f"{os.getpid()}").open("a") as file:
            file.write(json.dumps([generation, 0, self._state.step, rows]) + "\n")
        return batch


def _model(keras: Any) -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh")])
    model.add(keras.layers.Dense(1))
    model.seen = keras.metrics.Sum()
    return model


def _samples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(NUM_SAMPLES, 5)).astype("float32")
    x[:, 0] = np.arange(NUM_SAMPLES)
    return x, np.tanh(x[:, 1:2] * x[:, 2:3]).astype("float32")


def _shuffled() -> Any:
    """The batches of all epochs, each in another order."""
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(_samples())
    return data.shuffle(NUM_SAMPLES, seed=7).batch(BATCH_SIZE).repeat()
