"""Measurement of how long `fit` waits for data, for `tfdp doctor --input`."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.callbacks.backup_and_restore import BackupAndRestore
from tfdp.callbacks.bases import MeasuringCallback
from tfdp.callbacks.communication_monitor import CommunicationMonitor
from tfdp.callbacks.timeline import Timeline
from tfdp.features.monitor.input_wait import (
    ARRAYS,
    GENERATOR,
    PY_DATASET,
    TORCH,
    Pipeline,
    mean_wait,
)
from tfdp.features.monitor.meter import Meter
from tfdp.features.monitor.readings import Reading
from tfdp.features.monitor.sinks import write_json
from tfdp.ground._compat import pipelines, tf_data
from tfdp.ground.base.context import strategy_of
from tfdp.training.data.early_rows import divide_early
from tfdp.training.data.own_rows import supports_row_reads
from tfdp.training.data.stages import MAPS
from tfdp.training.keras_hooks.worker_callbacks import callback_list

# Shortest time between two writes of the JSON file: a write after every step would slow
# down the steps that are measured.
_WRITE_EVERY_SECONDS = 0.5
# Callbacks that are left out of a measured `fit`: their files would hold the state of
# a training that was cut short.
_WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.BackupAndRestore,
    BackupAndRestore,
    CommunicationMonitor,
    Timeline,
)


class EnoughSteps(SystemExit):
    """Exit of a script whose input was measured for enough steps."""


class InputProbe(MeasuringCallback):
    """Measure how long steps wait for input, and end the script after enough steps.

    The mean wait so far and a description of the input pipeline are written to a file.

    Args:
        path: `Path` of a JSON file, which is replaced regularly during training.
        num_steps: Int, the number of measured steps after which the script ends; the
            same on all workers.
    """

    def __init__(self, path: Path, num_steps: int) -> None:
        super().__init__()
        self.pipeline = Pipeline()
        self.left_out: list[str] = []
        self._path = path
        self._num_steps = num_steps
        self._times: list[tuple[float, float]] = []
        self._problem = ""
        self._written_at = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Have steps traced with time stamps, and write the file for the first time."""
        strategy = strategy_of(self.model)
        self._problem = _problem_of(self.model, strategy)
        # `Meter` is made for CPUs, but its time stamps also measure how long GPUs wait
        # for input, since the host waits for the data.
        self.meter = Meter()
        if strategy is not None:
            self.meter.start()
        self._write()

    def on_step_end(self, num_steps: int, reading: Reading | None) -> None:
        """Record the times of a step; raise `EnoughSteps` after the last one.

        If steps of the model cannot be measured, the first one is the last.

        Args:
            num_steps: Int, steps of the execution that has ended; not used.
            reading: `Reading` of the step; or `None` if it was not timed, and does not
                count.
        """
        if reading is None or self.meter is None:
            return
        sample = self.meter.sample(reading)
        self._times.append((sample.step_seconds, sample.input_seconds))
        if len(self._times) >= self._num_steps or self._problem:
            self._write()
            raise EnoughSteps(0)
        if time.monotonic() - self._written_at > _WRITE_EVERY_SECONDS:
            self._write()

    def on_train_end(self, logs: Any = None) -> None:
        """Write the times measured so far to the file; another `fit` may follow."""
        self._write()

    def _write(self) -> None:
        """Write the mean wait for input so far and the pipeline to the JSON file."""
        self._written_at = time.monotonic()
        content = {
            "problem": self._problem,
            "num_steps": len(self._times),
            "wait": dataclasses.asdict(mean_wait(self._times)) if self._times else None,
            "pipeline": dataclasses.asdict(self.pipeline),
            "left_out": self.left_out,
        }
        write_json(self._path, content)


def _problem_of(model: Any, strategy: Any) -> str:
    """Return why the steps of a model cannot be measured, or `""`."""
    if strategy is None:
        return (
            "the model has no strategy of tfdp; make it in the scope of "
            "`tfdp.auto_strategy()`"
        )
    if model.run_eagerly:
        return "the model runs eagerly; remove `run_eagerly=True`"
    if model.steps_per_execution != 1:
        return (
            "the wait is measured for one step at a time; remove `steps_per_execution`"
        )
    return ""


def measure_fits(probe: InputProbe) -> None:
    """Replace Keras's `fit` by one with a probe, without callbacks that write files.

    Args:
        probe: `InputProbe` that is added to each `fit`.
    """

    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        """Call Keras's `fit` with the probe, without callbacks that write files."""
        stock: Callable = super(keras.Model, model).fit
        bound = inspect.signature(stock).bind(*args, **kwargs)
        probe.pipeline = pipeline_of(bound.arguments.get("x"), strategy_of(model))
        callbacks = callback_list(bound.arguments.get("callbacks"))
        kept = [each for each in callbacks if not isinstance(each, _WRITERS)]
        names = [type(each).__name__ for each in callbacks if each not in kept]
        probe.left_out = list(dict.fromkeys([*probe.left_out, *names]))
        bound.arguments["callbacks"] = [*kept, probe]
        return stock(*bound.args, **bound.kwargs)

    keras.Model.fit = fit


def pipeline_of(data: Any, strategy: Any) -> Pipeline:
    """Describe the input pipeline of a `fit`: its source, `map` and `cache` stages.

    For a `tf.data.Dataset` and a `PyDataset` the description also says why each worker
    prepares all rows, if it does.

    Args:
        data: The argument `x` of `fit`.
        strategy: The model's tfdp strategy, or `None`. With `None` or one worker the
            field `obstacle` is empty.

    Returns:
        `Pipeline`.
    """
    if inspect.isgenerator(data):
        return Pipeline(GENERATOR)
    if isinstance(data, keras.utils.PyDataset):
        return Pipeline(PY_DATASET, obstacle=_obstacle_of_py_dataset(data, strategy))
    if type(data).__module__.startswith("torch."):
        return Pipeline(TORCH)
    if not isinstance(data, tf.data.Dataset):
        leaves = keras.tree.flatten(data)
        is_array = all(isinstance(leaf, (np.ndarray, tf.Tensor)) for leaf in leaves)
        return Pipeline(ARRAYS if is_array else "")
    parts = list(tf_data.dataset_inputs(data))
    maps = [each for each in parts if tf_data.kind_of_stage(each) in MAPS]
    return Pipeline(
        GENERATOR if tf_data.has_generator(data) else "",
        has_serial_map=any(pipelines.parallelism_of(each) is None for each in maps),
        has_map=bool(maps),
        is_cached="CacheDataset" in map(tf_data.kind_of_stage, parts),
        obstacle=_obstacle_of(data, strategy),
    )


def _obstacle_of_py_dataset(dataset: Any, strategy: Any) -> str:
    """Return advice on how each worker could prepare only its own rows.

    Args:
        dataset: `PyDataset` that a script trains on.
        strategy: The model's tfdp strategy, or `None`.

    Returns:
        String, a clause; `""` if there is one worker, or workers already read only
        their own rows.
    """
    if not _has_other_workers(strategy) or supports_row_reads(dataset):
        return ""
    return (
        "give the `PyDataset` the methods `rows` and `num_rows`, with which a worker "
        "prepares only its own rows"
    )


def _has_other_workers(strategy: Any) -> bool:
    """Return whether a strategy has several workers; `False` for `None`."""
    return strategy is not None and strategy.extended.worker_group.num_workers > 1


def _obstacle_of(dataset: tf.data.Dataset, strategy: Any) -> str:
    """Return why each worker prepares all rows of a dataset, or `""`."""
    if not _has_other_workers(strategy):
        return ""
    ranks = strategy.extended.local_ranks
    return divide_early(dataset, ranks, strategy.num_replicas_in_sync).obstacle
