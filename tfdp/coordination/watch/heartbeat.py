"""Signs of life, through the key-value store of the first worker."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.coordination.progress import WorkerProgress, progress
from tfdp.coordination.watch.errors import Verdict
from tfdp.coordination.watch.failure_detector import FailureDetector
from tfdp.coordination.worker_group import WorkerGroup

BEAT_SECONDS = 1.0
# A key is missing for a moment when it is written anew.
_READ_SECONDS = 0.02
# Well before the watchdog says who is behind, all know where everybody is.
_WAITING_SECONDS = 5.0


class Heartbeat(threading.Thread):
    """Tells the others every second that this worker lives, and where it is.

    All tell the first worker, which hosts the store; it tells all what it knows, and
    who is lost. A call of the store may never return once the first worker stands
    still: so nothing else happens in this thread.

    Args:
        worker_group: `WorkerGroup` between the workers.
        sightings: `FailureDetector`, which takes what is heard.
    """

    def __init__(self, worker_group: WorkerGroup, sightings: FailureDetector) -> None:
        super().__init__(name="tfdp pulse", daemon=True)
        self.verdict: Verdict | None = None
        self.words = ""
        self.has_left = False
        self._rank = worker_group.rank
        self._prefix = worker_group.new_prefix()
        self._sightings = sightings
        self._count = 0
        self._heard: dict[int, int] = {}
        self._wake = threading.Event()
        # Beats that are through; who waits for one waits for a later one to begin.
        self._num_through = 0
        self._turn = threading.Condition()

    def run(self) -> None:
        """Beats until this worker has said that it leaves."""
        is_last = False
        while not is_last:
            self._wake.wait(BEAT_SECONDS)
            self._wake.clear()
            is_last = self.has_left
            # The first worker may not answer: the watchdog looks at that.
            with contextlib.suppress(tf.errors.OpError):
                self._beat()
            with self._turn:
                self._num_through = self._count
                self._turn.notify_all()

    def tell_now(self, patience_seconds: float) -> None:
        """Beats at once, and waits until that is through, but not for ever.

        Args:
            patience_seconds: Float.
        """
        with self._turn:
            wanted = self._count + 1
            self._wake.set()
            self._turn.wait_for(lambda: self._num_through >= wanted, patience_seconds)

    def _beat(self) -> None:
        with self._turn:
            self._count += 1
        if self._rank > 0:
            self._publish(f"beat/{self._rank}", self._own())
            self._take_news(self._read("news"))
            return
        for rank in self._sightings.ranks():
            self._take(rank, self._read(f"beat/{rank}"))
        self._publish("news", {"own": self._own(), "of": self._known()})

    def _own(self) -> dict[str, Any]:
        """What the others hear of this worker."""
        return {
            "count": self._count,
            "place": dataclasses.asdict(progress.place),
            "words": self.words,
            "has_left": self.has_left,
            "verdict": self.verdict and dataclasses.asdict(self.verdict),
        }

    def _take(self, rank: int, beat: dict[str, Any] | None, age: float = 0.0) -> bool:
        """Takes in another worker's beat; says whether it is a new one."""
        if beat is None or beat["count"] == self._heard.get(rank):
            return False
        self._heard[rank] = beat["count"]
        # Before anything else: who leaves because of another one is not to blame.
        if beat.get("verdict") and self.verdict is None:
            self.verdict = Verdict(**beat["verdict"])
        self._sightings.heard(rank, age, WorkerProgress(**beat["place"]))
        self._sightings.told(rank, has_left=beat["has_left"], words=beat["words"])
        return True

    def _known(self) -> dict[int, dict[str, Any]]:
        """What the first worker has heard of those of whom there is something to say.

        While all go on that is nobody: news for a thousand workers stay short.
        """
        now = time.monotonic()
        found = {}
        for rank, count in self._heard.items():
            known = self._sightings.of(rank)
            is_waiting = known.place and known.place.seconds > _WAITING_SECONDS
            if not (is_waiting or known.words or known.has_left):
                continue
            found[rank] = {
                "count": count,
                "age": now - known.heard,
                "place": known.place and dataclasses.asdict(known.place),
                "words": known.words,
                "has_left": known.has_left,
            }
        return found

    def _take_news(self, news: dict[str, Any] | None) -> None:
        if news is None or not self._take(0, news["own"]):
            return
        for text, beat in news["of"].items():
            if int(text) != self._rank:
                self._take(int(text), beat, beat["age"])

    def _publish(self, key: str, content: dict[str, Any]) -> None:
        """A key can be written once only, so that it is deleted before."""
        _compat.delete_key_value(f"{self._prefix}/{key}")
        _compat.set_key_value(f"{self._prefix}/{key}", json.dumps(content))

    def _read(self, key: str) -> dict[str, Any] | None:
        try:
            text = _compat.get_key_value(f"{self._prefix}/{key}", _READ_SECONDS)
        except tf.errors.DeadlineExceededError:
            return None
        return json.loads(text)
