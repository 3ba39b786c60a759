"""A torch `DataLoader`: each worker loads its own rows, and trains as one device."""

from __future__ import annotations

import random
import warnings
from typing import Any

import keras
import numpy as np
import pytest

import tfdp
from tests.harness import common
from tests.harness.interrupted import Layout, run
from tfdp.ground._compat import keras_data
from tfdp.training.data import loader_rows
from tfdp.training.data.rows import rows_of_worker

torch = pytest.importorskip("torch")

BATCH = 8
NUM_ROWS = 29  # of the last batch, of five rows, each of four replicas has one or two


class Rows(torch.utils.data.Dataset):
    """Rows by number, and which of them were asked for in this process."""

    def __init__(self) -> None:
        x, y = common.regression_data(NUM_ROWS)
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)
        self.read: list[int] = []

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> tuple:
        self.read.append(int(index))
        return self.x[index], self.y[index]


class Random(Rows):
    """The same, with noise."""

    def __getitem__(self, index: int) -> tuple:
        x, y = super().__getitem__(index)
        return x + torch.rand([]), y


class ByNumpy(Rows):
    """Noise of another library."""

    def __getitem__(self, index: int) -> tuple:
        x, y = super().__getitem__(index)
        return x + np.float32(np.random.random()), y


class ByPython(Rows):
    """And of a third."""

    def __getitem__(self, index: int) -> tuple:
        x, y = super().__getitem__(index)
        return x + random.random(), y


class Together(Rows):
    """Rows that are loaded together."""

    def __getitems__(self, indices: list) -> list:
        return [self[index] for index in indices]


class Endless(torch.utils.data.IterableDataset):
    """Has no numbers."""

    def __iter__(self):
        return iter([(torch.zeros(6), torch.zeros(1))] * NUM_ROWS)


def loader(dataset: Any = None, **options: Any) -> Any:
    options = {"batch_size": BATCH} | options
    return torch.utils.data.DataLoader(dataset or Rows(), **options)


def generator() -> Any:
    return torch.Generator().manual_seed(3)


LOADERS = {
    "in order": lambda: loader(),
    "shuffled": lambda: loader(shuffle=True),
    "by a generator": lambda: loader(shuffle=True, generator=generator()),
    "whole batches": lambda: loader(shuffle=True, drop_last=True),
    "by processes": lambda: loader(shuffle=True, num_workers=2),
    "by weight": lambda: loader(
        sampler=torch.utils.data.WeightedRandomSampler([1.0, 2.0, 3.0], 21)
    ),
    "together": lambda: loader(Together(), shuffle=True),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("ranks", [[0], [2, 3]])
def test_a_workers_rows_are_those_of_the_whole_batch(name, ranks):
    make = LOADERS[name]
    num_replicas = 2 * len(ranks)
    torch.manual_seed(5)
    whole = make()
    wanted = [[batch for batch in whole] for _ in range(2)]  # noqa: C416
    torch.manual_seed(5)
    own = make()
    assert loader_rows.why_not_split_loader(own) == ""
    of_rows = loader_rows.loader_of_rows(own, own.dataset, ranks, num_replicas)
    for batches in wanted:  # the second pass has another order
        items = list(loader_rows.items_of(of_rows))
        for item, (x, y) in zip(items, batches, strict=True):
            assert item["total"] == [len(x)]
            kept = rows_of_worker(len(x), ranks, num_replicas)
            np.testing.assert_array_equal(item["rows"][0], x[kept.start : kept.stop])
            np.testing.assert_array_equal(item["rows"][1], y[kept.start : kept.stop])


@pytest.mark.parametrize("num_workers", [2, 4])
def test_all_workers_together_load_each_row_once(num_workers: int):
    read: list[int] = []
    for rank in range(num_workers):
        torch.manual_seed(5)
        own = loader(shuffle=True)
        rows = loader_rows.loader_of_rows(own, own.dataset, [rank], num_workers)
        assert len(list(loader_rows.items_of(rows))) == len(own)
        read += own.dataset.read
    assert sorted(read) == list(range(NUM_ROWS))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Rows, Random, ByNumpy, ByPython, Together])
def test_a_dataset_that_draws_random_numbers_is_seen(kind, num_workers):
    torch.manual_seed(5)
    before, numpy_position = torch.get_rng_state(), np.random.get_state()[2]
    given = loader(kind(), num_workers=num_workers)
    items, draws, restore = loader_rows.first_items(given, [0], 2)
    restore()
    assert draws == (kind in (Random, ByNumpy, ByPython))
    assert [int(item["total"][0]) for item in items] == [BATCH, BATCH]
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[2] == numpy_position


def collate(rows: list) -> Any:
    return torch.utils.data.default_collate(rows)


LATE = {
    "iterable": (lambda: loader(Endless()), "its dataset is iterable"),
    "own batches": (
        lambda: loader(batch_sampler=[[0, 1], [2]], batch_size=1),
        "its own `batch_sampler`",
    ),
    "no batches": (lambda: loader(batch_size=None), "its own `batch_sampler`"),
    "own order": (lambda: loader(sampler=[3, 2, 1]), "it has a list"),
    "padded": (lambda: loader(collate_fn=collate), "its `collate_fn`"),
    "a subclass": (
        lambda: type("Own", (torch.utils.data.DataLoader,), {})(Rows()),
        "is a subclass of `DataLoader`",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_what_keeps_a_loader_from_loading_own_rows_is_named(name):
    make, obstacle = LATE[name]
    assert obstacle in loader_rows.why_not_split_loader(make())


def test_a_shuffled_loader_has_no_position():
    from tfdp.training.data.determinism import nondeterminism_of

    assert nondeterminism_of(loader(), is_ordered=True) is None
    assert "is shuffled" in nondeterminism_of(loader(shuffle=True), is_ordered=True)


def fit_loaders(layout: Layout, rank: int, names: list[str]) -> dict:
    """Trains by each loader, evaluates and predicts."""
    strategy = None
    if layout.num_workers > 1:
        strategy = tfdp.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(5)
    torch.manual_seed(5)
    weights, history, sentences = {}, {}, []
    for name in names:
        with strategy.scope() if strategy else warnings.catch_warnings():
            model = common.compiled(common.mlp())
        data = FITTED[name]()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fitted = model.fit(data, epochs=2, verbose=0, shuffle=False).history
        sentences += [str(w.message) for w in caught if "workers" in str(w.message)]
        if strategy and name in LOADERS and name != "by weight":
            # Two passes, and what the spec was found by.
            most = 2 * (NUM_ROWS // 2 + 1) + BATCH
            assert 0 < len(data.dataset.read) <= most, len(data.dataset.read)
        history[name] = fitted["loss"]
        for number, value in enumerate(model.get_weights()):
            weights[f"{name} {number}"] = value
    history["evaluate"] = model.evaluate(loader(), verbose=0)
    weights["predict"] = model.predict(loader(), verbose=0)
    return {"weights": weights, "history": history, "sentences": sentences}


FITTED = {k: v for k, v in LOADERS.items() if k != "by processes"} | {
    "noise": lambda: loader(Random(), shuffle=True),
    "padded": LATE["padded"][0],
}


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(
    ("devices", "kinds"),
    [
        (1, tuple(FITTED)),
        pytest.param(2, ("shuffled", "noise", "padded"), marks=pytest.mark.full),
    ],
)
def test_two_workers_train_by_a_loader_as_one_device(tmp_path, devices, kinds):
    names = {"names": list(kinds)}
    alone = run(Layout(1, 1), fit_loaders, tmp_path, names)
    assert alone.codes == (0,), alone.output[-3000:]
    found = run(Layout(2, devices), fit_loaders, tmp_path, names)
    assert found.codes == (0, 0), found.output[-5000:]
    for name, value in alone.weights.items():
        np.testing.assert_allclose(found.weights[name], value, 1e-4, 1e-6, err_msg=name)
    for name, value in alone.history.items():
        np.testing.assert_allclose(found.history[name], value, 1e-5, err_msg=name)
    first, second = (answer["sentences"] for answer in found.answers)
    assert len(first) == 2
    assert second == []
    assert "its dataset draws random numbers" in first[0]
    assert "its `collate_fn`" in first[1]


def fit_unseeded(layout: Layout, rank: int) -> dict:
    """Trains with another seed of torch's on each worker."""
    torch.manual_seed(rank)
    strategy = tfdp.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = common.compiled(common.mlp())
    orders = []
    for data in loader(shuffle=True), loader(shuffle=True, collate_fn=collate):
        model.fit(data, verbose=0, shuffle=False)
        orders.append(data.dataset.read[2 * BATCH :])
    return {"orders": orders}


@pytest.mark.full
@pytest.mark.processes
def test_workers_of_different_seeds_shuffle_alike(tmp_path):
    found = run(Layout(2, 1), fit_unseeded, tmp_path, {})
    assert found.codes == (0, 0), found.output[-3000:]
    (first, whole), (second, again) = (answer["orders"] for answer in found.answers)
    assert whole == again
    assert not set(first[-10:]) & set(second[-10:])


def test_kerases_adapter_takes_a_loader_of_torch():
    assert keras_data.is_torch_dataloader(loader())
