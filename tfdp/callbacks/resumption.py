"""Resumption of `fit` from a backup: progress, position in the data, and the state."""

from __future__ import annotations

import math
from typing import Any

from tfdp.callbacks.run_state import RunState
from tfdp.checkpoint.callback_state import from_json
from tfdp.checkpoint.index import Index
from tfdp.checkpoint.newest_state import BackupTarget
from tfdp.checkpoint.reader import LoadPlan
from tfdp.communication.cluster import cpu_kernels
from tfdp.communication.coordination.progress import progress
from tfdp.features import elastic
from tfdp.ground._compat import keras_model
from tfdp.ground.text import say


class Resumption:
    """Continues `fit` from a backup.

    Keras resets the metrics at the beginning of an epoch. Therefore a backup that was
    made within an epoch is loaded when `fit` begins that epoch again, and is pending
    until then.

    Args:
        state: `RunState` of this `fit`.
        source: `BackupTarget` that has the backup.
        index: `Index` of the backup.
        load_plan: `LoadPlan`, what to read of it.
    """

    def __init__(
        self, state: RunState, source: BackupTarget, index: Index, load_plan: LoadPlan
    ) -> None:
        self._state = state
        self._source = source
        self._index = index
        self._load_plan = load_plan
        self.run_metadata: dict[str, Any] = index.run
        self._change = state.batches.change_since(self.run_metadata)
        # If the position in the data cannot be restored, `fit` begins the epoch again,
        # and `difference` is a clause that says why, for a warning; otherwise `None`.
        self.difference = state.position.difference_to(
            self.run_metadata["data"], self._change
        )

    def begin(self, params: dict[str, Any], directory: str) -> bool:
        """Begin `fit` at the epoch of the backup; load the backup unless it is pending.

        The first worker prints where the run resumes.

        Args:
            params: Dict, the parameters of `fit` that Keras passes to callbacks.
            directory: String, path or URL of the backups, for messages.

        Returns:
            Bool, whether the backup was made within an epoch, and is pending until
            `begin_epoch`.
        """
        model, position = self._state.model, self._state.position
        run = self.run_metadata
        epochs = params.get("epochs", run["epoch"] + 1)
        is_over = run["is_stopped"] or run["epoch"] >= epochs
        if run["epoch"]:
            # An uninterrupted run has reset its metrics at the beginning of the earlier
            # epochs. A resumed run skips those epochs, so it resets its metrics here.
            model.reset_metrics()
        # A backup from within an epoch waits until `fit` begins that epoch. A run that
        # is over begins no epoch, so its backup is loaded now.
        is_exact = self.difference is None
        is_pending = bool(is_exact and run["batches"] and not is_over)
        data, batches = self._state.batches.resume_position(run, self._change)
        if not is_pending:
            self._load()
            if is_exact:
                position.restore(data, batches)
            else:
                position.restore_length(data)
        keras_model.set_initial_epoch(model, epochs if is_over else run["epoch"])
        # Keras's initial epoch is reset at the end of `fit`: otherwise the next `fit`
        # would also begin at this epoch.
        position.exit_stack.callback(keras_model.set_initial_epoch, model, 0)
        progress.skip_epochs(run["epoch"])
        if is_over:
            self._say(
                f"the run saved in {directory} was already complete: no epochs are "
                "left to train"
            )
        else:
            place = self._place_in_epoch(batches if is_exact else 0, params)
            self._say(
                f"resumed at {place} of epoch {run['epoch'] + 1}, from "
                f"{self._source.source}"
            )
        if change := cpu_kernels.change_since(self._index.versions):
            self._say(change)
        return is_pending

    def begin_epoch(self) -> tuple[dict[str, Any], int]:
        """Load the pending backup, once `fit` has begun the epoch of the backup.

        Returns:
            Tuple of the data position at the start of the epoch, and the number of
            batches of this epoch that are not trained again.
        """
        self._load()
        position = self._state.position
        data, batches = self._state.batches.resume_position(
            self.run_metadata, self._change
        )
        position.restore(data, batches)
        position.last_logs = from_json(self.run_metadata["logs"])
        return data, batches

    def _load(self) -> None:
        """Restore the backup's tensors, callbacks, random states and learning rates."""
        self._source.load(self._index, self._load_plan)
        elastic.FEATURE.discarded.discard(self._state.model)
        self._state.restore(self.run_metadata, self._load_plan)
        adaptation = self._state.batches.adapt(self.run_metadata, self._change)
        if adaptation is not None:
            self._say(adaptation)

    @staticmethod
    def _place_in_epoch(batches: int, params: dict[str, Any]) -> str:
        """Return where in its epoch a run continues after a number of batches.

        Args:
            batches: Int, completed batches of the epoch.
            params: Dict, the parameters of `fit` that Keras passes to callbacks.

        Returns:
            String such as `"step 5"`, or `"the end"` if no batch is left.
        """
        # After the last batch, only validation and `on_epoch_end` are left of an epoch.
        # An execution of several steps counts as whole even if the epoch ends within
        # it, so the number of batches may exceed that of the epoch.
        is_end = batches and batches >= (params.get("steps") or math.inf)
        return "the end" if is_end else f"step {batches + 1}"

    def _say(self, text: str) -> None:
        """Print `text` as a line, on the first worker."""
        if self._state.worker_group.is_chief:
            say(text)
