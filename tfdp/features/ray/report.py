"""Report metrics and checkpoints of `fit` to Ray Train, and read shards of Ray Data."""

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
from tfdp.ground.arguments import check_choice, checked_integer
from tfdp.ground.base.temporary import TemporaryFolder

FILE_NAME = "model.keras"


class ReportCallback(keras.callbacks.Callback):
    """Report the metrics of each epoch, and checkpoints of the model, to Ray.

    Pass it to `fit` on all workers: Ray waits for a report from each of them.

    Args:
        metrics: Sequence of strings, the logs to report; a mapping from the name in Ray
            to the log; or `None`: all logs. Defaults to `None`.
        checkpoint: String: `"keras"`, the first worker's `model.keras`, which Ray
            uploads; `"tfdp"`, a sharded checkpoint of `tfdp.checkpoint`, which all
            workers write into the run's folder, mounted on all nodes; or `None`.
            Defaults to `"keras"`.
        every: Int, epochs from one checkpoint to the next. Defaults to 1.

    Raises:
        ValueError: If an argument is invalid.

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
        check_choice("checkpoint", checkpoint, ("keras", "tfdp", None))
        self.metrics = metrics
        self.checkpoint = checkpoint
        self.every = checked_integer("every", every, 1)

    def on_train_begin(self, logs: Any = None) -> None:
        """For `checkpoint="tfdp"`, check that Ray's storage is a mounted file system.

        Raises:
            ValueError: For `"tfdp"`, if the run's storage is not a file system.
        """
        if self.checkpoint == "tfdp":
            _folder_of_run()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report metrics and, if one is due, a checkpoint; all workers call it."""
        reported = _reported_logs(logs or {}, self.metrics)
        if self.checkpoint is None or (epoch + 1) % self.every:
            ray.train.report(reported)
            return
        if self.checkpoint == "tfdp":
            path = os.path.join(_folder_of_run(), f"tfdp-epoch-{epoch + 1}")
            checkpoints.save(self.model, path)
            ray.train.report(
                reported,
                checkpoint=Checkpoint(path) if _is_first() else None,
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )
            return
        with _saved(self.model) as folder:
            ray.train.report(
                reported,
                checkpoint=Checkpoint.from_directory(folder) if _is_first() else None,
            )


@contextlib.contextmanager
def _saved(model: Any) -> Iterator[str]:
    """Save the model into a temporary folder, and yield the path of the folder.

    The folder is deleted at the end of the `with` block. All workers must save, since
    state may be sharded.
    """
    with TemporaryFolder("model") as folder:
        model.save(os.path.join(folder, FILE_NAME))
        yield folder


def _folder_of_run() -> str:
    """Return the run's folder in Ray's storage; raise if that is remote, such as S3."""
    storage = ray.train.get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise ValueError(
            '`checkpoint="tfdp"` needs a `storage_path` that is mounted on all nodes. '
            'Use `checkpoint="keras"`, which Ray uploads. '
            f"Received: {storage.storage_filesystem.type_name}"
        )
    return str(storage.experiment_fs_path)


def _is_first() -> bool:
    """Return whether this is the first worker of the run."""
    return ray.train.get_context().get_world_rank() == 0


def _reported_logs(
    logs: Mapping[str, Any], metrics: Sequence[str] | Mapping[str, str] | None
) -> dict[str, float]:
    """Return the logs to report to Ray: a dict from the name in Ray to a float.

    Args:
        logs: Mapping from the name of a log to its value.
        metrics: Sequence of strings, the logs to report; a mapping from the name in Ray
            to the name of the log; or `None`: all logs.

    Raises:
        ValueError: If `metrics` has a log that is not in `logs`.
    """
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
    """Return this worker's shard of a dataset of `KerasTrainer` as batches.

    Ray gives each row to one worker, once per epoch. The composition of batches differs
    from that on one device.

    Args:
        name: String, the key in `datasets` of `KerasTrainer`. Defaults to `"train"`.
        features: String or sequence of strings, columns of the model's inputs.
        labels: String or sequence of strings, columns of the targets.
        batch_size: Int, rows of the global batch, over all workers.

    Returns:
        `tf.data.Dataset` for `fit`, `evaluate` or `predict`.

    Example:

    >>> def train(config):
    ...     rows = dataset_shard("train", features="x", labels="y", batch_size=256)

    Source: https://docs.ray.io/en/latest/train/user-guides/data-loading-preprocessing.html
    """
    shard = ray.train.get_dataset_shard(name)
    options = tf.data.Options()
    # Each worker has a shard of the dataset from Ray, which tf.distribute must not
    # shard again.
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    rows = shard.to_tf(features, labels, batch_size=batch_size)
    return rows.with_options(options)
