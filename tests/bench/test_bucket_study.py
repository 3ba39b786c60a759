"""The bucket-size study: its example, its command, and what each says when wrong."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.harness.commands import ROOT, run_python
from tfdp.launch.cli.main import run_command
from tools.bench.__main__ import bench as command
from tools.bench.buckets import (
    Epoch,
    Run,
    Study,
    StudyError,
    order_of_runs,
    read_statistics,
)
from tools.bench.buckets_report import (
    best_over_worst,
    columns_of,
    content_of,
    diminishing_returns,
    plot,
    summarize,
    write_csv,
)

sys.path.insert(0, str(ROOT / "examples"))

import cifar_data

pytestmark = pytest.mark.slow

DEADLINE_SECONDS = 120
NAMES = (*cifar_data.TRAIN_FILES, cifar_data.TEST_FILE)


def records(seed: int = 0) -> np.ndarray:
    """A file of the archive: labels in order, and images that tell the channels."""
    made = np.zeros((cifar_data.RECORDS_PER_FILE, cifar_data.RECORD_BYTES), np.uint8)
    made[:, 0] = (np.arange(len(made)) + seed) % cifar_data.NUM_CLASSES
    made[:, 1] = 10 + seed  # red at the left upper corner
    made[:, 1 + 1024 + 31] = 20  # green at the end of the first row
    made[:, 1 + 2048 + 32] = 30  # blue at the begin of the second row
    return made


def write_files(folder: Path) -> Path:
    """Makes the six files below a folder, as the archive has them."""
    files = folder / cifar_data.FOLDER
    files.mkdir()
    for seed, name in enumerate(NAMES):
        records(seed).tofile(files / name)
    return folder


@pytest.fixture
def cifar(tmp_path, monkeypatch) -> Path:
    """A folder with files of 100 records each: 10,000 need no test each time."""
    monkeypatch.setattr(cifar_data, "RECORDS_PER_FILE", 100)
    return write_files(tmp_path)


@pytest.mark.full
def test_cifar_of_its_real_size_is_read_with_its_labels_and_channels(tmp_path):
    cifar = write_files(tmp_path)
    train, test = cifar_data.read_cifar(cifar)
    assert train.images.shape == (50_000, 32, 32, 3)
    assert test.images.shape == (10_000, 32, 32, 3)
    assert train.labels[:3].tolist() == [0, 1, 2]
    assert train.labels[40_000:40_002].tolist() == [4, 5]
    assert test.labels[0] == 5
    assert train.images[10_000, 0, 0].tolist() == [11, 0, 0]
    assert test.images[0, 0, 31].tolist() == [0, 20, 0]
    assert test.images[0, 1, 0].tolist() == [0, 0, 30]


@pytest.mark.full
def test_cifar_is_read_the_same_from_inside_its_folder_and_from_its_archive(cifar):
    packed = cifar / "packed"
    packed.mkdir()
    with tarfile.open(packed / cifar_data.ARCHIVE, "w:gz") as file:
        file.add(cifar / cifar_data.FOLDER, cifar_data.FOLDER)
    read = [
        cifar_data.read_cifar(folder)
        for folder in (cifar, cifar / cifar_data.FOLDER, packed)
    ]
    for other in read[1:]:
        for a, b in zip(read[0], other, strict=True):
            np.testing.assert_array_equal(a.images, b.images)
            np.testing.assert_array_equal(a.labels, b.labels)


def test_a_missing_file_of_cifar_is_named(cifar):
    (cifar / cifar_data.FOLDER / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match=r"missing.*Received: .*data_batch_3\.bin"):
        cifar_data.read_cifar(cifar)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (-1, "test_batch.bin.*307,300 bytes: 100 records.*Received: fewer"),
        (1, "test_batch.bin.*307,300 bytes: 100 records.*Received: more"),
    ],
)
def test_a_file_of_cifar_of_another_length_is_named(cifar, change, message):
    content = bytes(cifar_data.RECORDS_PER_FILE * cifar_data.RECORD_BYTES + change)
    (cifar / cifar_data.FOLDER / "test_batch.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        cifar_data.read_cifar(cifar)


def test_a_file_of_cifar_with_a_wrong_label_is_named(cifar):
    made = records()
    made[77, 0] = 10
    (cifar / cifar_data.FOLDER / "data_batch_5.bin").write_bytes(made.tobytes())
    with pytest.raises(
        ValueError, match=r"data_batch_5\.bin.*Received: 10 in record 77"
    ):
        cifar_data.read_cifar(cifar)


def test_a_folder_without_cifar_and_pickles_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no CIFAR-10 here.*binary\.tar\.gz"):
        cifar_data.read_cifar(tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(ValueError, match="pickles, which can run any code"):
        cifar_data.read_cifar(tmp_path)


def test_a_damaged_archive_of_cifar_is_named(tmp_path):
    path = tmp_path / cifar_data.ARCHIVE
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"archive.*corrupt.*Received: .*tar\.gz"):
        cifar_data.read_cifar(tmp_path)
    with tarfile.open(path, "w:gz") as file:
        file.addfile(tarfile.TarInfo("cifar-10-batches-bin/readme.html"))
    with pytest.raises(ValueError, match=r"data_batch_1\.bin is missing in the arch"):
        cifar_data.read_cifar(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"archive.*corrupt"):
        cifar_data.read_cifar(tmp_path)


def test_made_up_images_depend_on_the_seed_alone_and_show_their_classes():
    train, test = cifar_data.make_images(400, seed=3)
    again, _ = cifar_data.make_images(400, seed=3)
    other, _ = cifar_data.make_images(400, seed=4)
    np.testing.assert_array_equal(train.images, again.images)
    assert (train.images != other.images).any()
    assert train.images.dtype == np.uint8
    assert len(test.labels) == 80
    assert sorted(np.bincount(train.labels)) == [40] * 10
    # The strength of each wave tells the class, whatever the shift: the nearest mean
    # of the training images' spectra names most images of the test set.
    spectra = [np.abs(np.fft.rfft2(d.images, axes=(1, 2))) for d in (train, test)]
    means = np.stack([spectra[0][train.labels == c].mean(0) for c in range(10)])
    distances = ((spectra[1][:, None] - means) ** 2).sum((2, 3, 4))
    assert (distances.argmin(1) == test.labels).mean() > 0.6


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([50, 80, 97.5, 100, 99], 2),  # within 3 % of the best
        ([50, 80, 96.5, 100, 99], 4),  # not within 3 % of it
        ([100, 99, 60, 50, 40], 0.5),  # larger buckets lose the overlap
        ([100, 100, 100, 100, 100], 0.5),  # size does not matter
        ([10, 20, 40, 80, 160], 8),  # returns never diminish
    ],
)
def test_returns_diminish_at_the_smallest_size_near_the_best(speeds, expected):
    sizes = [0.5, 1, 2, 4, 8]
    assert diminishing_returns(sizes, speeds) == expected
    assert diminishing_returns(sizes[::-1], speeds[::-1]) == expected


def test_returns_of_nothing_are_refused():
    with pytest.raises(ValueError, match="Received: 0 sizes and 0 throughputs"):
        diminishing_returns([], [])


def test_each_size_runs_once_in_a_repeat_and_comes_early_as_often_as_late():
    sizes = [0.5, 1, 2, 4, 8]
    runs = order_of_runs(sizes, 4)
    places: dict[float, list[int]] = {size: [] for size in sizes}
    for repeat in range(4):
        order = [size for size, number in runs if number == repeat]
        assert sorted(order) == sizes
        for place, size in enumerate(order):
            places[size].append(place)
    assert {sum(found) for found in places.values()} == {8}
    assert runs == order_of_runs(sizes, 4)


def made_up_runs() -> list[Run]:
    """Two runs of three sizes; the first epoch is slow, as when a step is traced."""

    def epochs(speed: float, loss: float | None) -> tuple[Epoch, ...]:
        accuracy = None if loss is None else 1 - loss
        warm = Epoch(64 / speed, speed, 20 / speed, 4, loss, accuracy)
        return Epoch(9.0, 7.0, 0.9, 4, 2.0, 0.1), warm

    return [
        Run(size, repeat, epochs(speed + repeat, loss))
        for repeat in (0, 1)
        for size, speed, loss in ((8, 99, 0.5), (0.5, 50, 0.5), (2, 98, None))
    ]


def test_results_are_the_medians_of_runs_without_the_first_epoch(tmp_path):
    runs = made_up_runs()
    results = summarize(runs)
    assert [r.bucket_mb for r in results] == [0.5, 2, 8]
    assert [r.samples_per_second for r in results] == [50.5, 98.5, 99.5]
    assert results[0].lowest_samples_per_second == 50
    assert results[0].highest_samples_per_second == 51
    assert results[0].step_seconds == pytest.approx((64 / 50 + 64 / 51) / 2)
    assert [r.val_loss for r in results] == [0.5, None, 0.5]
    assert best_over_worst(results) == pytest.approx(99.5 / 50.5)
    alone = summarize([Run(1, 0, runs[0].epochs[:1])])
    assert alone[0].samples_per_second == 7.0


def test_results_are_written_as_csv_json_table_and_picture(tmp_path):
    runs = made_up_runs()
    results = summarize(runs)
    write_csv(results, tmp_path / "b.csv")
    with (tmp_path / "b.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["bucket_mb"] for row in rows] == ["0.5", "2", "8"]
    assert [row["val_loss"] for row in rows] == ["0.5", "", "0.5"]
    assert rows[1]["num_buckets"] == "4"

    content = json.loads(json.dumps(content_of(results, runs)))
    assert content["diminishing_returns_mb"] == 2
    assert len(content["runs"]) == 6

    marks = [columns_of(results)[""](result) for result in results]
    assert marks == ["", "returns diminish", "best"]

    plot(runs, results, "a machine", tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    # Without a loss there is one picture less, and no error.
    silent = [r for r in runs if r.bucket_mb == 2]
    plot(silent, summarize(silent), "a machine", tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size < (tmp_path / "b.png").stat().st_size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "left no statistics: it must take --bucket-mb"),
        ("epoch,step_seconds\n", "hold no epoch"),
        ("step_seconds\n1\n", "number in the column samples_per_second"),
        (
            "step_seconds,samples_per_second,communication_fraction\n1,2,nan\n",
            "Received: 'nan'",
        ),
    ],
)
def test_a_script_without_statistics_is_told_what_they_are(tmp_path, content, message):
    path = tmp_path / "statistics.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StudyError, match=message):
        read_statistics(path)


# A script as quick as it gets: its throughput depends on the bucket size alone.
SCRIPT = """
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--bucket-mb", type=float)
parser.add_argument("--output", type=pathlib.Path)
parser.add_argument("--end", default="well")
args = parser.parse_args()
if args.end == "badly":
    raise SystemExit("the data are not there")
if args.end == "well":
    columns = "step_seconds,samples_per_second,communication_fraction,val_loss"
    speed = 100 if args.bucket_mb > 1 else 60
    row = f"{1 / speed},{speed},0.25,1.5"
    (args.output / "statistics.csv").write_text(f"{columns}\\n{row}\\n")
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def bench(capsys, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        run_command(command, "tools.bench", ["buckets", *map(str, arguments)])
    captured = capsys.readouterr()
    return stopped.value.code, captured.out, captured.err


def test_the_command_compares_sizes_with_any_launcher_and_script(
    script, tmp_path, capsys
):
    out = tmp_path / "out"
    own = ("--sizes", "0.5", "2", "4", "--repeats", "2", "--out", out)
    code, output, errors = bench(capsys, *own, "--launcher", "env A=1", script)
    assert code in (0, None), errors
    assert "1.67 times the throughput of the worst" in output
    assert "Returns diminish at 2 MB" in output
    content = json.loads((out / "buckets.json").read_text())
    assert content["diminishing_returns_mb"] == 2
    assert {"machine", "tensorflow", "command", "load_average_1_min"} <= set(content)
    assert [run["repeat"] for run in content["runs"]] == [0, 0, 0, 1, 1, 1]
    assert (out / "buckets.csv").is_file()
    assert (out / "buckets.png").is_file()
    log = (out / "runs" / "0.5mb-1" / "output.log").read_text()
    assert log.startswith("$ env A=1 ")

    code, _, errors = bench(capsys, "--out", out, script)
    assert code == 2
    assert "holds a study already" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "1", "0", "SCRIPT"), "above 0. Received: 0"),
        (("--sizes", "1", "2", "1", "SCRIPT"), "given once. Received: 1 2 1"),
        (("--repeats", "0", "SCRIPT"), "at least 1. Received: 0"),
        (("nothing.py",), "not there"),
        (("SCRIPT", "--bucket-mb", "3"), "itself. Received: --bucket-mb"),
        (("SCRIPT", "--output=x"), "itself. Received: --output=x"),
        (("-n", "3", "--launcher", "x", "SCRIPT"), "--launcher or -n"),
        (("--launcher", "no-such-launcher", "SCRIPT"), "cannot be started"),
        (("--launcher", "'", "SCRIPT"), "as in a shell (No closing quotation)"),
        (("--launcher", "env", "SCRIPT", "--end", "badly"), "the data are not there"),
        (("--launcher", "env", "SCRIPT", "--end", "mute"), "left no statistics"),
    ],
)
def test_what_cannot_be_studied_is_answered_by_one_sentence(
    script, tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    words = [str(script) if word == "SCRIPT" else word for word in arguments]
    code, _, errors = bench(capsys, *words)
    assert code == 2
    assert message in errors
    assert errors.startswith("tools.bench: error: ")
    assert "Traceback" not in errors


def test_the_command_of_a_run_starts_local_workers_by_default():
    command = Study("train.py", ["--epochs", "1"], [], 3, Path("runs")).command(
        4, Path("runs/4mb-1")
    )
    assert command[1:6] == ["-m", "tfdp", "run", "-n", "3"]
    assert command[-7:] == [
        *("train.py", "--bucket-mb", "4", "--output", "runs/4mb-1"),
        *("--epochs", "1"),
    ]


# Opens the checkpoint where tfdp cannot be imported, and measures.
SERVE = """
import runpy, sys
class Blocked:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] == "tfdp":
            raise ImportError("tfdp is blocked")
sys.meta_path.insert(0, Blocked())
sys.argv = ["serve_latency.py", *sys.argv[1:]]
runpy.run_path("examples/serve_latency.py", run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
def test_the_example_trains_on_two_workers_and_plain_keras_serves_what_it_saved(
    tmp_path,
):
    output = tmp_path / "output"
    run = ("-m", "tfdp", "run", "-n", "2", "--log-dir", str(tmp_path / "logs"))
    own = ("--short", "--width", "4", "--bucket-mb", "0.05", "--output", str(output))
    trained = run_python(
        *run, "examples/cifar_resnet.py", *own, deadline_seconds=DEADLINE_SECONDS
    )
    assert trained.code == 0, trained.output[-5000:]
    assert trained.output.count("made-up images") == 2  # every worker says
    assert trained.output.count("epoch 2: ") == 1  # only the chief
    epochs = read_statistics(output / "statistics.csv")
    assert len(epochs) == 2
    assert all(0 < epoch.communication_fraction < 1 for epoch in epochs)
    assert all(epoch.num_buckets and epoch.num_buckets > 1 for epoch in epochs)
    assert sorted(p.name for p in (output / "checkpoints").iterdir()) == [
        "epoch-01.keras",
        "epoch-02.keras",
    ]

    served = run_python(
        *("-c", textwrap.dedent(SERVE), str(output / "checkpoints"), "--calls", "5"),
        deadline_seconds=DEADLINE_SECONDS,
    )
    assert served.code == 0, served.output[-5000:]
    assert "epoch-02.keras" in served.output
    assert served.output.count("ms per image (p95") == 2


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.processes
def test_a_worker_without_cifar_says_so_and_does_not_wait_for_the_others(
    tmp_path,
):
    workers = {"worker": ["localhost:1", "localhost:2"]}
    task = {"type": "worker", "index": 1}
    done = subprocess.run(
        [sys.executable, "examples/cifar_resnet.py", "--data", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TF_CONFIG": json.dumps({"cluster": workers, "task": task})},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert "error: There is no CIFAR-10 here; the folder must hold" in done.stderr
    assert "Traceback" not in done.stderr
