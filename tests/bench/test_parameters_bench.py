"""The figures of sharded parameters: what is compared, and the memory that is seen."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest

from tfdp.launch.bench.models import Model
from tfdp.launch.bench.sides import Side, started
from tools.bench import parameters, parameters_memory, parameters_worker
from tools.bench.meters import peak_of, resident_bytes
from tools.bench.models import EMPTY, LARGE

MB = 10**6


def test_the_model_has_200_megabytes_and_the_base_none_of_them():
    assert 4 * LARGE.num_parameters == pytest.approx(200 * MB, rel=0.01)
    assert LARGE.num_blocks == EMPTY.num_blocks
    assert 4 * EMPTY.num_parameters < 0.5 * MB


def test_a_peak_is_seen_after_it_is_over():
    def step() -> None:
        np.ones(100 * MB, np.uint8)

    before = resident_bytes()
    assert peak_of(lambda: None)(1) < before + 20 * MB
    assert 80 * MB < peak_of(step)(1) - before < 150 * MB


def test_the_bound_of_memory_is_that_of_the_shards_and_five_units():
    table = parameters_memory._Table(None, "adam", 4, activations=7 * MB)
    state = 3 * 4 * LARGE.num_parameters
    assert table._bound(10 * MB) == pytest.approx(state / 4 + 57 * MB)


def test_each_stage_is_compared_with_the_others_of_the_same_blocks():
    variants = [*(f"tfdp/{variant}" for variant in parameters.VARIANTS)]
    variants += [f"torch/{variant}" for variant in parameters.TORCH_VARIANTS]
    blocks = {
        variant: [{"seconds": 1.0 + number, "cpu_seconds": 1.0}] * 3
        for number, variant in enumerate(variants)
    }
    figures = []
    report = types.SimpleNamespace(add=figures.append)
    parameters._add_ratios(report, "here", blocks)
    parameters._add_rivals(report, "here", blocks)
    found = {figure.name: figure for figure in figures}
    goals = [figure.at_most for figure in figures if figure.at_most is not None]
    assert goals == [1.35, 1.3]
    assert found["here: step time of stage 3 relative to stage 2"].value.median == 1.5
    name = "here: step time of FSDP2 relative to DDP"
    assert found[name].value.median == pytest.approx(7 / 6)
    assert found[f"{name}, CPU time"].value.median == 1


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.slow
def test_a_worker_tells_its_peaks_and_the_bytes_that_it_sends():
    model = Model("transformer", 64, num_blocks=1)
    setup = {
        "strategy": "tfdp",
        "model": dataclasses.asdict(model),
        "optimizer": "sgd",
        "batch_size": 1,
    }
    module = "tools.bench.parameters_worker"
    options = parameters_memory.VARIANTS["stage 3, deferred"]
    told = {**setup, "benchmark": "memory", "options": options}
    side = Side("memory", module, told, 2)
    with started(side):
        assert max(side.run("step", 2)) >= max(side.run("resident", 1)) * 0.9
        assert 0 < max(side.run("largest unit", 1)) <= 4 * model.num_parameters
    told = {**setup, "benchmark": "time", "variants": parameters.VARIANTS}
    side = Side("time", module, told, 2)
    with started(side):
        for variant in "stage 0", "stage 3, kept":
            for times in side.run(variant, 1):
                assert times["seconds"] > 0
            sent = side.run(f"{variant}/bytes", 1)[0]
            # Rows of sparse gradients are not counted: a step knows their number.
            assert sent == pytest.approx(4 * model.num_parameters, rel=0.2)
    assert set(parameters_worker.OPTIMIZERS) == set(parameters_memory.SLOTS)
