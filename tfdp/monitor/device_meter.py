"""Times steps on GPUs, by the profile of a step now and then."""

from __future__ import annotations

import dataclasses
import math

from tfdp.collectives.timing import Recorder
from tfdp.monitor.device_profile import DeviceTimes, Profile, device_times
from tfdp.monitor.meter import Meter
from tfdp.monitor.readings import Reading, Sample, notes
from tfdp.monitor.trace import Slice, WorkerTrace

# Which step of an epoch is profiled: the first ones still allocate memory.
_PROFILED_STEP = 5


class DeviceMeter(Meter):
    """Times steps whose kernels run after the host has launched them.

    Time stamps in the graph would tell when a kernel was launched. So the step time
    is the host's, and what of it was communication is taken from the profile of one
    step an epoch.

    Args:
        norm_every: Int, after how many steps the gradient's norm is noted again, or
            `None` for never.
        num_replicas: Int, on all workers.
        wire_bytes: Int, that each replica sends in a step.
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
        """One for each collective of the profiled step."""
        return _labels(self._times)

    def interrupt(self) -> None:
        """What happens until the next step begins belongs to none."""
        super().interrupt()
        self._step_of_epoch = 0

    def step_begins(self) -> None:
        """Takes the time; begins to profile if it is the step for that."""
        super().step_begins()
        self._step_of_epoch += 1
        if self._step_of_epoch == _PROFILED_STEP and not self._traces:
            self._is_profiling = self._profile.begin()

    def step_ends(self, num_steps: int = 1) -> Reading | None:
        """Takes the time; a step that was profiled is slower and does not count."""
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
        """The host's time, divided as the profiled step was."""
        seconds = reading.seconds / reading.num_steps
        samples, norm = notes(reading, self.recorder.rows)
        sample = Sample(
            num_steps=reading.num_steps,
            step_seconds=seconds,
            input_seconds=0.0,
            compute_seconds=seconds,
            communication_seconds=math.nan,
            exposed_seconds=math.nan,
            bytes_sent=float(self._wire_bytes),
            samples=samples,
            squared_norm=norm,
            buckets={},
        )
        times = self._times
        if times is None or not self._profiled_seconds:
            return sample
        # Of an execution of several steps, all were profiled.
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
        """Profiles from now on."""
        if not self._traces:
            self._traces = True
            self._is_profiling = self._profile.begin()

    def trace(
        self, rank: int, host: str, readings: list[tuple[int, Reading]]
    ) -> WorkerTrace:
        """The steps of the host, and what ran on each stream of each GPU."""
        trace = WorkerTrace(rank, host, [], {0: "steps"}, {})
        for step, reading in readings:
            trace.slices.append(Slice(0, f"step {step}", reading.begin, reading.end))
        events = self._profile.end() if self._is_profiling else []
        self._is_profiling = self._traces = False
        if not events or not readings:
            return trace
        # The device's clock need not be the host's: the first kernel begins the trace.
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
    count = 0 if times is None else len(times.buckets)
    return [f"collective {number}" for number in range(count)]
