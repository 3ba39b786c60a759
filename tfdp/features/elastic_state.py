"""`ElasticState`: state of a custom training loop, which outlives workers.

with state -> the steps, `commit` -> a loss, or workers that join
    -> new cluster -> the state of the last commit -> `WorkersChanged`
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any

import keras

from tfdp.checkpoint import api, schema
from tfdp.checkpoint.backups import Backups, IncompatibleBackup
from tfdp.checkpoint.callback_state import check_value, from_json, to_json
from tfdp.checkpoint.index import Index
from tfdp.checkpoint.memory_backups import MemoryBackups
from tfdp.checkpoint.model_state import model_state, saved_variables
from tfdp.checkpoint.newest_state import find_newest
from tfdp.checkpoint.random_state import gather_random_states, restore_random_states
from tfdp.checkpoint.reader import LoadPlan
from tfdp.checkpoint.run_schema import FACTS, RANDOM_STATES
from tfdp.checkpoint.training_state import backup_tensors, plan_backup, run_facts
from tfdp.communication.coordination.facts import SharedFact, compare, digest
from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.communication.coordination.preemption import PreemptionNotice, PreemptionWatch
from tfdp.communication.coordination.watch import (
    ClusterChanges,
    WorkerLost,
    WorkersChanged,
    WorkersJoin,
)
from tfdp.features import elastic
from tfdp.ground._compat import tensor_reads
from tfdp.ground.arguments import checked_integer
from tfdp.ground.base import activities
from tfdp.ground.base.context import strategy_of
from tfdp.ground.base.feature import equalize_replicas
from tfdp.training.keras_hooks import configs
from tfdp.training.optimizer.arguments import check_strategy

# Number of commits that stay in the directory, so that the previous one can be read if
# the last one is damaged.
_NUM_KEPT = 2
_RUN = {
    "steps": schema.COUNT,
    "batches": schema.COUNT,
    "facts": FACTS,
    "random": RANDOM_STATES,
    "values": check_value,
}


class ElasticState:
    """State of a training loop around `strategy.run` that outlives its workers.

    With `CommunicationOptions(on_loss="continue")` the loop continues when workers are
    lost, or join. Its steps, evaluations and saves are made within `with state:`. When
    the workers change there, the block ends with `tfdp.WorkersChanged`. By then the
    strategy has the new workers, and the model and the values are those of the last
    `commit`. The loop then tries the step again: it distributes its dataset anew, from
    the position in the values, and creates its `tf.function` anew, best at the
    beginning of the block.

    All workers create it, when the model is built, and before they distribute data. A
    script that starts again continues from the last commit; so does a worker that
    joins. One device needs no change of the script.

    Args:
        model: Built Keras model, compiled with the optimizer of the loop. Use
            `model.optimizer` in the step: a sharded optimizer is another one after a
            change.
        directory: String or path-like, a directory for this state alone, which all
            workers share; or the URL of an object store.
        disk_every: Int, number of commits between two that are also written into the
            directory; the others are kept in the memory of the hosts only, with a copy
            on another host, as far as memory suffices. Defaults to 100.
        **values: Initial values of the loop, the same on all workers, such as the
            number of the step: numbers, strings, arrays, lists and dicts. They become
            attributes of the state, to be read and set. Each commit saves them as text,
            so keep them small.

    Raises:
        ValueError: If an argument is invalid; on every worker, if the directory has the
            state of another model or loop.
        OSError: On every worker, if one cannot write into the directory.

    Example:

    >>> import numpy as np, tempfile, tfdp
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> state = tfdp.ElasticState(model, tempfile.mkdtemp(), step=0, losses=[])
    >>> x, y = np.ones((4, 2)), np.ones(4)
    >>> while state.step < 3:
    ...     try:
    ...         with state:
    ...             state.losses.append(model.train_on_batch(x, y))
    ...             state.step += 1
    ...             state.commit()
    ...     except tfdp.WorkersChanged:
    ...         continue  # the first worker has printed who was lost
    >>> len(state.losses)
    3
    >>> state.delete()

    Source: the state of Horovod's elastic loops,
    https://horovod.readthedocs.io/en/stable/elastic_include.html
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self,
        model: keras.Model,
        directory: str | os.PathLike[str],
        *,
        disk_every: int = 100,
        **values: Any,
    ) -> None:
        self._values = _checked_values(values)
        self._model, self._directory = model, os.fspath(directory)
        self._disk_every = checked_integer("disk_every", disk_every, 1)
        _check_model(model)
        self._num_commits = 0
        self._is_entered = False
        # Ids of the saved variables. They are collected again whenever a step assigns
        # an unknown variable, since metrics and optimizers create theirs late.
        self._saved: set[int] = set()
        self._strategy = strategy_of(model)
        self._continues = elastic.continues(self._strategy)
        if self._continues:
            elastic.FEATURE.add_call(self._strategy, self._facts())
        # Whether the weights may be those of an interrupted step, which must not be
        # saved as the initial state.
        self._has_begun = False
        if self._continues and self._strategy.extended.is_applicant:
            # `model_state` builds the optimizer: the workers that this one joins have
            # built theirs, and all workers renew their optimizers together.
            model_state(model)
            self._has_begun = True
            self._continue_after(WorkersJoin())
            return
        try:
            self._check_arguments()
            self._begin()
        except ClusterChanges as change:
            if not self._is_recoverable(change):
                raise
            self._continue_after(change)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        elif name in self._values:
            self._values[name] = value
        else:
            raise AttributeError(
                f"`ElasticState` saves the values that it is created with. Add "
                f"`{name}=...` to its arguments."
            )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            values = vars(self).get("_values", {})
            if name in values:
                return values[name]
            raise AttributeError(f"`ElasticState` has no value {name!r}")

    def commit(self) -> None:
        """Save the model, its optimizer and the values. All workers call it together.

        Call it between two steps: after a loss, all work since the last commit is
        repeated. Workers that have applied join here.

        Raises:
            TypeError: If a value has another type than those that are saved.
            OSError: On every worker, if one cannot write.
        """
        self._num_commits += 1
        self._save()
        if self._is_entered and self._continues:
            self._watch.any_worker_notified(self._num_commits)
            if self._watch.joining:
                raise WorkersJoin(self._watch.joining)

    def delete(self) -> None:
        """Delete what was saved: training is complete. All workers call it together."""
        # With `on_loss="continue"`, the loss of a worker is ignored here, since
        # training is complete.
        with contextlib.suppress(*[WorkerLost] * self._continues):
            self._backups.finish()
            self._memory.delete()
            self._backups.delete()

    def __enter__(self) -> ElasticState:
        self._set_entered(True)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._set_entered(False)
        if not self._continues or not isinstance(error, Exception):
            return
        change = self._change_behind(error)
        if change is None:
            return
        if not self._is_recoverable(change):
            raise change from error
        raise WorkersChanged(self._continue_after(change)) from error

    def _set_entered(self, is_entered: bool) -> None:
        """Record that the block `with state:` begins, or that it has ended.

        Within the block, Keras's loops do not recover from a change of the workers,
        since the block does; and each variable that a step assigns is checked by
        `_check_saved`.

        Args:
            is_entered: Bool, whether the block begins.
        """
        self._is_entered = elastic.FEATURE.is_in_loop = is_entered
        if self._strategy is not None:
            check = self._check_saved if is_entered else None
            self._strategy.extended.on_assigned = check

    def _check_saved(self, variable: Any) -> None:
        """Raise if a variable that a step assigns is not saved.

        A metric that is not saved, for example, would count repeated steps twice.

        Raises:
            ValueError: If it is not of the model, its metrics or its optimizers.
        """
        if id(variable) in self._saved:
            return
        self._saved = {
            id(tensor_reads.value_of(saved)) for saved in saved_variables(self._model)
        }
        if id(variable) not in self._saved:
            raise ValueError(
                "`ElasticState` saves the model, its metrics and its optimizers, but "
                "the step also assigns another variable, which would be wrong after a "
                "change of the workers. Make a metric an attribute of the model "
                "(`model.train_loss = keras.metrics.Mean()`), and several models parts "
                f"of one. Received: {variable.name!r}"
            )

    def _naming_lost_workers(self) -> contextlib.AbstractContextManager:
        """Return a context that raises errors caused by a lost worker as `WorkerLost`.

        Other errors are raised unchanged.
        """
        if self._strategy is None:
            return contextlib.nullcontext()
        return self._strategy.extended.naming_lost_workers()

    def _is_recoverable(self, change: ClusterChanges) -> bool:
        """Return whether this worker may continue after a change of the workers.

        It may with `on_loss="continue"`, unless the others have declared it lost.
        """
        return self._continues and not elastic.is_declared_lost(self._strategy, change)

    def _change_behind(self, error: Exception) -> ClusterChanges | None:
        """Return the change of the workers that has caused an error, or `None`."""
        cause: BaseException | None = error
        # AutoGraph replaces an error of a traced function, so the change may be among
        # the causes of `error`. A `WorkersChanged` among them ends the search, since
        # its change was already handled.
        while cause is not None and not isinstance(cause, WorkersChanged):
            if isinstance(cause, ClusterChanges):
                return cause
            cause = cause.__cause__ or cause.__context__
        try:
            with self._naming_lost_workers():
                raise error
        except ClusterChanges as change:
            return change
        except Exception:  # noqa: BLE001 the caller raises the error
            return None

    def _continue_after(self, change: ClusterChanges) -> str:
        """Form a new cluster, and load the state of the last commit.

        Args:
            change: `ClusterChanges`, the reason.

        Returns:
            String, what has changed and what to do.

        Raises:
            RuntimeError: If the remaining workers may not continue.
        """
        while True:
            self._close()
            text = elastic.change_cluster(self._model, change, "The loop continues")
            try:
                self._begin()
                break
            except ClusterChanges as further:
                if not self._is_recoverable(further):
                    raise
                change = further
        return (
            f"{text} The model and the values of `ElasticState` are those of commit "
            f"{self._num_commits}: distribute the dataset again, create the "
            "`tf.function` of the step anew, and try the step again."
        )

    def _begin(self) -> None:
        """Load the newest saved state; if there is none yet, save the initial state.

        Raises:
            ClusterChanges: If more workers are lost.
            RuntimeError: If the state of the loop is lost.
        """
        with self._naming_lost_workers():
            if not self._load():
                if self._has_begun or self._model in elastic.FEATURE.discarded:
                    raise RuntimeError(
                        "The workers that are left have found no state from which to "
                        "continue. Start the job again."
                    )
                self._save()
        self._has_begun = True

    def _load(self) -> bool:
        """Load the newest state that is saved in memory or in the directory, if any.

        It restores the model, its optimizer, the values and the random states. Before
        that, it creates the objects that save states, for the present workers.

        Returns:
            Bool, whether a saved state was found, and is loaded.
        """
        # `model_state` builds the optimizer. It is called before the search for a
        # state, which may fail on some workers, so that all workers build it.
        model_state(self._model)
        group = self._group = worker_group_of(self._model)
        extended = None if self._strategy is None else self._strategy.extended
        applicants = list if extended is None else extended.applicants
        self._watch = PreemptionWatch(PreemptionNotice(), group, applicants)
        self._backups = Backups(
            self._directory,
            _NUM_KEPT,
            group,
            functools.partial(api.serialize_model, self._model),
            has_memory=True,
        )
        self._memory = MemoryBackups(
            self._directory,
            1,
            group,
            None if extended is None else extended.connect_workers,
            reads_when_disabled=True,
        )
        found = find_newest(
            self._backups, self._memory, self._plan, is_end_of_epoch=False
        )
        if found is None:
            return False
        place, index, load_plan = found
        # A state from another number of replicas is merged into the present values of
        # the metrics, which must not count: they are reset.
        self._model.reset_metrics()
        place.load(index, load_plan)
        elastic.FEATURE.discarded.discard(self._model)
        run = index.run
        restore_random_states(run["random"], group)
        self._values.update(from_json(run["values"]))
        self._num_commits = run["steps"]
        return True

    def _close(self) -> None:
        """Close the `MemoryBackups`, if any, once other hosts have their copies."""
        if "_memory" in vars(self):
            self._memory.close()

    def _plan(self, index: Index) -> LoadPlan:
        """Check by its `Index` that a state is of this loop, and plan what to read.

        Raises:
            IncompatibleBackup: If the state is not of this loop.
            schema.Malformed: If its metadata is invalid.
        """
        run = index.run
        if not isinstance(run, dict) or "values" not in run:
            raise IncompatibleBackup("it was not saved by `ElasticState`")
        schema.check(run, _RUN, "run")
        saved = from_json(run["values"])
        if saved.keys() != self._values.keys():
            raise IncompatibleBackup(
                f"its values are {sorted(saved)}. Received: {sorted(self._values)}"
            )
        return plan_backup(self._model, {}, index, run["facts"], with_metrics=True)

    @activities.during(activities.SAVE)
    def _save(self) -> None:
        """Save the state in memory, and in the directory if that is due.

        The directory is due after `disk_every` commits, or always if states cannot be
        saved in memory.
        """
        equalize_replicas(self._model)
        run = {
            "steps": self._num_commits,
            "batches": 0,
            "facts": run_facts(self._model),
            "random": gather_random_states(self._group),
            "values": _encoded(self._values),
        }
        tensors = backup_tensors(self._model, {}, in_epoch=True)
        if self._memory.is_enabled:
            self._memory.save(self._num_commits, tensors, run)
        is_due = self._num_commits and not self._num_commits % self._disk_every
        if is_due or not self._memory.is_enabled:
            self._backups.save(self._num_commits, tensors, run)

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of `ElasticState` that must be the same on all workers.

        Returns:
            Dict with `"directory"`, `"disk_every"` and `"values"`, the names of the
            values.
        """
        return {
            "directory": self._directory,
            "disk_every": self._disk_every,
            "values": sorted(self._values),
        }

    def _check_arguments(self) -> None:
        """Raise on every worker if the arguments of `ElasticState` differ."""
        with self._naming_lost_workers():
            problem = "All workers must create `ElasticState` with the same arguments."
            fact = SharedFact("arguments", self._arguments(), problem)
            compare(worker_group_of(self._model), "`ElasticState`", [fact])

    def _facts(self) -> dict[str, str]:
        """Return what a worker that joins must have in common, for `Elastic.add_call`.

        Returns:
            Dict from the name of the fact, for messages, to a digest of the configs of
            the model and the arguments of `ElasticState`.
        """
        described = {
            "configs": configs.configs_of("fit", self._model, [], has_trained=True),
            "arguments": self._arguments(),
        }
        text = digest(configs.comparable(described))[:16]
        return {"model or arguments of `ElasticState`": text}


def _check_model(model: Any) -> None:
    """Raise if a model's loop cannot continue after the loss of a worker.

    Raises:
        ValueError: If it has no optimizer, or a strategy that tfdp does not support.
    """
    check_strategy(model.distribute_strategy)
    if getattr(model, "optimizer", None) is None:
        raise ValueError(
            "`ElasticState` saves the optimizer, too: call "
            "`model.compile(optimizer=...)` with that of the loop first."
        )


def _checked_values(values: dict[str, Any]) -> dict[str, Any]:
    """Check the names and types of the values of a loop, and return them.

    Args:
        values: Dict from names, which become attributes of `ElasticState`, to values.

    Raises:
        ValueError: If a name is private, or that of another attribute.
        TypeError: If a value has another type than those that are saved.
    """
    for name in values:
        if name.startswith("_") or hasattr(ElasticState, name):
            raise ValueError(
                f"A value of `ElasticState` needs another name. Received: {name!r}"
            )
    _encoded(values)
    return values


def _encoded(values: dict[str, Any]) -> Any:
    """Return the values of a loop as a nest of lists, dicts and values for JSON.

    Raises:
        TypeError: If a value has another type than those that are saved.
    """
    for name, value in values.items():
        try:
            to_json(value)
        except TypeError as error:
            raise TypeError(
                "The values of `ElasticState` must be numbers, strings, arrays, lists "
                f"and dicts. Received: {name}={value!r}"
            ) from error
    return to_json(values)
