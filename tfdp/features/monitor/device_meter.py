"""Timing of steps on GPUs, whose asynchronous kernels require a device profile."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives.timing import Recorder
from tfdp.features.monitor.meter import Meter
from tfdp.features.monitor.readings import (
    Interval,
    Reading,
    Sample,
    clipped,
    samples_and_norm,
    seconds_covered,
)
from tfdp.features.monitor.trace import Slice, WorkerTrace
from tfdp.ground._compat import runtime
from tfdp.ground.base.temporary import TemporaryFolder

# Number of the profiled step in an epoch, from 1. Earlier steps still allocate memory,
# so their times are not typical.
_PROFILED_STEP = 5


@dataclasses.dataclass(frozen=True)
class DeviceEvent:
    """One kernel or copy on a GPU.

    Args:
        device: String, such as `"/device:GPU:0"`.
        stream: String, name of the CUDA stream.
        name: String, name of the kernel or copy.
        begin: Float, start in seconds by the device's clock.
        end: Float, end in seconds by the device's clock.
    """

    device: str
    stream: str
    name: str
    begin: float
    end: float

    @property
    def is_collective(self) -> bool:
        """Bool, whether it is a kernel of NCCL."""
        return "nccl" in self.name.lower()


@dataclasses.dataclass(frozen=True)
class DeviceTimes:
    """Communication times of a worker's GPUs: means over the GPUs, in seconds.

    Args:
        communication_seconds: Float, time in which a collective was running.
        exposed_seconds: Float, time in which only collectives were running.
        buckets: List of floats, duration of each collective of the first GPU, in order.
    """

    communication_seconds: float
    exposed_seconds: float
    buckets: list[float]


class Profile:
    """Profiler of the GPUs, from the call of `begin` to that of `end`."""

    def __init__(self) -> None:
        self._folder: TemporaryFolder | None = None

    def begin(self) -> bool:
        """Start the profiler; return `False` if another user has already started it."""
        if self._folder is not None:
            return True
        self._folder = TemporaryFolder("profile")
        try:
            tf.profiler.experimental.start(self._folder.name)
        except tf.errors.AlreadyExistsError:
            # TensorFlow has one profiler for the process, and another user of it, such
            # as TensorBoard's callback, has started it.
            self._folder.cleanup()
            self._folder = None
            return False
        return True

    def end(self) -> list[DeviceEvent]:
        """Stop the profiler, and return the events of the GPUs."""
        assert self._folder is not None
        try:
            tf.profiler.experimental.stop()
            return read_events(Path(self._folder.name))
        finally:
            self._folder.cleanup()
            self._folder = None


def read_events(folder: Path) -> list[DeviceEvent]:
    """Read the GPU events in the profiles of a folder, ordered by time.

    Args:
        folder: `Path`, the log directory of `tf.profiler.experimental.start`.
    """
    events: list[DeviceEvent] = []
    for path in folder.rglob("*.xplane.pb"):
        space = runtime.profile_of(path.read_bytes())
        for plane in space.planes:
            if "/device:GPU" in plane.name:
                events += _events_of(plane)
    return sorted(events, key=lambda event: event.begin)


def device_times(events: Sequence[DeviceEvent]) -> DeviceTimes:
    """Compute communication times from the events of a step.

    Args:
        events: Sequence of `DeviceEvent`, at least one.

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
        of_device = [event for event in events if event.device == device]
        collectives = [(e.begin, e.end) for e in of_device if e.is_collective]
        others = [(e.begin, e.end) for e in of_device if not e.is_collective]
        busy.append(seconds_covered(collectives))
        exposed.append(busy[-1] - _overlap(collectives, others))
    first = [e for e in events if e.is_collective and e.device == devices[0]]
    count = max(1, len(devices))
    return DeviceTimes(
        sum(busy) / count, sum(exposed) / count, [e.end - e.begin for e in first]
    )


def _overlap(some: Iterable[Interval], others: list[Interval]) -> float:
    """Return the seconds covered by both `some` and `others`, lists of intervals."""
    both = [cut for begin, end in some for cut in clipped(others, begin, end)]
    return seconds_covered(both)


def _events_of(plane: object) -> Iterator[DeviceEvent]:
    """Yield the events of an `XPlane`, the profile of one device."""
    names = {key: item.name for key, item in plane.event_metadata.items()}  # type: ignore[attr-defined]
    for line in plane.lines:  # type: ignore[attr-defined]
        # Lines other than those of streams list the same kernels again, by operation,
        # module or step, so these would be counted twice.
        if not line.name.startswith("Stream"):
            continue
        for event in line.events:
            begin = 1e-9 * line.timestamp_ns + 1e-12 * event.offset_ps
            end = begin + 1e-12 * event.duration_ps
            name = names.get(event.metadata_id, "")
            yield DeviceEvent(plane.name, line.name, name, begin, end)  # type: ignore[attr-defined]


class DeviceMeter(Meter):
    """Meter of steps on GPUs, where kernels run after the host has launched them.

    Time stamps in the graph would give the launch times. Therefore step times are
    measured on the host, and the fraction of communication is taken from the profile of
    one step per epoch.

    Args:
        norm_every: Int, steps from one record of the gradient's norm to the next, or
            `None` for no records.
        num_replicas: Int, number of replicas on all workers.
        wire_bytes: Int, bytes that each replica sends in a step.
    """

    def __init__(
        self, norm_every: int | None, num_replicas: int, wire_bytes: int
    ) -> None:
        super().__init__(norm_every, num_replicas)
        self.recorder = Recorder(norm_every, timestamps=False)
        self._wire_bytes = wire_bytes
        self._profile = Profile()
        self._is_profiling = False
        self._traces = False
        self._step_of_epoch = 0
        self._times: DeviceTimes | None = None
        self._profiled_seconds = 0.0

    @property
    def labels(self) -> list[str]:
        """List of strings, one label for each collective of the profiled step."""
        return _labels(self._times)

    def interrupt(self) -> None:
        """Exclude the time until the next step begins from the times of steps.

        The next step counts as the first one of an epoch, whose fifth step is profiled.
        """
        super().interrupt()
        self._step_of_epoch = 0

    def step_begins(self) -> None:
        """Record the start time; start a profile at the fifth call in an epoch."""
        super().step_begins()
        self._step_of_epoch += 1
        if self._step_of_epoch == _PROFILED_STEP and not self._traces:
            self._is_profiling = self._profile.begin()

    def step_ends(self, num_steps: int = 1) -> Reading | None:
        """Record the end of a step, and end its profile if it has one.

        Returns:
            `Reading`, as of `Meter`; or `None` for a profiled step, which is slower.
        """
        reading = super().step_ends(num_steps)
        if not self._is_profiling or self._traces:
            return reading
        self._is_profiling = False
        events = self._profile.end()
        if events and reading is not None:
            self._times = device_times(events)
            self._profiled_seconds = reading.seconds
        return None

    def sample(self, reading: Reading) -> Sample:
        """Compute the times of a step from the host's time and the profiled step.

        The host's time is divided in the proportions of the profiled step. Times of
        communication are NaN before a step was profiled.
        """
        seconds = reading.seconds / reading.num_steps
        samples, norm = samples_and_norm(reading, self.recorder.rows)
        sample = Sample(
            num_steps=reading.num_steps,
            step_seconds=seconds,
            input_seconds=0.0,
            compute_seconds=seconds,
            communication_seconds=math.nan,
            exposed_seconds=math.nan,
            sent_bytes=float(self._wire_bytes),
            samples=samples,
            squared_norm=norm,
            buckets={},
        )
        times = self._times
        if times is None or not self._profiled_seconds:
            return sample
        # The profile covers all steps of an execution, but a sample is for one step:
        # the profile's times are divided by the number of steps.
        scale = reading.seconds / self._profiled_seconds / reading.num_steps
        exposed = min(seconds, scale * times.exposed_seconds)
        return dataclasses.replace(
            sample,
            compute_seconds=seconds - exposed,
            communication_seconds=min(seconds, scale * times.communication_seconds),
            exposed_seconds=exposed,
            buckets={
                label: scale * bucket
                for label, bucket in zip(_labels(times), times.buckets, strict=True)
            },
        )

    def trace_begins(self) -> None:
        """Implements `Meter.trace_begins`: start a profile, which `trace` ends.

        Further calls before `trace` have no effect.
        """
        if not self._traces:
            self._traces = True
            self._is_profiling = self._profile.begin()

    def trace(
        self, rank: int, host: str, readings: list[tuple[int, Reading]]
    ) -> WorkerTrace:
        """Return a trace of the host's steps and of each stream of each GPU.

        It ends the profile that `trace_begins` has started.

        Args:
            rank: Int, rank of this worker.
            host: String, host of this worker.
            readings: List of pairs: number of a step and its `Reading`.
        """
        trace = WorkerTrace(rank, host, [], {0: "steps"}, {})
        for step, reading in readings:
            trace.slices.append(Slice(0, f"step {step}", reading.begin, reading.end))
        events = self._profile.end() if self._is_profiling else []
        self._is_profiling = self._traces = False
        if not events or not readings:
            return trace
        # The device's clock differs from the host's: the first kernel is placed at the
        # start of the first step.
        shift = readings[0][1].begin - events[0].begin
        streams = sorted({(event.device, event.stream) for event in events})
        for lane, (device, stream) in enumerate(streams, start=1):
            trace.lanes[lane] = f"{device} {stream}"
        for event in events:
            lane = 1 + streams.index((event.device, event.stream))
            begin, end = event.begin + shift, event.end + shift
            trace.slices.append(Slice(lane, event.name, begin, end))
            if event.is_collective:
                trace.collectives[f"{len(trace.collectives)}"] = (begin, end)
        return trace


def _labels(times: DeviceTimes | None) -> list[str]:
    """Return a label for each collective of the profiled step: `"collective 0"`."""
    count = 0 if times is None else len(times.buckets)
    return [f"collective {number}" for number in range(count)]


def meter_for(model: Any, strategy: Any, norm_every: int | None = None) -> Meter:
    """Create the meter that times the steps on a strategy's devices.

    Args:
        model: Keras model that is trained.
        strategy: Its tfdp strategy, or `None`.
        norm_every: Int, steps from one record of the gradient's norm to the next, or
            `None` for no records. Defaults to `None`.

    Returns:
        `Meter`; a `DeviceMeter` on GPUs.
    """
    if strategy is None:
        return Meter(norm_every)
    num_replicas = strategy.num_replicas_in_sync
    devices = strategy.extended.group.devices
    if any(runtime.device_type(device) == "GPU" for device in devices):
        return DeviceMeter(norm_every, num_replicas, _wire_bytes(model, strategy))
    return Meter(norm_every, num_replicas)


def _wire_bytes(model: Any, strategy: Any) -> int:
    """Return the bytes that a replica sends in a step; 0 without a bucket plan yet."""
    try:
        return strategy.communication_plan(model).wire_bytes
    except ValueError:
        return 0
