"""What GPUs did in a step, from TensorFlow's profile of the devices.

Kernels run after the host has launched them, so that only the device's own times
tell when a collective was under way and what ran beside it.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tensorflow as tf

from tfdp import _compat
from tfdp.monitor.intervals import Interval, clipped, seconds_covered


@dataclasses.dataclass(frozen=True)
class DeviceEvent:
    """One kernel or copy on a GPU.

    Args:
        device: String, such as `"/device:GPU:0"`.
        stream: String.
        name: String.
        begin: Float, seconds.
        end: Float, seconds.
    """

    device: str
    stream: str
    name: str
    begin: float
    end: float

    @property
    def is_collective(self) -> bool:
        """Whether it is a kernel of NCCL."""
        return "nccl" in self.name.lower()


@dataclasses.dataclass(frozen=True)
class DeviceTimes:
    """How the GPUs of a worker spent their time: means over them, in seconds.

    Args:
        communication_seconds: Float, in which a collective ran.
        exposed_seconds: Float, in which nothing else did.
        buckets: List of floats, each collective of the first GPU in order.
    """

    communication_seconds: float
    exposed_seconds: float
    buckets: list[float]


class Profile:
    """A profile of what runs between its begin and its end."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory | None = None

    def begin(self) -> bool:
        """Starts the profiler, and says whether it was free."""
        if self._folder is not None:
            return True
        self._folder = tempfile.TemporaryDirectory(prefix="tfdp-profile-")
        try:
            tf.profiler.experimental.start(self._folder.name)
        except tf.errors.AlreadyExistsError:  # TensorBoard's callback, say
            self._folder.cleanup()
            self._folder = None
            return False
        return True

    def end(self) -> list[DeviceEvent]:
        """Stops the profiler and returns what the GPUs did."""
        assert self._folder is not None
        try:
            tf.profiler.experimental.stop()
            return read_events(Path(self._folder.name))
        finally:
            self._folder.cleanup()
            self._folder = None


def read_events(folder: Path) -> list[DeviceEvent]:
    """The kernels in the profiles of a folder, ordered by time.

    Args:
        folder: `Path`, as given to `tf.profiler.experimental.start`.
    """
    events: list[DeviceEvent] = []
    for path in folder.rglob("*.xplane.pb"):
        space = _compat.profile_of(path.read_bytes())
        for plane in space.planes:
            if "/device:GPU" in plane.name:
                events += _events_of(plane)
    return sorted(events, key=lambda event: event.begin)


def device_times(events: Sequence[DeviceEvent]) -> DeviceTimes:
    """Sums up what kernels did.

    Args:
        events: Sequence of `DeviceEvent`.

    Example:

    >>> events = [
    ...     DeviceEvent("gpu", "13", "gemm", 0.0, 2.0),
    ...     DeviceEvent("gpu", "17", "ncclDevKernel_AllReduce", 1.0, 4.0),
    ... ]
    >>> device_times(events).exposed_seconds
    2.0
    """
    devices = sorted({event.device for event in events})
    busy, exposed = [], []
    for device in devices:
        own = [event for event in events if event.device == device]
        collectives = [(e.begin, e.end) for e in own if e.is_collective]
        others = [(e.begin, e.end) for e in own if not e.is_collective]
        busy.append(seconds_covered(collectives))
        exposed.append(busy[-1] - _overlap(collectives, others))
    first = [e for e in events if e.is_collective and e.device == devices[0]]
    count = max(1, len(devices))
    return DeviceTimes(
        sum(busy) / count, sum(exposed) / count, [e.end - e.begin for e in first]
    )


def _overlap(some: Iterable[Interval], others: list[Interval]) -> float:
    """How long an interval of both lists is under way."""
    both = [cut for begin, end in some for cut in clipped(others, begin, end)]
    return seconds_covered(both)


def _events_of(plane: object) -> Iterator[DeviceEvent]:
    names = {key: item.name for key, item in plane.event_metadata.items()}  # type: ignore[attr-defined]
    for line in plane.lines:  # type: ignore[attr-defined]
        # Other lines repeat the kernels by operation, module or step.
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            begin = 1e-9 * line.timestamp_ns + 1e-12 * event.offset_ps
            end = begin + 1e-12 * event.duration_ps
            name = names.get(event.metadata_id, "")
            yield DeviceEvent(plane.name, line.name, name, begin, end)  # type: ignore[attr-defined]
