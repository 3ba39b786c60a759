"""The monitor and the timeline: what they compute, and what they say of training."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import random
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case, load_cases
from tests.monitor import tags
from tests.monitor.perfetto import read_bars
from tfdp.communication.collectives import step_events
from tfdp.communication.collectives.timing import Collective, Mark
from tfdp.features.monitor.advice import Facts, advise
from tfdp.features.monitor.device_meter import DeviceEvent, device_times, read_events
from tfdp.features.monitor.readings import (
    KINDS,
    Reading,
    ReplicaTimes,
    Sample,
    replicas_of,
    sample_of,
)
from tfdp.features.monitor.report import RunReport
from tfdp.features.monitor.sinks import write_json
from tfdp.features.monitor.trace import (
    WorkerTrace,
    chrome_trace,
    clock_offset,
    trace_of_worker,
)
from tfdp.features.monitor.windows import (
    Row,
    RunTotals,
    Straggler,
    Window,
    find_straggler,
    merge,
    window_of,
)

CASE_MODULES = ("monitor.cases_monitor",)

BAD_INPUT = {
    "monitor_says_that_it_cannot_write": "`log_dir` cannot be written",
    "a_callback_on_one_worker_only": "[[], ['CommunicationMonitor']], by worker",
    "timeline_past_the_end_of_training": "steps=(10, 13), and 12 steps of training",
}


@pytest.mark.slow
def test_monitor(clusters: ClusterPool, case: Case, setup_name: str):
    if case.name not in BAD_INPUT:
        clusters.check(case, setup_name)
        return
    for results in clusters.run(case, setup_name):
        assert BAD_INPUT[case.name] in str(results["local/text"])


def collective(label: str, kind: str = "all_reduce", chain: int = 0) -> Collective:
    return Collective(kind, 800, 0, None, label, 2, chain)


def reading(*rows: tuple[float, float], begin: float = 0.0, end: float = 10.0):
    values = np.asarray([(*row, 0.0)[:3] for row in rows], "float64")
    return Reading(values, begin, end, end - begin, 1)


MARKS = [Mark(step_events.BATCH, 0, None), Mark(step_events.TIMES, 0, None)]
BATCH_OF_64 = (64.0, 1.0)


def sample(collectives: list[Collective], *rows: tuple[float, float]) -> Sample:
    times = (1.0, 3.0)  # data after one second, loss after three
    return sample_of(reading(*rows, BATCH_OF_64, times), [*collectives, *MARKS])


def test_communication_beside_the_backward_pass_is_hidden():
    # The last gradient is there at 6: until then the first bucket is hidden.
    buckets = [collective("bucket 0"), collective("bucket 1", chain=1)]
    found = sample(buckets, (4.0, 7.0), (6.0, 8.0))
    assert found.communication_seconds == pytest.approx(4.0)
    assert found.exposed_seconds == pytest.approx(2.0)
    assert found.compute_seconds == pytest.approx(8.0)
    assert found.input_seconds == pytest.approx(1.0)
    assert found.buckets == {"bucket 0": 3.0, "bucket 1": 2.0}
    assert found.sent_bytes == 2 * 800


def test_a_collective_that_the_forward_pass_waits_for_is_exposed():
    found = sample([collective("all_reduce"), collective("bucket 0")], (2, 3), (6, 7))
    assert found.exposed_seconds == pytest.approx(2.0)


def test_sharded_parameters_are_exposed_from_when_they_are_needed():
    awaited = dataclasses.replace(collective("unit 1", chain=1), is_awaited=True)
    again = dataclasses.replace(collective("unit_again 0", chain=2), is_awaited=True)
    own = [collective("unit 0"), awaited, again, collective("bucket 0", chain=3)]
    found = sample(own, (1, 2), (2, 5, 4), (6, 7, 8), (8, 10))
    assert {kind: found.buckets[kind] for kind in KINDS} == {
        "forward_gathers": 4.0,
        "forward_gathers_exposed": 2.0,  # of unit 0 all, of unit 1 the last second
        "backward_gathers": 1.0,
        "backward_gathers_exposed": 0.0,
        "reduce_scatters": 2.0,
        "reduce_scatters_exposed": 2.0,
    }
    assert found.exposed_seconds == pytest.approx(4.0)


def test_a_collective_that_waits_for_its_turn_is_not_under_way():
    """The second one is ready at 4 and its chain is free from 7 on."""
    one, two = collective("bucket 0"), collective("rows")
    found = sample([one, two], (4.0, 7.0), (4.0, 9.0))
    assert found.buckets == {"bucket 0": 3.0, "rows": 2.0}
    other = dataclasses.replace(two, chain=1)
    assert sample([one, other], (4.0, 7.0), (4.0, 9.0)).buckets["rows"] == 5.0


def test_a_step_without_an_update_communicates_nothing():
    """Off the boundary of accumulation the times of an earlier step are left."""
    found = sample([collective("bucket 0")], (-5.0, -4.0))
    assert found.communication_seconds == 0
    assert found.sent_bytes == 0
    assert found.buckets == {}


def test_bytes_on_the_wire_are_those_of_the_kind():
    sent = {
        kind: Collective(kind, 1200, 0, None, kind, 4).wire_bytes
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    }
    assert sent == {
        "all_reduce": 1800,
        "all_gather": 3600,
        "reduce_scatter": 900,
        "broadcast": 900,
    }


def window(compute: float = 1.0, exposed: float = 0.5, norm: float = 8.0) -> Window:
    part = Sample(
        num_steps=1,
        step_seconds=compute + exposed,
        input_seconds=0.1,
        compute_seconds=compute,
        communication_seconds=exposed,
        exposed_seconds=exposed,
        sent_bytes=100.0,
        samples=32.0,
        squared_norm=norm,
        buckets={"bucket 0": exposed},
    )
    return window_of([part, part], step=2, epoch=0, loss_scale=8.0)


def test_a_window_survives_the_way_to_another_worker():
    assert Window.from_json(window().to_json()) == window()


def test_workers_add_up_to_one_row():
    row = merge({0: window(1.0, 1.5), 1: window(2.0, 0.5)}, 2)
    assert row.values["gradient_norm"] == 4.0
    assert row.values["samples_per_second"] == pytest.approx(32 / 2.5)
    assert row.waits() == {0: 1.0, 1: 0.0}


def rows(*excess: float) -> list[Row]:
    return [merge({0: window(), 1: window(1.0 + e), 2: window()}, 3) for e in excess]


def test_a_worker_is_slow_if_it_costs_much_or_again_and_again():
    hosts = ["a", "b", "c"]
    assert find_straggler(rows(0.0, 0.4), hosts) is None
    found = find_straggler(rows(0.4, 0.4), hosts)
    assert (found.rank, found.host) == (1, "b")
    assert found.seconds == pytest.approx(0.4)
    assert find_straggler(rows(2.0), hosts).rank == 1
    assert find_straggler([merge({0: window()}, 3)], hosts) is None


def notices_of(folder: Path, epochs: list[list[float]]) -> list[str]:
    """What a report says when worker 1 is slower by so many seconds in each window."""
    report = RunReport(folder, ["a", "b"], histogram=False)
    for epoch, excesses in enumerate(epochs):
        for excess in excesses:
            own, slow = (
                dataclasses.replace(window(1.0 + e), epoch=epoch) for e in (0, excess)
            )
            report.take(merge({0: own, 1: slow}, 2))
    report.end_epoch()
    report.close()
    return [notice.partition(":")[0] for notice in report.notices]


def test_a_worker_that_stays_slow_is_named_once_in_each_epoch(tmp_path: Path):
    slow = "worker 1 on b takes 500 ms longer than the others for its own part"
    said = notices_of(tmp_path, [[0.5] * 4, [0.0, 0.5, 0.5], [0.5, 0.0, 0.5, 0.0]])
    for epoch, notice in enumerate(said, start=1):
        assert notice == f"in epoch {epoch} {slow} of each step"
    assert len(said) == 3


def test_a_worker_that_was_slow_in_one_window_is_not_named(tmp_path: Path):
    assert notices_of(tmp_path, [[0.0, 3.0], [3.0, 0.0, 0.0], [0.0], [3.0]]) == []
    assert notices_of(tmp_path, [[0.1] * 4, [0.0] * 4]) == []


def test_epochs_of_one_window_name_a_worker_from_the_second_on(tmp_path: Path):
    said = notices_of(tmp_path, [[0.5], [0.5], [0.5], [0.0]])
    assert [notice.split()[2] for notice in said] == ["2", "3"]


def test_a_worker_that_waits_for_its_data_is_told_so():
    assert "temperature" in Straggler(1, "b", 0.05, 0.01).remedy
    assert "input pipeline" in Straggler(1, "b", 0.05, 0.04).remedy
    for seconds in (0.01, 0.04):
        assert "tfdp run --rebalance" in Straggler(1, "b", 0.05, seconds).remedy


@pytest.mark.parametrize("seed", range(20))
def test_clocks_are_aligned_whoever_arrives_late(seed: int):
    rng = random.Random(seed)
    offset = rng.uniform(-1000, 1000)
    mine, theirs, now = [], [], 0.0
    for _ in range(24):
        now += rng.uniform(0.1, 0.2)
        late = rng.uniform(0.0, 0.05)  # the other worker always comes later
        transfer = rng.uniform(0.001, 0.02)
        end = now + late + transfer
        mine.append((now, end + rng.uniform(0, 0.0005)))
        theirs.append((now + late + offset, end + rng.uniform(0, 0.0005) + offset))
    assert clock_offset(mine, theirs) == pytest.approx(offset, abs=0.0006)


def trace_of_workers(*workers: WorkerTrace) -> str:
    """The file of a trace whose parts came from their workers as JSON."""
    sent = [json.loads(json.dumps(dataclasses.asdict(worker))) for worker in workers]
    return json.dumps(chrome_trace([WorkerTrace.from_dict(part) for part in sent]))


def test_a_trace_has_both_workers_on_one_clock():
    names = [collective("bucket 0"), collective("bucket 1", chain=1)]
    workers = []
    for rank, ahead in ((0, 0.0), (1, 100.0)):
        rows_ = [(4.0, 7.0), (6.0, 8.0), BATCH_OF_64, (1.0, 3.0)]
        shifted = [
            tuple(v + ahead for v in r) if r != BATCH_OF_64 else r for r in rows_
        ]
        read = reading(*shifted, begin=ahead, end=10.0 + ahead)
        local = replicas_of(read, [*names, *MARKS])
        workers.append(trace_of_worker(rank, "host", [(5, read)], [local], 2))
    text = trace_of_workers(*workers)
    shown: list[list] = [[], []]
    for bar in read_bars(text):
        shown[bar.worker].append((bar.name, bar.begin, bar.end))
        # A replica is called by its number among those of all workers.
        assert bar.lane == "steps" or f"replica {bar.worker}:" in bar.lane
    assert shown[0] == shown[1]
    second = 10**9
    assert ("backward", 3 * second, 6 * second) in shown[0]
    assert ("communication", 6 * second, 8 * second) in shown[0]
    assert ("update", 8 * second, 10 * second) in shown[0]
    offsets = json.loads(text)["otherData"]["clock_offsets_seconds"]
    assert offsets == {"0": 0.0, "1": 100.0}


def random_worker(rng: random.Random, rank: int, num_local: int) -> WorkerTrace:
    """Steps back to back, with collectives that overlap as they like.

    Some stamps lie outside of their step, as if a clock had been set.
    """
    now, readings, replicas = 1.7e9 + rng.uniform(-0.3, 0.3), [], []
    for step in range(3):
        begin, now = now, now + rng.uniform(1e-5, 0.1)

        def stamp(begin: float = begin, end: float = now) -> float:
            return round(rng.uniform(begin - 1e-3, end + 1e-3), 6)

        local = []
        for _ in range(num_local):
            times = [sorted((stamp(), stamp())) for _ in range(rng.randrange(30))]
            timed = [(collective(f"bucket {i}"), *t) for i, t in enumerate(times)]
            local.append(
                ReplicaTimes(stamp(), stamp(), rng.choice((stamp(), None)), timed)
            )
        readings.append((step, Reading(np.zeros((0, 3)), begin, now, now - begin, 1)))
        replicas.append(local)
    return trace_of_worker(rank, "host", readings, replicas, 2 * num_local)


@pytest.mark.parametrize("seed", range(20))
def test_no_slice_of_a_trace_is_dropped_or_misplaced(seed: int):
    rng = random.Random(seed)
    num_local = rng.randint(1, 3)
    # A worker that was silent leaves a gap.
    others = rng.sample(range(1, 5), 2)
    parts = [random_worker(rng, rank, num_local) for rank in (0, *others)]
    bars = read_bars(trace_of_workers(*parts))
    for part in parts:
        own = [bar for bar in bars if bar.worker == part.rank]
        assert len(own) == len(part.slices)
        lanes = collections.Counter(part.lanes[s.lane] for s in part.slices)
        assert collections.Counter(bar.lane for bar in own) == lanes
        first = part.rank * num_local
        shown = {int(bar.lane.split()[1][:-1]) for bar in own if bar.lane != "steps"}
        assert shown == set(range(first, first + num_local))


def test_two_hundred_collectives_at_once_stay_with_their_replica():
    """They have a row each, which is none of the next replica's."""
    timed = [(collective(f"bucket {i}"), 1.0 + 1e-4 * i, 9.0) for i in range(200)]
    local = [ReplicaTimes(0.5, 1.0, 1.0, timed), ReplicaTimes(0.5, 1.0, 1.0, timed[:1])]
    part = trace_of_worker(0, "host", [(5, reading())], [local], 2)
    bars = read_bars(trace_of_workers(part))
    lanes = collections.Counter(bar.lane for bar in bars)
    assert lanes["replica 0: collectives"] == 200
    assert lanes["replica 1: collectives"] == 1


TOTALS = {
    "step_seconds": 1.0,
    "input_seconds": 0.0,
    "exposed_seconds": 0.6,
    "communication_seconds": 0.6,
    "sent_bytes": 1e6,
}
FACTS = Facts(4, 2, 3, 30_000_000, compression=False, accumulates=False)


@pytest.mark.parametrize(
    ("totals", "facts", "straggler", "expected"),
    [
        ({}, {}, None, "60% of the step is exposed communication over nodes: bf16"),
        ({}, {"compression": True}, None, "accumulating gradients"),
        ({}, {"compression": True, "accumulates": True}, None, "a larger batch"),
        ({}, {"num_buckets": 100}, None, "larger buckets"),
        ({}, {"gradient_bytes": 2_250_000}, None, "bf16"),  # over a slow link
        (
            {"communication_seconds": 0.005},
            {"gradient_bytes": 1000, "num_buckets": 1},
            None,
            "two micro-batches",
        ),
        ({"exposed_seconds": 0.05}, {}, None, "bound by compute"),
        ({"input_seconds": 0.7}, {}, None, "70% of the step passes before it has"),
        ({}, {"num_replicas": 1}, None, "one replica"),
        ({"sent_bytes": 0.0}, {}, None, "No collective was timed"),
        ({"exposed_seconds": math.nan}, {}, None, "No collective was timed"),
        ({}, {}, Straggler(2, "node7", 0.05), "Worker 2 on node7 takes 50 ms longer"),
    ],
)
def test_advice_names_what_costs_most(totals, facts, straggler, expected):
    said = advise(TOTALS | totals, dataclasses.replace(FACTS, **facts), straggler)
    assert expected in said
    assert said.count(".") - said.count("0.") == 1


def test_a_board_writes_what_it_is_told(tmp_path: Path):
    report = RunReport(tmp_path, ["a", "b"], histogram=True)
    report.labels = ["bucket 0"]
    report.take(merge({0: window(norm=math.nan), 1: window()}, 2))
    said = report.finish(FACTS, {"every": 2})
    report.close()
    header, line = (tmp_path / "communication.csv").read_text().splitlines()
    values = dict(zip(header.split(","), line.split(","), strict=True))
    assert values["gradient_norm"] == ""
    assert float(values["bucket0_seconds"]) == 0.5
    told = json.loads((tmp_path / "communication.json").read_text())
    assert told["totals"]["gradient_norm"] is None
    assert told["advice"] in said
    assert list(tmp_path.glob("events.*"))


def test_tensorboard_has_the_tags_of_the_docs_and_no_other(tmp_path: Path):
    labels = ["bucket 0", "bucket 1", "parameters 0", "rows", "statistics", "norms"]
    labels += ["logs", "sums", "all_gather", "unit 0", "unit_again 0", *KINDS]
    seconds = dict.fromkeys(labels, 0.1)
    plain = window(2.0)
    slow = dataclasses.replace(
        plain, mean=dataclasses.replace(plain.mean, buckets=seconds)
    )
    report = RunReport(tmp_path, ["a", "b"], histogram=True)
    report.take(merge({0: slow, 1: window(0.1)}, 2))
    report.close()
    assert tags.written(tmp_path) == tags.documented()


def test_every_tag_has_one_subject_and_its_unit():
    subjects = {tag.partition("/")[0] for tag in tags.documented()}
    assert len(subjects) == 5
    for tag in tags.documented():
        subject, _, name = tag.partition("/")
        assert re.fullmatch("[a-z_]+", subject)
        units = "seconds|bytes|per_second|steps|fraction|norm|scale|rank"
        assert re.fullmatch(f"([a-z0-9_]+_)?({units})", name), tag


def test_json_is_whole_or_not_there(tmp_path: Path):
    path = tmp_path / "a.json"
    write_json(path, {"a": [1.0, math.inf]})
    assert json.loads(path.read_text()) == {"a": [1.0, None]}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": [1.0, None]}


def test_kernels_are_read_from_a_profile_of_gpus(tmp_path: Path):
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    plane = space.planes.add(name="/device:GPU:0")
    for key, name in enumerate(("gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL")):
        plane.event_metadata[key].name = name
    for lane, (key, begin, length) in enumerate(((0, 0, 4), (1, 1, 6))):
        line = plane.lines.add(name=f"Stream #{lane}", timestamp_ns=10**9)
        line.events.add(
            metadata_id=key, offset_ps=begin * 10**12, duration_ps=length * 10**12
        )
    plane.lines.add(name="XLA Ops").events.add(metadata_id=0, duration_ps=10**15)
    space.planes.add(name="/host:CPU")
    folder = tmp_path / "plugins" / "profile"
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(space.SerializeToString())
    events = read_events(tmp_path)
    assert [event.name.split("_")[0] for event in events] == ["gemm", "ncclDevKernel"]
    times = device_times(events)
    assert times.communication_seconds == pytest.approx(6.0)
    assert times.exposed_seconds == pytest.approx(3.0)
    assert times.buckets == pytest.approx([6.0])


def test_no_kernels_are_no_times():
    assert device_times([]).communication_seconds == 0.0
    event = DeviceEvent("gpu", "1", "gemm", 0.0, 1.0)
    assert device_times([event]).exposed_seconds == 0.0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tfdp.callbacks.CommunicationMonitor("x", every=0), "every=0"),
        (lambda: tfdp.callbacks.CommunicationMonitor("x", every=2.5), "every=2.5"),
        (lambda: tfdp.callbacks.CommunicationMonitor(None), "log_dir=None"),
        (lambda: tfdp.callbacks.Timeline(None), "path=None"),
        (lambda: tfdp.callbacks.Timeline("x", steps=(1, 5)), "begin at 2 or later"),
        (lambda: tfdp.callbacks.Timeline("x", steps=(5, 4)), "steps=(5, 4)"),
        (lambda: tfdp.callbacks.Timeline("x", steps=7), "steps=7"),
    ],
)
def test_wrong_arguments_are_named(make, text):
    with pytest.raises(ValueError, match="Received") as error:
        make()
    assert text in str(error.value)


def test_a_stock_strategy_is_refused(tmp_path: Path):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for callback in (
        tfdp.callbacks.CommunicationMonitor(tmp_path),
        tfdp.callbacks.Timeline(tmp_path / "t.json", steps=(2, 3)),
    ):
        # As `fit` calls it. `fit` itself, under a stock strategy, may crash the process
        # where it raises: TensorFlow deletes an iterator that still prefetches.
        with pytest.raises(ValueError, match="need a strategy of tfdp"):
            callback.set_model(model)


def test_one_device_without_a_strategy_is_timed(tmp_path: Path, capsys):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    monitor = tfdp.callbacks.CommunicationMonitor(tmp_path, every=2)
    x, y = np.ones((32, 2)), np.ones((32, 1))
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[monitor])
    assert "There is one replica" in capsys.readouterr().out
    assert monitor.recent(3).communication_fraction == 0.0


def test_cases_of_bad_input_are_all_here():
    assert load_cases(CASE_MODULES).keys() >= BAD_INPUT.keys()


def test_a_silent_worker_leaves_the_norm_unknown():
    row = merge({0: window()}, 2)
    assert math.isnan(row.values["gradient_norm"])


def test_totals_leave_out_what_is_unknown():
    totals = RunTotals()
    totals.add(merge({0: window(norm=4.0)}, 1))
    known = window(norm=math.nan)
    mean = dataclasses.replace(known.mean, samples=math.nan)
    unknown = dataclasses.replace(known, mean=mean)
    totals.add(merge({0: unknown}, 1))
    assert totals.values["gradient_norm"] == pytest.approx(math.sqrt(4.0))
    assert totals.values["samples_per_second"] == pytest.approx(32 / 1.5)
    assert totals.num_steps == 4


def test_clocks_are_not_aligned_by_a_part_of_the_workers():
    """A sub-group's collective is another one on each node."""
    whole = collective("bucket 0")
    part = dataclasses.replace(whole, label="bucket 1", chain=1)
    read = reading((4.0, 7.0), (5.0, 6.0), BATCH_OF_64, (1.0, 3.0))
    local = replicas_of(read, [whole, part, *MARKS])
    made = trace_of_worker(0, "host", [(5, read)], [local], 4)
    assert made.collectives == {}
