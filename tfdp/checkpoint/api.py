"""`save` and `restore` of checkpoints, on any number of replicas."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import keras

from tfdp.checkpoint import files
from tfdp.checkpoint import reader as reading
from tfdp.checkpoint import writer as writing
from tfdp.checkpoint.accumulated_gradients import redistribute_accumulated_gradients
from tfdp.checkpoint.background import (
    BackgroundSaves,
    Pause,
    PendingSave,
    Read,
    background_saves,
    memory_budget,
)
from tfdp.checkpoint.index import Index, TensorMetadata
from tfdp.checkpoint.index_file import from_text, load_index, to_text, versions
from tfdp.checkpoint.model_state import model_state
from tfdp.checkpoint.object_store import absolute_path, open_storage
from tfdp.checkpoint.on_all_workers import run_on_all_workers
from tfdp.checkpoint.reader import LoadPlan
from tfdp.checkpoint.storage import Storage, StoreError
from tfdp.checkpoint.training_state import checkpoint_tensors, plan_checkpoint
from tfdp.communication.cluster import cpu_kernels
from tfdp.communication.coordination.checks import check_same_variables
from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.ground.arguments import checked_bool, checked_path
from tfdp.ground.base import activities
from tfdp.ground.base.context import strategy_of
from tfdp.ground.base.feature import equalize_replicas
from tfdp.training.keras_hooks import install
from tfdp.training.keras_hooks.file_hooks import plain_optimizer
from tfdp.training.replicas.synchronized_scope import synchronize_new_variables
from tfdp.training.sharding.state_tensors import StateTensor

# An error of a save or restore contains one of these sentences, since the user must
# know in which state the failure has left the files or the model.
_INTACT = "The save has not changed the previous contents of the directory."
_NOTHING_LOADED = "Nothing was loaded."
_PARTLY_LOADED = (
    "Some variables may have been overwritten; restore again before you continue."
)


@overload
def save(
    model: keras.Model, directory: str | os.PathLike[str], *, background: Literal[True]
) -> PendingSave: ...


@overload
def save(
    model: keras.Model,
    directory: str | os.PathLike[str],
    *,
    background: Literal[False] = False,
) -> None: ...


@activities.during(activities.SAVE)
def save(
    model: keras.Model, directory: str | os.PathLike[str], *, background: bool = False
) -> PendingSave | None:
    """Write the training state into a directory; each worker writes its shards.

    All workers call it together, with a directory that all of them share, or with a
    URL of an object store (`pip install tfdp[fsspec]`). An earlier checkpoint in the
    directory stays until the new one is complete, and is then deleted.

    Args:
        model: Built Keras model, with its optimizer.
        directory: String or path-like, created if it does not exist; or a string, a
            URL such as `"s3://bucket/run/latest"`.
        background: Bool, whether to return after each worker has copied its part of the
            state in memory, and to write the copy while training continues. A failure
            is raised by `PendingSave.wait`, or else by the next `save` or `restore` or
            the end of `fit`; at the end of the script it is printed. A `fit` that began
            before the first use of tfdp does not wait. Defaults to `False`.

    Returns:
        `PendingSave` if `background` is true, else `None`.

    Raises:
        ValueError: If `directory` cannot hold a checkpoint, or the workers have
            different models.
        OSError: On every worker, if one of them cannot write. The earlier
            checkpoint is intact.

    Example:

    >>> import tempfile, tfdp
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> directory = tempfile.mkdtemp()
    >>> tfdp.checkpoint.save(model, directory)
    >>> sorted(os.listdir(directory))
    ['data-...', 'index.json']
    >>> pending = tfdp.checkpoint.save(model, directory, background=True)
    >>> pending.wait()
    """
    worker_group = worker_group_of(model)
    saves = background_saves(worker_group)
    if checked_bool("background", background):
        install.install()  # only a patched `fit` waits at its end for the save
    else:
        saves.finish()
    return save_state(
        checkpoint_tensors(model),
        directory,
        worker_group,
        functools.partial(serialize_model, model),
        functools.partial(_equalize_state, model),
        saves=saves if background else None,
    )


def _equalize_state(model: keras.Model) -> None:
    """Make the state equal on all replicas, so that any worker can write it.

    Accumulated gradients become an equal fraction of their sum on each replica.
    """
    strategy = strategy_of(model)
    if strategy is not None:
        # `strategy.scope()` synchronizes new variables only when it ends. `save` may be
        # called within the scope, so it synchronizes them here.
        synchronize_new_variables(strategy)
    equalize_replicas(model)
    redistribute_accumulated_gradients(model)


def restore(model: keras.Model, directory: str | os.PathLike[str]) -> None:
    """Read the training state that `save` wrote, on any number of replicas.

    All workers call it together. Each worker reads only the files that it needs.
    Nothing is loaded on any worker unless all of these files are intact.

    Args:
        model: Built Keras model, compiled with the same optimizer.
        directory: String or path-like, the directory or URL of the checkpoint.

    Raises:
        ValueError: On every worker, if there is no checkpoint, if it belongs to
            another model, or if a file is missing or damaged.
        OSError: On every worker, if an object store does not answer one of them.

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
    # Building the optimizer synchronizes the workers, so `model_state` builds it before
    # a worker can fail to read its files: the others would wait for that worker.
    model_state(model)
    plan = functools.partial(plan_checkpoint, model)
    worker_group = worker_group_of(model)
    background_saves(worker_group).finish()
    restore_state(plan, directory, worker_group)


def save_state(
    state: Sequence[StateTensor],
    directory: str | os.PathLike[str],
    worker_group: Any,
    serialize: Callable[[], str | None] = lambda: None,
    prepare: Callable[[], None] = lambda: None,
    run: Any = None,
    saves: BackgroundSaves | None = None,
    check: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> Any:
    """Write state tensors, and the model as a string, into a directory.

    All workers call it together.

    Args:
        state: Sequence of `StateTensor`.
        directory: String or path-like, as for `save`.
        worker_group: `WorkerGroup` between the workers.
        serialize: Callable that returns the model as a string, or `None`; called on
            worker 0.
        prepare: Callable that makes the state equal on all replicas. It is called
            after the check that all workers save the same tensors.
        run: Metadata of the run, a value that JSON supports, or `None`; worker 0 writes
            its own.
        saves: `BackgroundSaves` of these workers, which write the state in the
            background. Defaults to `None`: the state is written before this returns.
        check: Callable, called on worker 0 before files are written; its error ends
            the save on every worker.
        after: Callable, called on worker 0 after the checkpoint is complete.

    Returns:
        `PendingSave` if `saves` is given, or `None`.
    """
    entries = files.metadata_of(state)
    needs = "" if saves is None else saves.needs(state)
    topic = "checkpoint.save" if saves is None else "checkpoint.save in the background"
    needs_of_all = check_same_variables(worker_group, topic, entries, "saves", needs)
    prepare()
    model = serialize() if worker_group.is_chief else None
    path = absolute_path(_checked(directory))
    metadata = _Metadata(path, entries, model, run, check)

    def write(read: Read, worker_group: Any, pause: Pause) -> None:
        """Write the files of the checkpoint, and then call `after` on worker 0.

        Args:
            read: `Read`, returns the state to write.
            worker_group: `WorkerGroup` for the thread that writes.
            pause: `Pause`, called between files.
        """
        _write_checkpoint(metadata, read, worker_group, pause)
        if worker_group.is_chief:
            after()

    if saves is not None:
        return saves.start(write, state, worker_group, needs_of_all)
    return write(lambda: state, worker_group, lambda: None)


@dataclasses.dataclass(frozen=True)
class _Metadata:
    """Path of a checkpoint, and contents of its index other than the shards.

    Args:
        path: String, the directory or URL of the checkpoint.
        entries: Tuple of `TensorMetadata`.
        model: String, the serialized model, or `None`.
        run: Metadata of the run, a value that JSON supports, or `None`.
        check: Callable, raises an error on worker 0 if nothing may be written.
    """

    path: str
    entries: tuple[TensorMetadata, ...]
    model: str | None
    run: Any
    check: Callable[[], None]


def _write_checkpoint(
    metadata: _Metadata, read: Read, worker_group: Any, pause: Pause
) -> None:
    """Write the files of a checkpoint, then its index; remove older checkpoints.

    Args:
        metadata: `_Metadata`.
        read: `Read`, returns the state to write.
        worker_group: `WorkerGroup` between the workers.
        pause: `Pause`, called between files.
    """
    path, rank = metadata.path, worker_group.rank
    act = functools.partial(run_on_all_workers, worker_group, path, "saved", _INTACT)

    def begin() -> tuple[Storage, str]:
        """Open the storage; on worker 0, create a data folder.

        Returns:
            Tuple of the `Storage`, and the name of the data folder; `""` on other
            workers.
        """
        storage = open_storage(path)
        if not worker_group.is_chief:
            return storage, ""
        metadata.check()
        return storage, writing.make_data_folder(storage)

    storage, token = act("the folder", begin)
    begun = [token, files.best_algorithm()]
    answers = worker_group.all_gather("checkpoint.save: the folder's name", begun)
    token, algorithm = answers[0][0], min(answer[1] for answer in answers)
    folder = storage.below(token)

    def publish() -> None:
        """On worker 0, write the index, and remove the folders of older checkpoints."""
        if worker_group.is_chief:
            shards = writing.collect_shard_lists(folder, worker_group.num_workers)
            index = Index(
                token,
                metadata.entries,
                shards,
                versions() | cpu_kernels.versions(),
                metadata.model,
                metadata.run,
                algorithm,
            )
            text = to_text(index)
            # The text is parsed again, so that an index that cannot be read raises an
            # error before it replaces that of the previous checkpoint.
            from_text(text)
            writing.replace_index(storage, token, text)
            writing.remove_old_folders(storage, keep=token)

    try:
        act(
            "the files",
            lambda: writing.write_local_shards(read(), folder, rank, algorithm, pause),
        )
        act("the index", publish)
    except (OSError, ValueError) as error:
        # After a timeout, an object store may still complete the write of the index, so
        # the files that the index names must not be removed.
        if worker_group.is_chief and not isinstance(error.__cause__, StoreError):
            writing.discard_save(storage, token)
        raise


def _checked(directory: str | os.PathLike[str]) -> str:
    """Return a directory or URL as a string; raise `ValueError` if it is neither."""
    return checked_path("directory", directory, "the path of a directory, or a URL")


def restore_state(
    make_plan: Callable[[Index], LoadPlan],
    directory: str | os.PathLike[str],
    worker_group: Any,
) -> None:
    """Restore the tensors that `make_plan` selects from the checkpoint in a directory.

    All workers call it together.

    Args:
        make_plan: Callable that takes the `Index` and returns the `LoadPlan`.
        directory: String or path-like, as for `restore`.
        worker_group: `WorkerGroup` between the workers.
    """
    path = _checked(directory)

    room = memory_budget(worker_group)

    def find() -> tuple[Index, LoadPlan]:
        """Return the index, and a load plan with the values for this worker."""
        storage = open_storage(path)
        index = load_index(path)
        load_plan = make_plan(index)
        reading.check_model(index, load_plan)
        reading.read_shards(load_plan, index, storage.below(index.token), room)
        return index, load_plan

    index, load_plan = run_on_all_workers(
        worker_group, path, "restored", _NOTHING_LOADED, "its files", find
    )
    if not worker_group.all_equal("checkpoint.restore: which", index.token):
        raise ValueError(
            "The workers found different checkpoints. Give all of them the same "
            "directory, and do not save into it while they restore. "
            f"Received: directory={path!r}"
        )
    load = functools.partial(reading.assign_values, load_plan)
    run_on_all_workers(
        worker_group, path, "restored", _PARTLY_LOADED, "its tensors", load
    )
    load_plan.finish()


def serialize_model(model: keras.Model) -> str | None:
    """Serialize the model with the user's optimizer as JSON, for `tfdp convert`.

    Returns:
        String, or `None` if the model cannot be serialized.
    """
    try:
        with plain_optimizer(model):
            return json.dumps(keras.saving.serialize_keras_object(model))
    except Exception:  # noqa: BLE001 `get_config` of a user's layer may raise anything
        return None
