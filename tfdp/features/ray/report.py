"""Metrics and checkpoints of `fit`, reported to Ray Train, and its shards of data."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import ray.train
import tensorflow as tf
from ray.train import Checkpoint, CheckpointUploadMode

from tfdp import checkpoint as checkpoints
from tfdp.ground.arguments import checked_integer
from tfdp.ground.base.temporary import TemporaryFolder

FILE_NAME = "model.keras"
_FORMATS = ("keras", "tfdp", None)


class ReportCallback(keras.callbacks.Callback):
    """Report the metrics of each epoch to Ray, and the model.

    Give it to `fit` on all workers: Ray waits for all.

    Args:
        metrics: Sequence of strings, the logs to report; a mapping from the name in Ray
            to the log; or `None`: all. Defaults to `None`.
        checkpoint: String: `"keras"`, the first worker's `model.keras`, which Ray
            uploads; `"tfdp"`, a checkpoint of `tfdp.checkpoint`, of which each worker
            writes its part into the run's folder, a path that all nodes mount; or
            `None`. Defaults to `"keras"`.
        every: Int, epochs from one checkpoint to the next. Defaults to 1.

    Raises:
        ValueError: If an argument is none of these.

    Example:

    >>> ReportCallback(metrics=["loss"], checkpoint=None).metrics
    ['loss']

    Source: https://docs.ray.io/en/latest/train/user-guides/checkpoints.html
    """

    def __init__(
        self,
        metrics: Sequence[str] | Mapping[str, str] | None = None,
        *,
        checkpoint: str | None = "keras",
        every: int = 1,
    ) -> None:
        super().__init__()
        if checkpoint not in _FORMATS:
            raise ValueError(
                f"`checkpoint` must be one of {_FORMATS}. "
                f"Received: checkpoint={checkpoint!r}"
            )
        self.metrics = metrics
        self.checkpoint = checkpoint
        self.every = checked_integer("every", every, 1)

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that there is a folder that all workers can write into.

        Raises:
            ValueError: For `"tfdp"`, if the run's storage is no file system.
        """
        if self.checkpoint == "tfdp":
            _folder_of_run()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report, which all workers do together."""
        found = _chosen(logs or {}, self.metrics)
        if self.checkpoint is None or (epoch + 1) % self.every:
            ray.train.report(found)
            return
        if self.checkpoint == "tfdp":
            path = os.path.join(_folder_of_run(), f"tfdp-epoch-{epoch + 1}")
            checkpoints.save(self.model, path)
            ray.train.report(
                found,
                checkpoint=Checkpoint(path) if _is_first() else None,
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )
            return
        with _saved(self.model) as folder:
            ray.train.report(
                found,
                checkpoint=Checkpoint.from_directory(folder) if _is_first() else None,
            )


@contextlib.contextmanager
def _saved(model: Any) -> Iterator[str]:
    """A folder with the model in it. All workers save: state may be sharded."""
    with TemporaryFolder("model") as folder:
        model.save(os.path.join(folder, FILE_NAME))
        yield folder


def _folder_of_run() -> str:
    """Where Ray keeps the run's checkpoints."""
    storage = ray.train.get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise ValueError(
            '`checkpoint="tfdp"` needs a `storage_path` that is mounted on all nodes. '
            'Use `checkpoint="keras"`, which Ray uploads. '
            f"Received: {storage.storage_filesystem.type_name}"
        )
    return str(storage.experiment_fs_path)


def _is_first() -> bool:
    return ray.train.get_context().get_world_rank() == 0


def _chosen(
    logs: Mapping[str, Any], metrics: Sequence[str] | Mapping[str, str] | None
) -> dict[str, float]:
    """The logs that are reported, as numbers."""
    if metrics is None:
        names = {name: name for name in logs}
    elif isinstance(metrics, Mapping):
        names = dict(metrics)
    else:
        names = {name: name for name in metrics}
    missing = [log for log in names.values() if log not in logs]
    if missing:
        raise ValueError(
            f"`metrics` names a log that `fit` does not have. There are: "
            f"{', '.join(logs)}. Received: {missing[0]!r}"
        )
    return {name: float(logs[log]) for name, log in names.items()}


def dataset_shard(
    name: str = "train",
    *,
    features: str | Sequence[str],
    labels: str | Sequence[str],
    batch_size: int,
) -> tf.data.Dataset:
    """This worker's shard of a dataset that `KerasTrainer` was given.

    Ray gives each worker other rows. Each counts once an epoch; which ones meet in a
    batch is not as on one device.

    Args:
        name: String, the key of `KerasTrainer`'s `datasets`. Defaults to `"train"`.
        features: String or sequence of strings, columns.
        labels: String or sequence of strings, columns.
        batch_size: Int, of the global batch: rows of all workers together.

    Returns:
        `tf.data.Dataset` for `fit`, `evaluate` or `predict`.

    Example:

    >>> def train(config):
    ...     rows = dataset_shard("train", features="x", labels="y", batch_size=256)

    Source: https://docs.ray.io/en/latest/train/user-guides/data-loading-preprocessing.html
    """
    shard = ray.train.get_dataset_shard(name)
    options = tf.data.Options()
    # What a worker reads is its own.
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    rows = shard.to_tf(features, labels, batch_size=batch_size)
    return rows.with_options(options)
