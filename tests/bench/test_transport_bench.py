"""`python -m tools.bench transport`: its sides and its figures."""

from __future__ import annotations

import json
import sys

import pytest

from tests.harness.commands import run_python
from tfdp.launch.bench.sides import Side, started
from tools.bench import transport
from tools.bench.meters import metered, of_all

DEADLINE_SECONDS = 300


def test_cpu_time_is_of_the_steps_that_are_timed():
    spent = []

    def step() -> int:
        spent.append(sum(range(100_000)))
        return len(spent)

    ends = []
    found = metered(step, ends.append)(3)
    assert ends == [1, 4]
    assert 0 < found["cpu_seconds"] < 2 * found["seconds"]
    both = of_all(
        [{"seconds": 1.0, "cpu_seconds": 1.0}, {"seconds": 3.0, "cpu_seconds": 2.0}]
    )
    assert both == {"seconds": 3.0, "cpu_seconds": 1.5}


def test_figures_are_of_the_variants_that_they_name():
    seconds = {"gloo": 2.0, "direct": 1.0, "ring": 8.0, "bytes/memory": 0.5}
    seconds |= {"bytes/tcp": 4.0, "bytes/unix": 4.0}
    sizes = (*transport.SIZES, *transport.BY_SIZE)
    variants = {f"{n}/{size}": s for n, s in seconds.items() for size in sizes}
    variants["direct/4 KB, in a row"] = 10.0
    variants |= {
        transport._with_chunks(size): size / 2**21 for size in transport.CHUNKS
    }
    blocks = {
        n: [{"seconds": s, "cpu_seconds": s / 2}] * 4 for n, s in variants.items()
    }
    found = {figure.name: figure for figure in transport._figures(blocks)}

    def of(start: str) -> tuple[float, bool | None]:
        (figure,) = (each for name, each in found.items() if name.startswith(start))
        value = figure.value
        return getattr(value, "median", value), figure.met

    assert of("100 MB in the graph, speed relative to Gloo") == (2.0, True)
    assert of("100 MB by shared memory, speed") == (4.0, True)
    assert of("100 MB by TCP") == (0.5, False)
    assert of("4 KB in the graph, speed relative to Gloo") == (2.0, True)
    assert of("4 KB in the graph, 20 in a row") == (4.0, True)
    assert of("4 KB by TCP") == (0.5, False)
    assert of("100 MB, CPU time of a process: that of the ring") == (8.0, True)
    assert of("1 MB in the graph, speed relative to TensorFlow") == (8.0, True)
    assert of("100 MB by shared memory, chunks of 4096 kB") == (0.052, None)
    assert of("chunks of 2048 kB, speed") == (0.125, None)
    without = {n: found for n, found in blocks.items() if not n.startswith("gloo")}
    assert not any("Gloo" in figure.name for figure in transport._figures(without))


@pytest.mark.full
@pytest.mark.processes
def test_communicators_of_all_wires_are_timed_without_tensorflow(tmp_path):
    setup = {
        "variants": {"small": [1000], "large": [100_000] * 2},
        "folder": str(tmp_path),
        "chunks_bytes": [1 << 16],
    }
    side = Side("bytes", "tools.bench.transport_worker", setup, num_workers=2)
    with started(side):
        for wire in ("unix", "tcp", "memory", "memory, 65536"):
            for size in ("small", "large"):
                for found in side.run(f"{wire}/{size}", 2):
                    assert found["seconds"] > 0
                    assert found["cpu_seconds"] > 0


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.slow
def test_without_pytorch_the_comparison_with_gloo_is_left_out(tmp_path):
    file = tmp_path / "found.json"
    done = run_python(
        *("-m", "tools.bench", "transport", "--blocks", "2", "--out", str(file)),
        *("--torch-python", f"{sys.executable}-that-is-not-there"),
        deadline_seconds=DEADLINE_SECONDS,
    )
    assert done.code == 0, done.output
    assert "torch: not installed: no comparison with Gloo" in done.output
    content = json.loads(file.read_text("utf-8"))
    times = content["seconds_per_step"]
    for variant in ("ring", "direct", "bytes/memory", "bytes/tcp", "bytes/unix"):
        for size in ("100 MB", "4 KB"):
            assert len(times[f"{variant}/{size}"]) == 2
            assert len(times[f"{variant}/{size}, CPU of a process"]) == 2
    assert all("Gloo" not in figure["name"] for figure in content["figures"])
