"""Whatever the files of a checkpoint hold: it loads whole, or is refused."""

from __future__ import annotations

import copy
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.checkpoint.forged import VALUES, forge, is_whole, restore, save
from tfdp.callbacks import BackupAndRestore
from tfdp.checkpoint import index_file
from tfdp.checkpoint.backups import Backups
from tfdp.checkpoint.run_schema import check_run
from tfdp.checkpoint.schema import Malformed
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground.base.files import replaced, write_text
from tfdp.training.reduction.cache_file import load_links, store_links

Content = dict[str, Any]
# Ending of the data that TensorFlow wrote.
DATA_FILE = ".data-00000-of-00001"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder)
    assert is_whole(restore(folder))
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoint", symlinks=True)


def refused(folder: Path) -> str:
    with pytest.raises(ValueError, match="The checkpoint was not restored") as caught:
        restore(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rename(content: Content, prefix: str) -> None:
    files = content["parts"][0][2]
    content["parts"][0][0] = prefix
    for file in files:
        file[0] = prefix + file[0][len("worker-0-0") :]


ELSEWHERE: dict[str, Callable[[Content, Path], Any]] = {
    "token above": lambda c, p: c.update(token="../checkpoint/" + c["token"]),
    "token absolute": lambda c, p: c.update(token=str(p / c["token"])),
    "token of dots": lambda c, p: c.update(token="."),
    "prefix above": lambda c, p: rename(c, f"../{c['token']}/worker-0-0"),
    "prefix absolute": lambda c, p: rename(c, str(p / c["token"] / "worker-0-0")),
    "file above": lambda c, p: c["parts"][0][2][0].__setitem__(0, "../index.json"),
    "file absolute": lambda c, p: c["parts"][0][2][0].__setitem__(0, "/dev/zero"),
    "prefix of a surrogate": lambda c, p: rename(c, "worker-0-\ud800"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_no_name_in_an_index_leads_out_of_its_folder(folder, name):
    forge(folder, lambda content: ELSEWHERE[name](content, folder))
    assert "index.json' is damaged: it" in refused(folder)


INCOMPLETE: dict[str, Callable[[Content], Any]] = {
    "no part": lambda c: c.update(parts=[]),
    "a part fewer elements": lambda c: c["parts"][0][3].pop(),
    "elements twice": lambda c: c["parts"][0][3].append(c["parts"][0][3][0]),
    "out of bounds": lambda c: c["parts"][0][3][0].__setitem__(2, 41),
    "negative": lambda c: c["parts"][0][3][0].__setitem__(1, -1),
    "of no tensor": lambda c: c["parts"][0][3][0].__setitem__(0, 3),
    "a tensor twice": lambda c: c["tensors"].append(c["tensors"][0]),
    "a part twice": lambda c: c["parts"].append(c["parts"][0]),
    "a huge shape": lambda c: c["tensors"][0].__setitem__(1, [2**62, 2**62]),
    "another size": lambda c: c["parts"][0][2][0].__setitem__(1, 2**40),
    "another dtype": lambda c: c["tensors"][0].__setitem__(2, "float64"),
    "a file fewer": lambda c: c["parts"][0][2].pop(),
    "no list": lambda c: c.update(tensors=None),
    "a number for a name": lambda c: c["tensors"][0].__setitem__(0, 5),
    "a fraction": lambda c: c["parts"][0][3][0].__setitem__(1, 0.0),
    "an unknown field": lambda c: c.update(more=1),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_an_index_that_leaves_elements_out_or_makes_no_sense_is_refused(folder, name):
    forge(folder, INCOMPLETE[name])
    assert "index.json' is damaged: " in refused(folder)


def test_a_checkpoint_whose_shards_tensorflow_wrote_is_read(folder):
    """As tfdp 0.1 wrote them, with CRC-32."""
    (data,) = folder.glob("data-*")
    content = (data / "worker-0-0.data").read_bytes()
    prefix = str(data / "worker-0-0")
    names = [f"{name}:0" for name in VALUES]
    arrays = [array.reshape(-1) for array in VALUES.values()]
    tf.raw_ops.SaveV2(
        prefix=prefix, tensor_names=names, shape_and_slices=[""] * 3, tensors=arrays
    )
    written = [Path(prefix + ending) for ending in (".index", DATA_FILE)]
    assert written[1].read_bytes() == content

    def rewrite(index: Content) -> None:
        index["parts"][0][2] = [
            [path.name, path.stat().st_size, zlib.crc32(path.read_bytes())]
            for path in written
        ]
        index.pop("algorithm", None)

    (data / "worker-0-0.data").unlink()
    forge(folder, rewrite, version=index_file.FORMAT_OF_TENSORFLOW)
    assert is_whole(restore(folder))
    written[1].write_bytes(content[:-1] + b"x")
    assert "was altered: its checksum does not match" in refused(folder)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"format": ' + "9" * 5000 + "}",
        '{"format": 1, "checksum": 0, "content": ' + "[" * 900 + "]" * 900 + "}",
        '{"format": [], "checksum": 0, "content": null}',
        '{"format": NaN, "checksum": 0, "content": 1}',
        "\ud800",
        "[" + "0," * 2**23 + "0]",
    ],
    ids=range(7),
)
def test_an_index_that_is_none_is_refused(folder, text):
    (folder / "index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert "index.json' is damaged" in refused(folder)


def _link_to(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


IRREGULAR: dict[str, Callable[[Path], Any]] = {
    "a device": lambda path: _link_to(path, "/dev/zero"),
    "a link": lambda path: _link_to(path, str(path) + ".moved"),
    "a pipe": _pipe,
    "a folder": _folder,
}


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("ending", ["index.json", ".data"])
def test_only_regular_files_are_read(folder, kind, ending):
    (path,) = [p for p in folder.rglob("*") if p.name.endswith(ending)]
    shutil.copy(path, str(path) + ".moved")
    IRREGULAR[kind](path)
    assert "not a regular file" in refused(folder)


def test_a_folder_of_data_that_is_a_link_is_refused(folder, tmp_path):
    (data,) = folder.glob("data-*")
    data.rename(tmp_path / data.name)
    data.symlink_to(tmp_path / data.name)
    assert "is a link. Put the folder itself there" in refused(folder)


def test_an_index_that_is_too_large_is_not_read(folder):
    os.truncate(folder / "index.json", 2**40)  # sparse
    assert f"it has more than {index_file.INDEX_BYTES:,} bytes" in refused(folder)


# Backups.

X = np.arange(12, dtype="float32").reshape(6, 2) / 12


class Cut(Exception):
    """Ends a training."""


class Observer(keras.callbacks.Callback):
    """Cuts training off at a step, and notes with which step it began."""

    def __init__(self, step: int | None = None) -> None:
        super().__init__()
        self.step, self.seen = step, []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(int(self.model.optimizer.iterations))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) == self.step:
            raise Cut


@pytest.fixture(scope="module")
def model() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


def fit(model: keras.Model, folder: Path, *callbacks: Any, **options: Any) -> Any:
    model.optimizer.iterations.assign(0)
    options = {"epochs": 3, "batch_size": 2, "shuffle": False, "verbose": 0} | options
    backup = BackupAndRestore(folder, save_freq=1)
    return model.fit(X, X[:, :1], callbacks=[backup, *callbacks], **options)


@pytest.fixture(scope="module")
def interrupted(model, tmp_path_factory) -> Path:
    """Backups after four and five of nine steps."""
    folder = tmp_path_factory.mktemp("interrupted")
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)
    with pytest.raises(Cut):
        fit(model, folder, Observer(6), stopping)
    shutil.rmtree(folder / "step-3")
    return folder


@pytest.fixture
def backups(interrupted, tmp_path) -> Path:
    return shutil.copytree(interrupted, tmp_path / "backups")


def run_of(interrupted: Path) -> dict[str, Any]:
    return copy.deepcopy(index_file.load_index(str(interrupted / "step-5")).run)


FORGED_RUNS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an epoch of 30 digits": lambda r: r.update(epoch=int("9" * 30)),
    "a negative epoch": lambda r: r.update(epoch=-1),
    "true for an epoch": lambda r: r.update(epoch=True),
    "no steps": lambda r: r.update(steps=None),
    "more batches than steps": lambda r: r.update(batches=9),
    "callbacks that name the model": lambda r: r["callbacks"].update(
        {"EarlyStopping-1": {"values": {"model": 5}, "arrays": {}}}
    ),
    "callbacks with a wrong value": lambda r: r["callbacks"].update(
        {"EarlyStopping-1": {"values": {"wait": "x"}, "arrays": {}}}
    ),
    "a list": lambda r: r.update(callbacks=[]),
    "no random states": lambda r: r.update(random=[]),
    "too few words": lambda r: r["random"][0]["python"][1].pop(),
    "no logs": lambda r: r.update(logs={"__array__": ["<f4", [-1], ""]}),
    "logs of objects": lambda r: r.update(logs={"__array__": ["|O", [0], ""]}),
    "endless skipping": lambda r: r["data"].update(taken=[0] * 10**4),
    "endless validation": lambda r: r["data"].update(validations=[[0, True]] * 10**4),
    "no number of replicas": lambda r: r["facts"].update(replicas=0),
    "no data": lambda r: r.pop("data"),
    "a merge": lambda r: r["facts"].update(merges=["__import__"]),
    "an unknown field": lambda r: r.update(model="x"),
    "a batch size of nothing": lambda r: r["identity"].update(batch_size=0),
    "not a number": lambda r: r["rates"].update(
        warmup={"steps": 1, "first": float("nan"), "last": 1, "start": 0}
    ),
}


@pytest.mark.parametrize("name", FORGED_RUNS)
def test_a_forged_run_is_refused_in_one_sentence(interrupted, name):
    run = run_of(interrupted)
    check_run(run)
    FORGED_RUNS[name](run)
    with pytest.raises(Malformed, match=r"^its [^\n]* must be [^\n]*, but is [^\n]*$"):
        check_run(run)


FORGED_BACKUPS: dict[str, Callable[[Content], Any]] = {
    "epoch": lambda c: c["run"].update(epoch=int("9" * 30)),
    "steps of another": lambda c: c["run"].update(steps=4),
    "replicas": lambda c: c["run"]["facts"].update(replicas=10**9),
    "tensors": lambda c: c.update(tensors=None),
    "run": lambda c: c.update(run=[]),
    "arrays": lambda c: c["run"]["callbacks"].update(
        {
            "EarlyStopping-1": {
                "values": {},
                "arrays": {"best_weights": [[[2**40], "float32"]]},
            }
        }
    ),
}


@pytest.mark.parametrize("name", FORGED_BACKUPS)
def test_training_goes_on_from_the_backup_before_a_forged_one(model, backups, name):
    forge(backups / "step-5", FORGED_BACKUPS[name])
    watch = Observer(5)
    with (
        pytest.warns(
            UserWarning, match=r"'step-4', since newer backups are damaged"
        ) as w,
        pytest.raises(Cut),
    ):
        fit(model, backups, watch)
    assert watch.seen == [4]
    assert all("\n" not in str(item.message) for item in w)


def test_an_index_that_is_a_folder_is_damage(model, backups):
    _folder(backups / "step-5" / "index.json")
    with (
        pytest.warns(UserWarning, match="it is not a regular file"),
        pytest.raises(Cut),
    ):
        fit(model, backups, Observer(5))


def test_a_state_that_a_callback_cannot_take_is_said(model, backups):
    class Own(keras.callbacks.Callback):
        def get_state(self) -> dict:
            return {"count": 1}

        def set_state(self, state: dict) -> None:
            self.count = state["count"]

    name = f"{Own.__qualname__}-1"
    forge(
        backups / "step-5",
        lambda c: c["run"]["callbacks"].update({name: {"own": [1]}}),
    )
    with pytest.raises(
        ValueError, match=r"Own-1 cannot restore its state from the backup"
    ):
        fit(model, backups, Own())


def test_only_what_a_backup_wrote_is_ever_deleted(model, tmp_path):
    """Folders of the user's with the names of backups, of every look."""
    folder = tmp_path / "runs"
    mine = {
        "step-77/notes.txt": "mine",
        "step-78/page.json": "{}",
        "step-0/data-0123456789ab/photo.png": "mine",
        "step-2/weights.bin": "mine",
        "step-5.damaged/index.json": "<html>",
        "elsewhere/index.json": "{}",
    }
    for name, text in mine.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "step-79").symlink_to(folder / "elsewhere")
    (folder / "step-80").mkdir()
    fit(model, folder)
    left = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.relative_to(folder).as_posix() for path in left} == set(mine)
    for name, text in mine.items():
        assert (folder / name).read_text() == text
    assert (folder / "step-79").is_symlink()
    assert (folder / "step-80").is_dir()


def test_a_backup_is_not_written_through_a_link(model, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "step-1").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="not written through a link"):
        fit(model, tmp_path / "runs")
    assert not list((tmp_path / "outside").iterdir())


# Names that can be guessed.


def test_the_probe_of_a_directory_follows_no_link(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "runs"
    victim.write_text("mine")
    folder.mkdir()
    (folder / ".tfdp-probe").symlink_to(victim)

    backups = Backups(str(folder), 1, WorkerGroup(0, 1))
    backups.prepare()
    backups.release()
    assert victim.read_text() == "mine"
    assert os.listdir(folder) == [".tfdp-probe"]


def test_writing_a_file_follows_no_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "guessed").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "guessed", "other")
    with replaced(tmp_path / "target", str(tmp_path / "guessed")) as temporary:
        Path(temporary).write_text("other")
    assert victim.read_text() == "mine"
    assert (tmp_path / "target").read_text() == "other"
    assert not (tmp_path / "guessed").exists()


# Links of a cluster.


@pytest.mark.parametrize(
    "number", ["1" * 400, "true", "NaN", "1e999", '"1"', "[]", "9" * 5000]
)
def test_a_links_file_with_a_number_that_is_none_is_as_good_as_no_file(
    tmp_path, number
):
    link = f'{{"alpha_seconds": {number}, "seconds_per_byte": 1}}'
    path = tmp_path / "links.json"
    path.write_text(f'{{"a": {{"inside": {link}, "across": {link}}}}}')
    assert load_links("a", path) is None


def test_a_links_file_is_a_regular_one(tmp_path):
    path = tmp_path / "links.json"
    path.symlink_to("/dev/zero")
    assert load_links("a", path) is None
    path.unlink()
    os.mkfifo(path)
    assert load_links("a", path) is None


def test_junk_in_a_links_file_is_not_written_again(tmp_path):
    from tfdp.ground.links import DEFAULT_LINKS

    path = tmp_path / "links.json"
    path.write_text('{"deep": ' + "[" * 400 + "]" * 400 + ', "b": 1}')
    assert store_links("a", DEFAULT_LINKS["ring"], path)
    assert list(json.loads(path.read_text())) == ["a"]
