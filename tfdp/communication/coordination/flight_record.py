"""Flight record: last actions of a worker, kept in memory and written on a failure."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from tfdp.communication.cluster import tf_config
from tfdp.ground.base.json_fields import from_fields

# All workers of a job write their flight records on either signal. `tfdp run` sends
# `LAUNCHER_SIGNAL` before it stops workers, since a script may use SIGUSR2 itself.
RECORD_SIGNAL = getattr(signal, "SIGUSR2", signal.SIGTERM)
LAUNCHER_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else RECORD_SIGNAL
# A flight record holds only this many of the most recent collectives, which bounds its
# memory and the size of its file.
NUM_COLLECTIVES = 512
# All-gathers of texts run over the job's store and not on devices, so they have a kind
# of their own in a flight record.
TEXTS = "all-gather of texts"
# `tfdp run` passes its log folder to workers by this key in the `tfdp` key of
# `TF_CONFIG`. Without a launcher, workers write flight records into the default folder.
FOLDER_KEY, DEFAULT_FOLDER = "logs", "tfdp-logs"
# No job has more workers than this: a file that names more is damaged.
_MAX_WORKERS = 1 << 20
# Version of the format of a flight record's file. Other versions are rejected, since
# their fields differ.
_FORMAT = 1

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class CollectiveIdentity:
    """A traced collective; equal on all members of its group, except for the name.

    Args:
        lane: String, name of the lane, in which collectives run one after another.
        ranks: Tuple of ints, the workers of the group.
        kind: String, such as `"all_reduce"`.
        dtype: String, name of the elements' dtype, or `""`.
        key: String that identifies the collective in the program, equal on all members;
            `""` for all collectives of a step.
        name: String, name scope in the graph, or the topic of texts.
    """

    lane: str
    ranks: tuple[int, ...]
    kind: str
    dtype: str
    key: str
    name: str


@dataclasses.dataclass(frozen=True)
class RecordedCollective(CollectiveIdentity):
    """A collective that a worker has entered.

    Args:
        number: Int, number of the request in its lane, the same on all members.
        num_bytes: Int, bytes of one replica's array.
        begin: Float, seconds of the wall clock.
        end: Float, seconds of the wall clock, or `None` if it has not ended.
    """

    number: int
    num_bytes: int
    begin: float
    end: float | None


class _Entry:
    """Record of a collective that this worker has entered; context manager of its run.

    Args:
        identity: `CollectiveIdentity`.
        number: Int, number of the request in its lane.
        num_bytes: Int, bytes of one replica's array.
    """

    __slots__ = ("begin", "end", "identity", "is_open", "num_bytes", "number")

    def __init__(
        self, identity: CollectiveIdentity, number: int, num_bytes: int
    ) -> None:
        self.identity, self.number, self.num_bytes = identity, number, num_bytes
        self.begin = time.perf_counter()
        self.end: float | None = None
        self.is_open = True

    def __enter__(self) -> None:
        """Do nothing: the record begins when the object is created."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Record that the worker has left, and without an error that it is complete."""
        self.is_open = False
        if kind is None:
            self.end = time.perf_counter()


class CollectiveRing:
    """Ring buffer of the last collectives that this worker has entered.

    No call takes a lock.

    Args:
        capacity: Int, number of collectives that are kept. Defaults to
            `NUM_COLLECTIVES`.

    Example:

    >>> ring = CollectiveRing(capacity=2)
    >>> identity = CollectiveIdentity("0/0", (0, 1), "all_reduce", "float32", "7", "a")
    >>> for number in range(3):
    ...     with ring.entered(identity, number, num_bytes=8):
    ...         pass
    >>> with ring.entered(identity, 3, num_bytes=8):
    ...     ring.awaited() == (identity, 3), ring.newest()
    (True, {'0/0': 3})
    >>> [(each.number, each.end is None) for each in ring.collectives()]
    [(2, False), (3, False)]
    """

    def __init__(self, capacity: int = NUM_COLLECTIVES) -> None:
        self._entries: collections.deque[_Entry]
        self._entries = collections.deque(maxlen=capacity)

    def entered(
        self, identity: CollectiveIdentity, number: int, num_bytes: int
    ) -> contextlib.AbstractContextManager[None]:
        """Record that this worker enters a collective; return a context to run it in.

        The end of the context is recorded as the end of the collective, unless an error
        is raised in it.

        Args:
            identity: `CollectiveIdentity`.
            number: Int, number of the request in its lane.
            num_bytes: Int, bytes of one replica's array.
        """
        entry = _Entry(identity, number, num_bytes)
        self._entries.append(entry)
        return entry

    def awaited(self) -> tuple[CollectiveIdentity, int] | None:
        """Return the collective that this worker has awaited longest, and its number.

        Returns:
            Tuple of a `CollectiveIdentity` and an int, or `None` if it waits in none.
            All-gathers of texts do not count.
        """
        for each in copy_of(self._entries):
            if each.is_open and each.identity.kind != TEXTS:
                return each.identity, each.number
        return None

    def newest(self) -> dict[str, int]:
        """Return the number of the last collective entered in each lane, by lane."""
        return {each.identity.lane: each.number for each in copy_of(self._entries)}

    def collectives(self) -> list[RecordedCollective]:
        """Return the last collectives, in the order in which they were entered."""
        offset = wall_offset()
        return [
            RecordedCollective(
                **vars(each.identity),
                number=each.number,
                num_bytes=each.num_bytes,
                begin=each.begin + offset,
                end=None if each.end is None else each.end + offset,
            )
            for each in copy_of(self._entries)
        ]


def wall_offset() -> float:
    """Return the offset in seconds from `time.perf_counter()` to the wall clock."""
    return time.time() - time.perf_counter()


def copy_of(ring: collections.deque[_T]) -> list[_T]:
    """Return a copy of a deque to which other threads may append at the same time."""
    while True:
        with contextlib.suppress(RuntimeError):  # another thread appended: try again
            return list(ring)


@dataclasses.dataclass(frozen=True)
class Span:
    """A call or step of a worker's script, and the time that it has spent there.

    Args:
        name: String, such as `"step 3 of epoch 1 of fit"`, or `""` outside of Keras's
            loops and tfdp's calls.
        begin: Float, seconds of the wall clock.
        end: Float, seconds of the wall clock, or `None` if the worker is still there.
    """

    name: str
    begin: float
    end: float | None


@dataclasses.dataclass(frozen=True)
class ThreadStack:
    """Stack of a thread.

    Args:
        name: String, name of the thread.
        is_main: Bool, whether it is the main thread.
        frames: List of strings, the innermost first.
        user_line: String, the innermost line of the user's code, or `""`.
    """

    name: str
    is_main: bool
    frames: list[str]
    user_line: str


@dataclasses.dataclass(frozen=True)
class Peer:
    """Last known state of another worker, in the flight record of this worker.

    Args:
        place: String, the place in its script, as `Span.name`.
        source: String, the data source that it waits for, or `""`.
        last_error: String, the last error that a loop of Keras raised there, or `""`.
        silent_seconds: Float, time since its last heartbeat.
    """

    place: str
    source: str
    last_error: str
    silent_seconds: float


@dataclasses.dataclass(frozen=True)
class FlightRecord:
    """Record of a worker's last actions, the content of a file.

    Args:
        rank: Int, rank of the worker.
        num_workers: Int, number of workers of the job.
        host: String, name of its host.
        process: Int, id of its process.
        reason: String, why the record was written, a clause.
        lost: Int, rank of the worker whose loss is the reason, or of this one if its
            script has ended with an error; `None` after a signal.
        started_at: Float, when the worker joined the job, by its wall clock.
        written_at: Float, time of the record by the same clock.
        place: String, the place in its script, as `Span.name`.
        source: String, the data source that it waits for, or `""`.
        collectives: List of `RecordedCollective`, in the order in which the worker
            entered them.
        spans: List of `Span`, in order.
        threads: List of `ThreadStack`.
        peers: Dict from the rank of another worker to a `Peer`.
    """

    rank: int
    num_workers: int
    host: str
    process: int
    reason: str
    lost: int | None
    started_at: float
    written_at: float
    place: str
    source: str
    collectives: list[RecordedCollective]
    spans: list[Span]
    threads: list[ThreadStack]
    peers: dict[int, Peer]

    def to_json(self) -> str:
        """Return the text of the record's file."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> FlightRecord:
        """Read the text of a record's file.

        Args:
            text: String.

        Returns:
            `FlightRecord`.

        Raises:
            ValueError: If the text is damaged, or of another version of tfdp.

        Example:

        >>> FlightRecord.from_json('{"format": 1, "rank": 0')
        Traceback (most recent call last):
        ...
        ValueError: it is damaged, or was not written to its end
        """
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("it is damaged, or was not written to its end") from None
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError("it is not a flight record of this version of tfdp")
        try:
            record = from_fields(cls, content)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
            raise ValueError("it is damaged: a field is missing or wrong") from None
        if not 0 <= record.rank < record.num_workers <= _MAX_WORKERS:
            raise ValueError("it is damaged: its rank is no worker of the job")
        return record

    @property
    def user_line(self) -> str:
        """String, the innermost line of the user's code in the main thread, or `""`."""
        return next((each.user_line for each in self.threads if each.is_main), "")

    @property
    def other_user_line(self) -> str:
        """String, the innermost line of the user's code in another thread, or `""`."""
        lines = (each.user_line for each in self.threads if not each.is_main)
        return next(filter(None, lines), "")


def file_name(rank: int | str) -> str:
    """Return the file name of a worker's record, or a glob pattern for rank `"*"`."""
    return f"flight-worker-{rank}.json"


def record_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for the records of this worker.

    Args:
        environ: Mapping of environment variables. Defaults to `os.environ`.

    Returns:
        `Path`, the launcher's folder of logs, or `tfdp-logs` in the working folder.

    Example:

    >>> record_folder({}).name
    'tfdp-logs'
    >>> str(record_folder({"TF_CONFIG": '{"tfdp": {"logs": "/logs/7"}}'}))
    '/logs/7'
    """
    text = environ.get("TF_CONFIG", "")
    logs = tf_config.read_settings(text).get(FOLDER_KEY) if text.strip() else None
    return Path(logs if isinstance(logs, str) and logs else DEFAULT_FOLDER).absolute()


# Buffers for the flight record of this process: of all collectives that tfdp runs, and
# of calls outside of Keras's loops whose collectives TensorFlow runs. The second one is
# short, since each entry has the order of all collectives of its call.
collective_ring, tensorflow_calls = CollectiveRing(), CollectiveRing(capacity=16)
