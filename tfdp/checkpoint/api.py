"""Checkpoints that move between any number of replicas: `save` and `restore`."""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdp.base.ownership import strategy_of
from tfdp.checkpoint import files
from tfdp.checkpoint import reader as reading
from tfdp.checkpoint import writer as writing
from tfdp.checkpoint.index import Index, check_complete
from tfdp.checkpoint.index_file import load_index, to_text, versions
from tfdp.checkpoint.model_state import LOSS_SCALE, PENDING, RUN, state_of
from tfdp.checkpoint.pending import num_pending, pending_state_of, redistribute_pending
from tfdp.coordination.checks import check_same_variables
from tfdp.keras_hooks.file_hooks import plain_optimizer
from tfdp.sharding.state_tensors import StateTensor

# A timeout is meant for messages; a slow disk may take longer than that.
_DISK_SECONDS = 3600.0
_INTACT = "What the directory held before is intact."
_NOTHING_LOADED = "Nothing was loaded."
_PARTLY_LOADED = "The model may hold some of it; restore again before you go on."


def save(model: keras.Model, directory: str | os.PathLike) -> None:
    """Writes the training state into a directory, each worker its own part.

    All workers call it together, with a directory that all of them share. The
    checkpoint that was there stays until the new one is complete, and is then
    deleted.

    Args:
        model: Built Keras model, with its optimizer.
        directory: String or path-like. It is made if it is not there.

    Raises:
        ValueError: If `directory` cannot hold a checkpoint, or the workers have
            different models.
        OSError: On every worker, if one of them cannot write. What was there
            before is intact.

    Example:

    >>> import tempfile, tfdp
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> directory = tempfile.mkdtemp()
    >>> tfdp.checkpoint.save(model, directory)
    >>> sorted(os.listdir(directory))
    ['data-...', 'index.json']
    """
    state = state_of(model)
    if num_pending(model):
        state += pending_state_of(model)
    prepare = functools.partial(redistribute_pending, model)
    serialize = functools.partial(serialized, model)
    save_state(state, directory, worker_group_of(model), serialize, prepare)


def restore(model: keras.Model, directory: str | os.PathLike) -> None:
    """Reads the training state that `save` wrote, on any number of replicas.

    All workers call it together. Each reads only the files that hold something
    it needs, and nothing is loaded anywhere unless all of these are intact.

    Args:
        model: Built Keras model, compiled with the same optimizer.
        directory: String or path-like, what `save` was given.

    Raises:
        ValueError: On every worker, if there is no checkpoint, if it is one of
            another model, or if a file is missing or damaged.

    Example:

    >>> import tempfile, tfdp
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> directory = tempfile.mkdtemp()
    >>> tfdp.checkpoint.save(model, directory)
    >>> before = model.get_weights()
    >>> model.set_weights([0 * weight for weight in before])
    >>> tfdp.checkpoint.restore(model, directory)
    >>> bool((model.get_weights()[0] == before[0]).all())
    True
    """
    state, pending = state_of(model), pending_state_of(model)
    restore_state(state, directory, worker_group_of(model), pending)


def save_state(
    state: Sequence[StateTensor],
    directory: str | os.PathLike,
    worker_group: Any,
    serialize: Callable[[], str | None] = lambda: None,
    prepare: Callable[[], None] = lambda: None,
    run: Any = None,
) -> None:
    """What `save` does with the tensors of a model, and the model as a string.

    All workers `prepare` the tensors together, once it is known that they are alike.
    The index gets what the first worker gives as `run`.
    """
    path, rank = os.fspath(directory), worker_group.rank
    entries = files.entries_of(state)
    check_same_variables(worker_group, "checkpoint.save", entries, "saves")
    prepare()
    act = functools.partial(together, worker_group, path, "saved", _INTACT)
    token = act("the folder", lambda: writing.new_folder(path) if rank == 0 else "")
    token = worker_group.all_gather("checkpoint.save: the folder's name", token)[0]
    folder = os.path.join(path, token)

    def publish() -> None:
        if rank == 0:
            parts = writing.listed_parts(folder, worker_group.num_workers)
            check_complete(entries, parts)
            index = Index(token, entries, parts, versions(), serialize(), run)
            writing.replace_index(path, token, to_text(index))
            writing.remove_folders(path, keep=token)

    try:
        act("the files", lambda: writing.write_own(state, folder, rank))
        act("the index", publish)
    except (OSError, ValueError):
        if rank == 0:
            writing.discard(path, token)
        raise


def restore_state(
    state: Sequence[StateTensor],
    directory: str | os.PathLike,
    worker_group: Any,
    pending: Sequence[StateTensor] = (),
) -> None:
    """What `restore` does with the tensors of a model, and with accumulated ones."""
    path = os.fspath(directory)

    def find() -> tuple[Index, list[StateTensor]]:
        index = load_index(path)
        wanted, left_out = _chosen(index, state, pending)
        reading.check_index(index, wanted, path, left_out)
        return index, wanted

    index, wanted = together(
        worker_group, path, "restored", _NOTHING_LOADED, "its files", find
    )
    if len(set(worker_group.all_gather("checkpoint.restore: which", index.token))) > 1:
        worker_group.leave()
        raise ValueError(
            "The workers found different checkpoints. Give all of them one "
            "directory, and do not save into it meanwhile. "
            f"Received: directory={path!r}"
        )
    folder = os.path.join(path, index.token)
    load = functools.partial(reading.read_parts, wanted, index, folder)
    together(worker_group, path, "restored", _PARTLY_LOADED, "its tensors", load)
    restored = {tensor.name for tensor in wanted}
    reading.write_zeros(tensor for tensor in pending if tensor.name not in restored)


def _chosen(
    index: Index, state: Sequence[StateTensor], pending: Sequence[StateTensor]
) -> tuple[list[StateTensor], list[str]]:
    """What of a model is restored, and what of the checkpoint is left out.

    A callback may switch loss scaling on later, and between two updates nothing is
    accumulated.
    """
    saved = {entry.name for entry in index.entries}
    scale = f"{LOSS_SCALE}/"
    wanted = [t for t in state if t.name in saved or not t.name.startswith(scale)]
    wanted += [tensor for tensor in pending if tensor.name in saved]
    own = {tensor.name for tensor in wanted}
    left_out = [n for n in saved if n.startswith(scale) and n not in own]
    if left_out:
        warnings.warn(
            "The checkpoint has a loss scale and the optimizer has none, so that it is "
            "left out. To go on with it, scale the loss before `restore`: "
            '`DistributedOptimizer(..., loss_scale="dynamic")`.',
            stacklevel=3,
        )
    of_run = [name for name in saved if name.startswith(f"{RUN}/")]
    if any(name.startswith(f"{RUN}/{PENDING}/") for name in of_run):
        warnings.warn(
            "This is a backup from between the micro-batches of an update. What they "
            "had accumulated is left out; `BackupAndRestore` in `fit` goes on with it.",
            stacklevel=3,
        )
    left_out += of_run
    waiting = [n for n in saved if n.startswith(f"{PENDING}/")]
    if waiting and not pending:
        raise ValueError(
            "it was saved between the micro-batches of an update, and the optimizer "
            "does not accumulate; give it `accumulation_steps` before `restore`"
        )
    return wanted, left_out


def together(
    worker_group: Any,
    path: str,
    verb: str,
    aftermath: str,
    topic: str,
    action: Callable[[], Any],
) -> Any:
    """Does something on every worker; fails on all of them if it fails on one.

    Args:
        worker_group: `WorkerGroup` between the workers.
        path: String, the directory that it is done in.
        verb: String, what was not done to the checkpoint if it fails.
        aftermath: String, a sentence on what is left then.
        topic: String, what it is about.
        action: Callable without arguments.

    Returns:
        What `action` returns.

    Raises:
        ValueError: On every worker, if that is what one of them raised.
        OSError: On every worker, if one raised anything else.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as caught:  # noqa: BLE001 whatever it is, all must hear of it
        error = caught
    own = error and [isinstance(error, ValueError), files.cause_of(error)]
    limit = worker_group.timeout_seconds and max(
        worker_group.timeout_seconds, _DISK_SECONDS
    )
    texts = worker_group.all_gather(f"checkpoint: {topic}", json.dumps(own), limit)
    replies = [(rank, json.loads(text)) for rank, text in enumerate(texts)]
    failed = [(rank, *reply) for rank, reply in replies if reply]
    if not failed:
        return result
    worker_group.leave()
    rank, is_value_error, cause = failed[0]
    is_common = len(failed) == len(texts) and len(set(texts)) == 1
    where = "" if is_common else f"worker {rank}: "
    raise (ValueError if is_value_error else OSError)(
        f"The checkpoint was not {verb}: {where}{cause.rstrip('.')}. {aftermath} "
        f"Received: directory={path!r}"
    ) from error


def serialized(model: keras.Model) -> str | None:
    """The model for `tfdp convert`, with the user's own optimizer."""
    try:
        with plain_optimizer(model):
            return json.dumps(keras.saving.serialize_keras_object(model))
    except Exception:  # noqa: BLE001 a class of one's own may raise anything
        return None


def worker_group_of(model: keras.Model) -> Any:
    """The group of the workers of a model's strategy."""
    strategy = strategy_of(model)
    return _Alone() if strategy is None else strategy.extended.worker_group


class _Alone:
    """The worker group of one process that has no strategy."""

    rank = 0
    num_workers = 1
    timeout_seconds = None

    def all_gather(
        self, topic: str, text: str = "", timeout_seconds: float | None = None
    ) -> list[str]:
        del topic, timeout_seconds
        return [text]

    def leave(self) -> None:
        pass
