"""`tfdp bench`: its figures, tables and files, and a sentence for what is wrong."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path
from unittest import mock

import click
import keras
import numpy as np
import pytest

from tests.harness.commands import run_python
from tfdp.ground.base.intervals import median_interval
from tfdp.launch.bench import compare, compare_sides, output
from tfdp.launch.bench.channel import OnDemand
from tfdp.launch.bench.collectives import Settings, measure
from tfdp.launch.bench.models import FAMILIES, model_of_size
from tfdp.launch.bench.nccl_tests import (
    COLLECTIVES,
    MAX_REPLICAS_OF,
    algorithm_bandwidth,
    bus_factor,
    expected,
    input_of,
    num_wrong,
    padded_bytes,
)
from tfdp.launch.bench.sides import (
    Ratio,
    Side,
    alternate,
    calibrate_steps,
    paired_ratio,
    started,
    worker_commands,
)
from tfdp.launch.cli import main
from tfdp.launch.cli.parameter_types import ManyValues

DEADLINE_SECONDS = 120
PNG = b"\x89PNG\r\n\x1a\n"


def refused(capsys, *arguments: object) -> str:
    """What `tfdp bench` says to what it cannot run: one line, exit code 2."""
    with pytest.raises(SystemExit) as stopped:
        main.main(["bench", *map(str, arguments)])
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("tfdp: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


# What is computed.


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert bus_factor("all_reduce", 8) == 2 * 7 / 8
    assert bus_factor("reduce_scatter", 8) == bus_factor("all_gather", 8) == 7 / 8
    assert bus_factor("broadcast", 8) == 1
    assert algorithm_bandwidth(25 * 10**8, 0.5) == 5.0


def test_every_replica_gets_as_many_whole_elements():
    for size in (1, 5, 4096, 4097):
        padded = padded_bytes(size, 4, 3)
        assert padded % 12 == 0
        assert 0 <= padded - size < 12
        assert padded > 0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_wrong_element_anywhere_is_counted(collective):
    wanted = expected(collective, 1, 3, 6)
    assert num_wrong(wanted.astype("float32"), wanted) == 0
    for place in range(len(wanted)):
        spoiled = wanted.astype("float32")
        spoiled[place] += 1
        assert num_wrong(spoiled, wanted) == 1
    assert num_wrong(np.full(len(wanted), np.nan), wanted) == len(wanted)
    assert num_wrong(wanted[:-2], wanted) == 2


def test_a_lost_or_misplaced_contribution_is_counted():
    total = expected("all_reduce", 0, 3, 64)
    assert num_wrong(total - input_of(2, 64), total) > 0
    assert num_wrong(np.roll(total, 8), total) > 0
    gathered = expected("all_gather", 0, 2, 8)
    assert num_wrong(np.roll(gathered, 8), gathered) > 0  # in another order
    mine, other = (expected("reduce_scatter", place, 2, 64) for place in (0, 1))
    assert num_wrong(other, mine) > 0


def test_sums_of_the_inputs_are_exact_in_half_precision():
    most = MAX_REPLICAS_OF["float16"]
    total = expected("all_reduce", 0, most, 7)
    assert (total.astype("float16") == total).all()
    assert expected("all_reduce", 0, MAX_REPLICAS_OF["bfloat16"], 7).max() <= 256


def test_the_interval_of_a_median_leaves_out_the_extremes_it_may():
    # With 6 values, both extremes lie on one side of the median once in 32 times.
    assert median_interval([3, 1, 2, 6, 5, 4]) == (1, 6)
    assert median_interval(range(9)) == (1, 7)


def test_ratios_are_of_pairs():
    assert paired_ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0]).median == 2.0
    assert Ratio(1.0, 0.5, 2.0, 3).times(2) == Ratio(2.0, 1.0, 4.0, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_have_the_size_that_was_asked_for(family):
    for millions in (1, 5, 20):
        found = model_of_size(family, millions).num_parameters / 1e6
        assert found == pytest.approx(millions, rel=0.06)
    with pytest.raises(ValueError, match=r"Received: 0\.0001"):
        model_of_size(family, 0.0001)


# How sides take turns.


class Recorder:
    """Stands for a side, and notes what it is asked for."""

    name = "side"

    def __init__(self, seconds: float = 0.01) -> None:
        self.orders: list[tuple[str, int]] = []
        self._seconds = seconds

    def run(self, variant: str, steps: int) -> list[float]:
        self.orders.append((variant, steps))
        return [0.0, 0.0] if variant.startswith("check") else [0.0, self._seconds]


def test_sides_take_turns_in_an_order_that_is_reversed_every_other_block():
    side, turns = Recorder(), []
    variants = [(side, "a"), (side, "b")]
    times = alternate(
        variants, blocks=2, steps=5, warm_up=0, on_block=lambda: turns.append(1)
    )
    assert side.orders == [("a", 5), ("b", 5), ("b", 5), ("a", 5)]
    assert times == {"side/a": [0.01, 0.01], "side/b": [0.01, 0.01]}
    assert len(turns) == 4


def test_a_block_is_as_long_as_asked_and_has_at_least_one_step():
    assert calibrate_steps(0.1, [(Recorder(0.01), "a")]) == 10
    assert calibrate_steps(0.1, [(Recorder(5.0), "a")]) == 1
    assert calibrate_steps(0.1, [(Recorder(1e-9), "a")], most=50) == 50


def test_only_the_all_reduce_has_algorithms_and_all_results_are_checked():
    settings = Settings(COLLECTIVES, ("ring", "tree"), [10], "float32", 2, 2)
    side = Recorder()
    rows, times = measure(settings, side, 2)
    assert [(row.collective, row.algorithm) for row in rows] == [
        ("all_reduce", "ring"),
        ("all_reduce", "tree"),
        ("reduce_scatter", "-"),
        ("all_gather", "-"),
        ("broadcast", "-"),
    ]
    assert {row.size_bytes for row in rows} == {16}
    assert rows[0].busbw_gb_per_second == pytest.approx(16 / 0.01 / 1e9)
    checked = [variant for variant, _ in side.orders if variant.startswith("check ")]
    assert checked == [f"check {name}" for name in times]


@pytest.mark.full
def test_what_is_made_on_demand_is_kept_while_its_group_takes_turns():
    made = []
    variants = OnDemand(lambda name: made.append(name) or name, lambda name: name[0])
    for name in ("a1", "a2", "a1", "b1", "a1"):
        assert variants[name] == name
    assert made == ["a1", "a2", "b1", "a1"]


def test_a_worker_times_fit_or_a_loop_as_its_variants_say():
    from tfdp.launch.bench.training import make_variants

    settings = {"model": dataclasses.asdict(model_of_size("mlp", 0.05))}
    told = {
        "fit": {"fit": True},
        "own step": {"fit": True, "jit_compile": False, "alone": True},
        "executions": {"fit": True, "steps_per_execution": 4, "alone": True},
        "loop": {"pack_bytes": 2**20, "alone": True},
    }
    setup = {"strategy": "alone", "threads": None, "addresses": ["here:1"]}
    each = {
        name: {**settings, "batch_size": 4, **variant} for name, variant in told.items()
    }
    variants = make_variants({**setup, "variants": each})
    with mock.patch.object(
        keras.Model, "fit", autospec=True, side_effect=keras.Model.fit
    ) as fit:
        assert all(0 < variants[name](2) < DEADLINE_SECONDS for name in told)
        assert 0 < variants["executions"](11) < DEADLINE_SECONDS
    samples = [len(call.args[1]) for call in fit.call_args_list]
    # Executions have 2 steps in the short block, and 4 in the long one.
    assert samples == [3 * 4, 3 * 4, 4 * 4, 12 * 4]


def test_a_worker_that_ends_is_named_with_its_last_lines():
    side = Side("ours", "tfdp.launch.bench.nowhere", {})
    said = pytest.raises(RuntimeError, match=r"(?s)Worker 0 of ours ended.*nowhere")
    with said, started(side):
        pass


def test_another_interpreter_needs_nothing_of_this_ones_packages():
    for module in ("tfdp.launch.bench.channel", "tfdp.launch.bench.models"):
        (command,) = worker_commands(module, {}, ["here:1"], python=sys.executable)
        bare = [command[0], "-S", *command[1:]]  # without site-packages
        done = subprocess.run(bare, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


# What is read, and what is refused.


@pytest.mark.parametrize(
    ("line", "expected_values", "expected_rest"),
    [
        ("--sizes 1 2 -n 4", ("1", "2"), ()),
        ("-n 4 --sizes 1 --sizes 2", ("1", "2"), ()),
        ("--flag --sizes 1 2 script.py --sizes 3", ("1", "2"), ("script.py", "3")),
        ("--sizes 1 2 -- 3", ("1", "2"), ("3",)),
    ],
)
def test_an_option_takes_many_values_until_something_else_comes(
    line, expected_values, expected_rest
):
    found = {}

    @click.command(cls=ManyValues, context_settings={"allow_interspersed_args": False})
    @click.option("--sizes", multiple=True)
    @click.option("-n")
    @click.option("--flag", is_flag=True)
    @click.argument("rest", nargs=-1, type=click.UNPROCESSED)
    def command(**given):
        found.update(given)

    command.main(line.split(), standalone_mode=False)
    assert found["sizes"] == expected_values
    assert tuple(word for word in found["rest"] if word != "--sizes") == expected_rest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("collectives -n 2 --algorithms ring rings", "'rings' is not one of"),
        ("collectives -n 2 --collectives gather", "'gather' is not one of"),
        ("collectives -n 2 --sizes 4KB 0", "at least 1 byte"),
        ("collectives -n 2 --sizes big", "Received: big"),
        ("collectives -n 2 --min-bytes 2MB --max-bytes 1MB", "larger than the largest"),
        ("collectives -n 0", "at least 1. Received: 0"),
        ("collectives -n 1", "at least 2 replicas"),
        ("collectives -n 4 --algorithms hierarchical", "--node-size"),
        ("collectives -n 4 --node-size 3", "must divide the number of replicas, 4"),
        ("collectives -n 100000", "too many workers for this machine"),
        ("compare --models 5e6", "such a model need 18,6"),
        ("collectives -n 2 -D 20 --dtype bfloat16", "not exact in bfloat16"),
        ("collectives -n 2 --sizes 4KB 900GB", "check needs, take 10,800.0 GB"),
        ("collectives -n 2 --blocks 1", "at least 2. Received: 1"),
        ("collectives -n 2 --json nowhere/x.json", "the file does not exist"),
        ("collectives -n 2 --json .", "is a folder"),
        ("compare -n 1", "at least 2 workers. Received: -n 1"),
        ("compare --models 1 x", "Received: x"),
        ("compare --models 0.0001", "Received: 0.0001"),
        ("compare --models 1e308", "at most 1,000,000,000. Received: 1e308"),
        (f"compare -n {'9' * 4000}", "at most 1,000,000,000. Received: 999"),
        (f"collectives --sizes {'9' * 5000}", "at most 1024GB. Received: 999"),
        (f"collectives --json {'9' * 5000}", "cannot be written. Received: 999"),
        ("compare --plot x.png --no-plot", "--plot x.png"),
    ],
    ids=lambda text: text[:40],
)
def test_what_cannot_be_run_is_answered_by_one_sentence(
    capsys, tmp_path, monkeypatch, arguments, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert said in refused(capsys, *arguments.split())


@pytest.fixture
def no_matplotlib(monkeypatch, tmp_path) -> Path:
    """A folder to work in, where matplotlib cannot be imported."""
    monkeypatch.chdir(tmp_path)
    for name in {"matplotlib", *sys.modules}:
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.setitem(sys.modules, name, None)
    return tmp_path


@pytest.mark.parametrize("command", ["collectives", "compare"])
def test_a_plot_that_is_asked_for_without_matplotlib_is_refused_at_once(
    capsys, no_matplotlib, command
):
    said = refused(capsys, command, "--plot", "plot.png")
    assert "pip install 'tfdp[bench]'" in said
    assert list(no_matplotlib.iterdir()) == []


@pytest.mark.parametrize("declined", [True, False])
def test_without_matplotlib_the_table_is_printed_and_the_plot_left_out(
    capsys, monkeypatch, no_matplotlib, declined
):
    def draw(rows: object, caption: str, path: Path) -> None:
        output.new_figure("title", caption)

    def run(settings: object, files: output.Files) -> None:
        columns = {"median": lambda ratio: str(ratio.median)}
        content = output.about("compare", {})
        output.report(content, files, [Ratio(7.1, 7.0, 7.2, 3)], columns, draw)

    monkeypatch.setattr(compare, "run", run)
    with pytest.raises(SystemExit) as stopped:
        main.main(["bench", "compare", *(["--no-plot"] if declined else [])])
    assert not stopped.value.code
    printed = capsys.readouterr().out
    assert "7.1" in printed
    (written,) = (no_matplotlib / "tfdp-bench").iterdir()
    last = [f"Written: {written.relative_to(no_matplotlib)}"]
    if not declined:
        last.append(
            "No plot was drawn, since matplotlib is not installed: "
            "`pip install 'tfdp[bench]'`"
        )
    assert printed.splitlines()[-len(last) :] == last


# What is drawn.


def times_of_comparison() -> dict[str, list[float]]:
    """What two blocks of each variant have taken: the second is compared if tuned."""
    found: dict[str, list[float]] = {}
    for set_up in compare_sides.set_ups(2, has_torch=True):
        for choice in set_up.choices:
            found[set_up.key("1M", choice)] = [4.0, 4.0]
            if alone := set_up.key_without_communication("1M", choice):
                found[alone] = [3.0, 3.5]
    found["workers, defaults/1M"] = [5.0, 7.0]
    found["plain, defaults/1M"] = [2.0, 2.0]
    # The fastest in the first block is compared by its second one.
    found["workers, tuned/1M, jit_compile=True"] = [2.0, 8.0]
    found["stock, tuned/1M, packs of 4 MB"] = [1.0, 16.0]
    return found


def test_each_set_up_is_compared_with_those_of_tfdp_of_its_settings():
    set_ups, times = compare_sides.set_ups(2, has_torch=True), times_of_comparison()
    measured = {
        f"{set_up.kind}, {set_up.tuning}/1M{variant}"
        for set_up in set_ups
        for variant in set_up.variants
    }
    assert set(times) == measured
    rows = compare.rows_of("1M", set_ups, times, global_batch_size=64)
    assert [row.set_up for row in rows[::2]] == [
        "tfdp, 1 process of 2 devices",
        "tfdp, 2 processes",
        "plain Keras, all cores",
        "stock, 2 processes",
        "DDP, 2 processes",
    ]
    assert [row.settings for row in rows if row.settings != "defaults"] == [
        *("tuned: no XLA", "tuned: jit_compile=True", "tuned: no XLA"),
        *("tuned: packs of 4 MB", "tuned"),
    ]
    speeds = [
        [row.speed_of_tfdp[kind].median for row in rows if kind in row.speed_of_tfdp]
        for kind in compare.OURS
    ]
    assert speeds[0] == [1.5, 2.0, 0.5, 1.0, 1.0, 4.0, 1.0, 1.0]
    ours = [statistics.median([1 / 5, 1 / 7]), 1 / 8]
    theirs = (4.0, 4.0, 2.0, 4.0, 4.0, 16.0, 4.0, 4.0)  # defaults and tuned by turns
    expected_speeds = [seconds * ours[n % 2] for n, seconds in enumerate(theirs)]
    assert speeds[1] == pytest.approx(expected_speeds)
    devices, workers, plain = rows[0], rows[2], rows[4]
    assert devices.own_step_seconds == workers.own_step_seconds == 3.25
    assert workers.communication_seconds == statistics.median([2.0, 3.5])
    assert rows[3].own_step_seconds == 3.5
    assert plain.own_step_seconds is None
    assert plain.samples_per_second == 32.0


@pytest.mark.parametrize("left_off", [True, False])
def test_plain_keras_has_the_kernels_that_it_has_without_tfdp(monkeypatch, left_off):
    monkeypatch.setattr(compare_sides, "is_disabled_by_default", lambda: left_off)
    started = {}

    def start(name: str, *arguments: object, environment: dict, **given: object):
        started[name] = environment

    monkeypatch.setattr(compare_sides, "Side", start)
    for set_up in compare_sides.set_ups(2, has_torch=False):
        set_up.side({}, 32, 1, "python")
    asked = {
        name: found.get("TF_ENABLE_ONEDNN_OPTS") for name, found in started.items()
    }
    kinds = ("devices", "workers", "plain", "stock")
    on, off = ("1", "0") if left_off else (None, None)
    assert asked == {
        **{f"{kind}, tuned": on for kind in kinds},
        **{f"{kind}, defaults": on for kind in kinds[:2]},
        **{f"{kind}, defaults": off for kind in kinds[2:]},
    }
    with_memory = {
        name for name, found in started.items() if "MALLOC_TRIM_THRESHOLD_" in found
    }
    assert with_memory == {f"{kind}, tuned" for kind in kinds}


def test_comparisons_are_drawn_from_their_table(tmp_path):
    set_ups, times = compare_sides.set_ups(2, has_torch=True), times_of_comparison()
    rows = compare.rows_of("1M", set_ups, times, global_batch_size=64)
    for row in rows:
        assert all(show(row) for show in compare.COLUMNS.values())
    compare.plot("title", rows, "caption", tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(PNG)


# What is measured, for real.


def run_bench(folder: Path, name: str, *arguments: str) -> tuple[str, dict]:
    """Runs a benchmark to its end; returns what it printed and its JSON."""
    files = {kind: folder / f"{name}.{kind}" for kind in ("json", "png")}
    done = run_python(
        *("-m", "tfdp", "bench", name, *arguments),
        *("--json", str(files["json"]), "--plot", str(files["png"])),
        deadline_seconds=DEADLINE_SECONDS,
    )
    assert done.code == 0, done.output
    assert files["png"].read_bytes().startswith(PNG)
    content = json.loads(files["json"].read_text("utf-8"))
    for field in (
        "machine",
        "kernels",
        "load_average_1_min",
        "tensorflow",
        "keras",
        "tfdp",
    ):
        assert content[field]
    assert content["command"].startswith(f"tfdp bench {name} ")
    return done.output, content


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.slow
def test_collectives_between_two_workers_are_right_and_all_is_written(tmp_path):
    output, content = run_bench(
        *(tmp_path, "collectives", "-n", "2", "--blocks", "2"),
        *("--sizes", "4KB", "100000", "--algorithms", "ring", "tree"),
        *("--collectives", "all_reduce", "reduce_scatter", "all_gather"),
    )
    rows = content["rows"]
    assert len(rows) == 2 * (2 + 1 + 1)
    for row in rows:
        assert row["num_wrong"] == 0
        assert row["size_bytes"] in (4096, 100_000)
        assert row["count"] * 4 == row["size_bytes"]
        bandwidth = row["size_bytes"] / row["seconds"] / 1e9
        assert row["algbw_gb_per_second"] == pytest.approx(bandwidth)
    assert content["num_replicas"] == 2
    assert content["backend"] == "direct"
    assert all(len(times) == 2 for times in content["seconds"].values())
    assert content["settings"]["algorithms"] == ["ring", "tree"]
    assert "#wrong" in output
    assert "\x1b" not in output  # no bar where there is no terminal


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.slow
def test_a_comparison_goes_on_without_torch_and_says_how_to_get_it(tmp_path):
    output, content = run_bench(
        *(tmp_path, "compare", "-n", "2", "--models", "0.05", "--blocks", "2"),
        *("--torch-python", str(tmp_path / "python")),
    )
    assert "`pip install torch`" in output
    assert "--torch-python" in output
    assert content["torch"] is None
    rows = {
        (row["set_up"], row["settings"].partition(":")[0]): row
        for row in content["rows"]
    }
    assert len(rows) == 2 * 4
    stock = rows["stock, 2 processes", "defaults"]
    times = content["seconds_per_step"]
    pairs = zip(
        times["stock, defaults/0.05M"], times["workers, defaults/0.05M"], strict=True
    )
    in_range = sorted(theirs / ours for theirs, ours in pairs)
    assert in_range[0] <= stock["speed_of_tfdp"]["workers"]["median"] <= in_range[-1]
    for row in rows.values():
        assert (row["own_step_seconds"] is None) == (row["set_up"].startswith("plain"))
    assert "plain Keras, all cores" in output
    assert content["kernels"] in output


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.slow
def test_in_a_cluster_every_worker_measures_and_the_first_one_reports(tmp_path):
    file = tmp_path / "found.json"
    done = run_python(
        *("-m", "tfdp", "run", "-n", "2", "--log-dir", str(tmp_path), "-m", "tfdp"),
        *("bench", "collectives", "--sizes", "4KB", "--algorithms", "ring"),
        *("--blocks", "2", "--no-plot", "--json", str(file)),
        deadline_seconds=DEADLINE_SECONDS,
    )
    assert done.code == 0, done.output
    content = json.loads(file.read_text("utf-8"))
    assert content["num_replicas"] == 2
    assert content["backend"] == "direct"
    assert [row["num_wrong"] for row in content["rows"]] == [0]
    assert "[worker 0] collectives between 2 replicas" in done.output
    assert "[worker 1] collectives" not in done.output
