"""Flight records of several workers: who was where, and who was missing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.monitor.perfetto import read_bars
from tfdp.communication.coordination.flight_record import (
    TEXTS,
    CollectiveIdentity,
    CollectiveRing,
    FlightRecord,
    Peer,
    RecordedCollective,
    Span,
    ThreadStack,
    file_name,
)
from tfdp.communication.coordination.flight_steps import (
    TENSORFLOW,
    TracedCollective,
    TracedCollectives,
    recorded_steps,
)
from tfdp.communication.coordination.progress import ProgressRecorder
from tfdp.features.monitor.flight_collectives import of_one_attempt
from tfdp.features.monitor.flight_records import explain
from tfdp.launch.cli.main import cli

NOW = 1000.0
STEP = "step 5 of epoch 1 of fit"


def collective(number: int, begin: float, end: float | None, **more: Any):
    fields = {
        "lane": "7/0",
        "ranks": (0, 1),
        "kind": "all_reduce",
        "dtype": "float32",
        "key": "11",
        "name": "sgd/bucket_0/Collective_all_reduce_float32_7/",
        "number": number,
        "num_bytes": 4096,
    }
    return RecordedCollective(**{**fields, **more}, begin=begin, end=end)


def record(rank: int, *collectives: RecordedCollective, **more: Any) -> FlightRecord:
    fields = {
        "num_workers": 2,
        "host": f"host{rank}",
        "process": 70 + rank,
        "reason": "this worker has received a signal for it",
        "lost": None,
        "started_at": NOW - 500.0,
        "written_at": NOW,
        "place": STEP,
        "source": "",
        "spans": [Span(STEP, NOW - 30.0, None)],
        "threads": [],
        "peers": {},
    }
    return FlightRecord(rank=rank, collectives=list(collectives), **{**fields, **more})


def in_line(line: str) -> list[ThreadStack]:
    other = ThreadStack("reader", False, ["a.py:1 in f"], "a.py:1")
    return [other, ThreadStack("MainThread", True, ["train.py:12 in f"], line)]


def explained(*records: FlightRecord) -> str:
    return explain({each.rank: each for each in records})


DONE = collective(3, NOW - 29.0, NOW - 28.9)
WAITS = collective(4, NOW - 20.0, None)


def test_a_worker_in_a_callback_is_named_with_its_line():
    late = record(
        1,
        DONE,
        place="the callbacks of step 4 of epoch 1 of fit",
        threads=in_line("train.py:12: `time.sleep(1000)`"),
    )
    assert explained(record(0, DONE, WAITS), late) == (
        "Worker 0 waits for worker 1 in all_reduce 'sgd/bucket_0' (number 4, workers 0 "
        f"and 1, 4,096 bytes of float32) in {STEP} for 20.0 s: worker 1 has not "
        "entered it, and was at the callbacks of step 4 of epoch 1 of fit, at "
        "train.py:12: `time.sleep(1000)`."
    )


def test_a_worker_whose_pipeline_is_stuck_is_named_with_its_source():
    stuck = record(1, DONE, source="the generator `batches`", threads=in_line("b.py:2"))
    found = explained(record(0, DONE, WAITS), stuck)
    assert found.endswith(
        f"worker 1 waits for a batch of the generator `batches` at {STEP}, at a.py:1."
    )
    there = record(1, DONE, source="x", threads=in_line("b.py:2")[1:])
    assert explained(record(0, DONE, WAITS), there).endswith("at b.py:2.")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (
            "sgd/bucket_0/Collective_all_reduce_float32_7/",
            "all_reduce 'sgd/bucket_0' (",
        ),
        ("Collective_all_reduce_float32_7/", "all_reduce ("),
    ],
)
def test_a_collective_is_named_by_its_scope(name, shown):
    waits = dataclasses.replace(WAITS, name=name)
    assert shown in explained(record(0, DONE, waits), record(1, DONE))


@pytest.mark.parametrize("later", [0.0, 5.0])
def test_another_order_of_collectives_names_both(later):
    other = {"key": "12", "num_bytes": 8, "name": "logs/Collective_all_reduce_7/"}
    found = explained(
        record(0, DONE, collective(4, NOW - 20.0, None)),
        record(1, DONE, collective(4, NOW - 20.0 + later, None, **other)),
    )
    assert found.startswith(
        "The workers run their collectives in different orders: as number 4 in lane "
        "7/0, worker 0 is at all_reduce 'sgd/bucket_0' (number 4, workers 0 and 1, "
        "4,096 bytes of float32) in "
    )
    assert "worker 1 is at all_reduce 'logs' (number 4, workers 0 and 1, 8 bytes" in (
        found
    )


def test_another_order_in_two_lanes_names_what_the_other_one_waits_in():
    other = collective(9, NOW - 15.0, None, lane="8/0", name="b/Collective_x/")
    found = explained(record(0, DONE, WAITS), record(1, DONE, other))
    assert "Worker 0 waits for worker 1 in all_reduce 'sgd/bucket_0' (number 4" in found
    assert "worker 1 waits in all_reduce 'b' (number 9, workers 0 and 1" in found


def test_a_killed_worker_has_no_record_and_the_others_tell_what_they_know():
    last = collective(3, NOW - 1.0, NOW - 0.9)
    reason = "its process has ended (its port refuses connections)"
    waits = collective(4, NOW - 0.2, None)
    known = {"reason": reason, "lost": 1, "peers": {1: Peer("fit", "", "", 0.4)}}
    assert explained(record(0, last, waits, **known)) == (
        "Worker 0 waits for worker 1 in all_reduce 'sgd/bucket_0' (number 4, workers 0 "
        f"and 1, 4,096 bytes of float32) in {STEP} for 0.2 s: worker 1 has left no "
        f"record ({reason}); its last complete collective was all_reduce "
        "'sgd/bucket_0' (number 3, workers 0 and 1, 4,096 bytes of float32) in "
        f"{STEP}."
    )
    first = record(0, waits, **known)
    assert f"left no record ({reason}); it was last seen at fit." in explained(first)
    computing = record(0, last, **known)
    assert explained(computing).startswith(
        "No worker with a record waits for another, but worker 1 has left no record"
    )


def test_a_worker_that_ended_by_an_error_is_named_with_it_however_short_the_wait():
    waits = collective(4, NOW - 0.1, None)
    raised = record(1, DONE, reason="its script has ended with OSError: x", lost=1)
    found = explained(record(0, DONE, waits), raised)
    assert found.endswith("worker 1 has not entered it: its script has ended with "
                          "OSError: x.")  # fmt: skip


@pytest.mark.parametrize("skew", [0.0, 3600.0])
def test_a_slow_host_is_named_also_where_its_clock_is_wrong(skew):
    def entries(late: float, skew: float) -> list[RecordedCollective]:
        begins = [NOW - 50.0 + number for number in range(40)]
        return [
            collective(n, begin + late + skew, begin + 0.31 + skew)
            for n, begin in enumerate(begins)
        ]

    slow = record(1, *entries(0.3, skew), written_at=NOW + skew)
    assert explained(record(0, *entries(0.0, 0.0)), slow) == (
        "All workers have entered the same collectives, but worker 1 on host1 is slow: "
        "for 12.0 of 39.3 s the others have waited for it, in 40 of 40 collectives."
    )
    waits = collective(40, NOW - 9.0, None)
    stuck = explained(record(0, *entries(0.0, 0.0), waits), slow)
    assert stuck.startswith("Worker 0 waits for worker 1")
    assert stuck.endswith("in 40 of 40 collectives.")
    waits = collective(40, NOW - 9.0 + skew, None)
    other = record(1, *slow.collectives, waits, written_at=NOW + skew)
    assert "is slow" not in explained(record(0, *entries(0.0, 0.0)), other)
    even = record(1, *entries(0.01, skew), written_at=NOW + skew)
    assert "none has waited for another for 1 s" in explained(
        record(0, *entries(0.0, 0.0)), even
    )


def test_a_job_that_runs_is_not_said_to_be_stuck():
    ahead = collective(4, NOW - 0.1, None)
    assert explained(record(0, DONE, ahead), record(1, DONE)) == (
        "All workers have entered the same collectives, and none has waited for "
        "another for 1 s. Workers 0 and 1 wrote since this worker has received a "
        "signal for it."
    )


def test_what_has_ended_a_job_is_said_before_that_no_worker_has_waited():
    raised = [
        record(rank, DONE, reason="its script has ended with OSError: x.", lost=rank)
        for rank in range(2)
    ]
    assert explained(*raised) == (
        "Workers 0 and 1: its script has ended with OSError: x. All workers have "
        "entered the same collectives, and none has waited for another for 1 s."
    )


def test_collectives_that_the_ring_has_dropped_were_entered():
    later = [collective(n, NOW - 9.0, NOW - 8.0) for n in (8, 9)]
    waits = collective(10, NOW - 9.0, None)
    assert "waits for worker 1" in explained(record(0, waits), record(1, *later))
    both = record(0, *later, waits), record(1, waits)
    assert "none has waited" in explained(*both)


def test_a_collective_that_ended_with_an_error_is_not_waited_in():
    failed = collective(4, NOW - 20.0, None)
    after = collective(1 << 32, NOW - 15.0, NOW - 14.0)
    both = record(0, DONE, failed, after), record(1, DONE, after)
    assert "none has waited" in explained(*both)


def test_texts_of_other_topics_are_another_order_but_not_those_of_another_length():
    texts = {"kind": TEXTS, "dtype": "", "lane": "tfdp/0"}
    first = collective(4, NOW - 9.0, None, **texts, name="fit", key="fit")
    longer = dataclasses.replace(first, num_bytes=9)
    other = dataclasses.replace(first, key="evaluate", name="evaluate")
    assert "none has waited" in explained(record(0, first), record(1, longer))
    assert "different orders" in explained(record(0, first), record(1, other))


def tensorflow_step(number: int, begin: float, end: float | None):
    name = "all_reduce 'sgd/bucket_0' and 2 more"
    fields = {"kind": TENSORFLOW, "lane": "steps", "dtype": "", "key": "", "name": name}
    return collective(number, begin, end, **fields)


def test_with_collectives_of_tensorflow_the_step_of_each_worker_is_compared():
    done = tensorflow_step(7, NOW - 30.2, NOW - 30.0)
    waits = record(0, done, tensorflow_step(10, NOW - 20.0, None))
    stuck = record(1, done, source="the generator `batches`", threads=in_line("b.py:2"))
    says = (
        "Worker 0 waits for worker 1 in collectives of TensorFlow (all_reduce "
        f"'sgd/bucket_0' and 2 more, workers 0 and 1, 4,096 bytes) in {STEP} for "
        "20.0 s: worker 1 "
    )
    assert explained(waits, stuck) == (
        f"{says}waits for a batch of the generator `batches` at {STEP}, at a.py:1."
    )
    elsewhere = record(1, done, place="the callbacks of step 4 of epoch 1 of fit")
    assert explained(waits, elsewhere) == (
        f"{says}has not entered it, and was at the callbacks of step 4 of epoch 1 of "
        "fit."
    )
    assert explained(waits).startswith(f"{says}has left no record; its last complete ")
    both = record(1, done, tensorflow_step(10, NOW - 20.0, None))
    assert "none has waited" in explained(waits, both)


@pytest.mark.parametrize(("seconds", "is_stuck"), [(6.0, True), (7.0, False)])
def test_a_step_that_takes_its_usual_time_is_not_stuck(seconds, is_stuck):
    done = [tensorflow_step(n, NOW - 90 + n, NOW - 90 + n + seconds) for n in (1, 4)]
    waits = record(0, *done, tensorflow_step(7, NOW - 20.0, None))
    assert ("waits for worker 1" in explained(waits, record(1, *done))) == is_stuck


def test_calls_that_tensorflow_has_traced_in_other_orders_name_the_first_difference():
    def waits(rank: int, order: str) -> FlightRecord:
        call = {"kind": TENSORFLOW, "lane": "calls", "dtype": "", "key": order}
        call |= {"num_bytes": 13 + rank}  # of forms that are known only at run time
        return record(rank, collective(0, NOW - 9.0, None, **call), place="", spans=[])

    found = explained(waits(0, "a; all_reduce of float32[4]"), waits(1, "a"))
    assert found == (
        "The workers run their collectives in different orders: as number 2 of a call "
        "of TensorFlow, worker 0 has all_reduce of float32[4] and worker 1 has no "
        "further one."
    )


def test_the_records_of_an_earlier_attempt_are_left_out():
    newest = record(0, started_at=NOW - 10.0)
    earlier = record(1, written_at=NOW - 60.0)
    assert of_one_attempt([earlier, newest]) == ({0: newest}, [1])
    later = record(0, started_at=NOW + 10.0)  # its clock was set back
    assert of_one_attempt([later]) == ({0: later}, [])
    older = record(0, written_at=NOW - 5.0)
    assert of_one_attempt([newest, older]) == ({0: newest}, [0])


def test_a_record_in_a_file_is_the_same():
    one = record(0, DONE, WAITS, threads=in_line("x"), peers={1: Peer("", "", "", 0.5)})
    assert FlightRecord.from_json(one.to_json()) == one


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "0"},
        {"spans": [{"name": "fit", "begin": 0.0}]},
        {"collectives": [7]},
        {"written_at": None},
        {"peers": {"a": {}}},
        {"threads": {"name": 1}},
        {"written_at": float("nan")},
        {"started_at": float("inf")},
    ],
)
def test_a_damaged_record_is_refused(change):
    content = json.loads(record(0, DONE).to_json())
    with pytest.raises(ValueError, match="it is damaged: a field is missing or wrong"):
        FlightRecord.from_json(json.dumps({**content, **change}))


@pytest.mark.parametrize("change", [{"rank": 2}, {"rank": -1}, {"num_workers": 10**9}])
def test_a_record_of_a_worker_that_the_job_lacks_is_refused(change):
    content = json.loads(record(0, DONE).to_json())
    with pytest.raises(ValueError, match="it is damaged: its rank is no worker"):
        FlightRecord.from_json(json.dumps({**content, **change}))


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 0}'])
def test_another_file_is_no_record(text):
    with pytest.raises(ValueError, match="it is not a flight record of this version"):
        FlightRecord.from_json(text)


def test_the_ring_keeps_the_last_collectives():
    ring = CollectiveRing(capacity=3)
    identity = CollectiveIdentity("7/0", (0, 1), "all_reduce", "float32", "1", "x")
    for number in range(5):
        with contextlib.suppress(OSError), ring.entered(identity, number, 8):
            if number == 4:
                raise OSError
    found = ring.collectives()
    assert [(each.number, each.end is None) for each in found] == [
        (2, False),
        (3, False),
        (4, True),
    ]
    assert all(each.end is None or each.end >= each.begin for each in found)


def test_the_spans_of_a_loop_follow_each_other():
    recorder = ProgressRecorder()
    assert recorder.spans() == []
    with recorder.looping("fit"):
        recorder.epoch_begins()
        recorder.step_begins(0)
        with recorder.computing(), recorder.all_gathering("logs"):
            pass
    spans = recorder.spans()
    assert [span.name for span in spans] == [
        "fit",
        "the callbacks of step 1 of epoch 1 of fit",
        "step 1 of epoch 1 of fit",
        "'logs' in step 1 of epoch 1 of fit",
        "step 1 of epoch 1 of fit",
        "the callbacks of step 1 of epoch 1 of fit",
        "",
    ]
    ends = [span.end for span in spans]
    assert ends == [*(span.begin for span in spans[1:]), None]


def test_a_record_has_the_steps_whose_collectives_tensorflow_runs():
    recorder, traced = ProgressRecorder(), TracedCollectives()
    with recorder.looping("fit"):
        with recorder.computing(), recorder.all_gathering("before the restart"):
            pass
        recorder.restart()
        recorder.step_begins(0)
        with recorder.computing():
            pass
        recorder.step_begins(1)
        with recorder.looping("evaluate"), recorder.computing():
            pass
        with recorder.computing():
            assert recorded_steps(recorder.steps(), 2, False, traced) == []
            collective = TracedCollective("all_reduce 'a'", "all_reduce", 8)
            traced.add(recorder.loop, recorder, collective)
            first, last = recorded_steps(recorder.steps(), 2, False, traced)
            (only,) = recorded_steps(recorder.steps(), 2, True, traced)
    assert only.number == first.number
    numbers = [(each.number, each.end is None) for each in (first, last)]
    assert numbers == [(2, False), (9, True)]
    assert (last.kind, last.ranks, last.num_bytes) == (TENSORFLOW, (0, 1), 8)
    assert traced.describe("evaluate") is None


# The command.


def write(folder: pathlib.Path, *records: FlightRecord) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    for each in records:
        (folder / file_name(each.rank)).write_text(each.to_json(), "utf-8")
    return folder


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(
        cli, ["doctor", *map(str, arguments)], env={"COLUMNS": "200"}
    )


def test_the_command_prints_one_sentence_a_table_and_writes_a_trace(tmp_path):
    late = record(1, DONE, threads=in_line("train.py:12: `time.sleep(1000)`"))
    folder = write(tmp_path / "logs", record(0, DONE, WAITS), late)
    trace = tmp_path / "trace.json"
    result = doctor("--trace", trace, folder)
    assert result.exit_code == 0, result.output
    sentence, *table = result.stdout.splitlines()
    assert sentence.startswith("Worker 0 waits for worker 1 in all_reduce")
    (row,) = [line for line in table if "host1" in line]
    assert "complete since 28.9 s" in row
    assert "train.py:12" in row
    bars = read_bars(trace.read_text("utf-8"))
    open_bars = [bar for bar in bars if bar.name.endswith("(not completed)")]
    assert [(bar.worker, bar.lane) for bar in open_bars] == [(0, "collectives 7/0")]
    assert {bar.lane for bar in bars} == {"loop", "collectives 7/0"}


def test_the_records_of_several_hosts_are_merged(tmp_path):
    folders = [
        write(tmp_path / "a", record(0, DONE, WAITS)),
        write(tmp_path / "b", record(1, DONE)),
    ]
    result = doctor(*folders)
    assert "worker 1 has not entered it" in result.stdout


def test_a_damaged_record_is_named_in_one_sentence_and_left_out(tmp_path):
    folder = write(tmp_path / "logs", record(0, DONE, WAITS), record(1, DONE))
    path = folder / file_name(1)
    path.write_text(path.read_text("utf-8")[:300], "utf-8")
    result = doctor(folder)
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        f"tfdp: {path} cannot be used: it is damaged, or was not written to its end; "
        "it is left out"
    ]
    assert "worker 1 has left no record" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["empty"], "There is no flight record that can be read."),
        (["empty", "missing"], "Each argument must be a folder with flight records"),
        (["empty", "--trace"], "options stand before the folders"),
        (["--steps", "3", "empty"], "This is an option of --input"),
        (["--trace", "x.json", "missing"], "--trace needs folders"),
        (["--trace", "no/x.json", "empty"], "the folder of the file does not exist"),
        (["missing"], "a folder of logs must exist. Received: missing"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(
    arguments, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("empty").mkdir()
    result = doctor(*arguments)
    assert result.exit_code != 0
    assert words in result.output
    assert "Traceback" not in result.output


def test_records_without_a_step_give_no_trace(tmp_path):
    folder = write(tmp_path / "logs", record(0, spans=[]), record(1, spans=[]))
    result = doctor("--trace", tmp_path / "trace.json", folder)
    assert result.exit_code == 1
    assert "so that no trace is written" in result.output
    assert not (tmp_path / "trace.json").exists()
