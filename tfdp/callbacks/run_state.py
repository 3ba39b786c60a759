"""State of a run in a backup: metadata and tensors of a `fit`, and its restoration."""

from __future__ import annotations

import json
from typing import Any

from tfdp.callbacks.resumed_batches import ResumedBatches
from tfdp.checkpoint import schema
from tfdp.checkpoint.backups import IncompatibleBackup
from tfdp.checkpoint.callback_state import (
    callback_states,
    check_arrays,
    empty_arrays,
    set_callback_states,
    to_json,
)
from tfdp.checkpoint.index import Index
from tfdp.checkpoint.random_state import gather_random_states, restore_random_states
from tfdp.checkpoint.reader import LoadPlan
from tfdp.checkpoint.run_schema import check_run
from tfdp.checkpoint.training_state import (
    CALLBACKS_PREFIX,
    backup_tensors,
    plan_backup,
    run_facts,
)
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.training.data.position import DataPosition
from tfdp.training.sharding.state_tensors import StateTensor

# Version of the metadata in a backup. A backup of a higher version is refused, since
# its metadata may have another meaning.
_FORMAT = 1


class RunState:
    """Collects the state of a running `fit` for a backup, and restores it from one.

    Args:
        model: Compiled Keras model.
        position: `DataPosition` of the data of that `fit`.
        batches: `ResumedBatches` of that `fit`.
        callbacks: List of the callbacks whose state is saved.
        worker_group: `WorkerGroup` between the workers.
    """

    def __init__(
        self,
        model: Any,
        position: DataPosition,
        batches: ResumedBatches,
        callbacks: list[Any],
        worker_group: WorkerGroup,
    ) -> None:
        self.model = model
        self.position = position
        self.batches = batches
        self._callbacks = callbacks
        self.worker_group = worker_group

    def collect(
        self, epoch: int, batches: int, steps: int, logs: Any, data: dict[str, Any]
    ) -> tuple[list[StateTensor], dict[str, Any]]:
        """Collect the state of `fit` for a backup. All workers call it.

        Args:
            epoch: Int, the epoch in which a resumed run continues.
            batches: Int, completed batches of that epoch.
            steps: Int, completed batches of the run.
            logs: Dict, the logs of the last batch.
            data: Dict, the position in the data at the start of the epoch.

        Returns:
            Tuple of the `StateTensor`s, and a dict with the metadata of the run.
        """
        states, arrays = callback_states(self._callbacks)
        run = {
            "format": _FORMAT,
            **self.batches.metadata(epoch),
            "facts": run_facts(self.model),
            "epoch": epoch,
            "batches": batches,
            "steps": steps,
            "is_stopped": not batches and bool(self.model.stop_training),
            "logs": to_json(logs or {}),
            "callbacks": states,
            "random": gather_random_states(self.worker_group),
            "data": data,
        }
        check_run(json.loads(json.dumps(run)))
        return backup_tensors(self.model, arrays, in_epoch=batches > 0), run

    def plan_load(self, index: Index) -> LoadPlan:
        """Check by its `Index` that a backup is of this run, and plan what to read.

        Raises:
            IncompatibleBackup: If the backup is not of this run.
            schema.Malformed: If the metadata of the backup is invalid.
        """
        run = index.run
        if run is None:
            raise IncompatibleBackup("it is a checkpoint without the state of a run")
        if not isinstance(run, dict):
            schema.raise_malformed(run, "run", "an object")
        if "values" in run:
            raise IncompatibleBackup("it is the state of a loop, of `ElasticState`")
        schema.check(run.get("format"), schema.COUNT, "run.format")
        if run["format"] > _FORMAT:
            made_by = index.versions.get("tfdp", "a newer version")
            raise IncompatibleBackup(
                f"it was made by tfdp {made_by}, which is newer than this"
            )
        check_run(run)
        check_arrays(run["callbacks"], index, CALLBACKS_PREFIX)
        change = self.batches.change_since(run)
        in_epoch = (
            run["batches"] > 0
            and self.position.difference_to(run["data"], change) is None
        )
        arrays = empty_arrays(run["callbacks"])
        return plan_backup(
            self.model, arrays, index, run["facts"], with_metrics=in_epoch
        )

    def restore(self, run: dict[str, Any], load_plan: LoadPlan) -> None:
        """Restore callbacks and random states, once the tensors are loaded.

        Args:
            run: Dict, the metadata of the run in the backup.
            load_plan: `LoadPlan` that was loaded.
        """
        set_callback_states(self._callbacks, run["callbacks"], load_plan.arrays)
        restore_random_states(run["random"], self.worker_group)
