"""`python -m tools.bench train`: its figures and its picture, and what is refused."""

from __future__ import annotations

import pytest

from tfdp.launch.bench.sides import Ratio
from tfdp.launch.cli.main import run_command
from tools.bench.__main__ import bench
from tools.bench.report import batch_of, efficiency, ratio_to_best, speedup
from tools.bench.train import Row, plot


def test_efficiency_is_that_of_the_literature():
    alone, together = [8.0, 8.0, 8.0], [10.0, 10.0, 10.0]
    weak = efficiency("weak", alone, together, 4)
    assert weak.median == 0.8
    assert speedup(weak, 4).median == 3.2
    strong = efficiency("strong", alone, [2.5, 2.5, 2.5], 4)
    assert strong.median == 0.8
    assert speedup(strong, 4).median == pytest.approx(8.0 / 2.5)
    with pytest.raises(ValueError, match="Received: 'super'"):
        efficiency("super", alone, together, 2)


def test_strong_scaling_shares_one_global_batch_and_weak_scaling_does_not():
    counts = (1, 2, 4)
    assert [n * batch_of("strong", 8, n, 4) for n in counts] == [32, 32, 32]
    assert [batch_of("weak", 8, n, 4) for n in counts] == [8, 8, 8]
    with pytest.raises(ValueError, match="32 samples on 3 replicas"):
        batch_of("strong", 8, 3, 4)


def test_the_best_rival_is_chosen_in_other_blocks_than_it_is_compared_in():
    lucky, steady = [1.0, 9.0, 1.0, 9.0], [2.0, 2.0, 2.0, 2.0]
    # Chosen for its odd blocks, measured in its even ones: luck does not help.
    assert ratio_to_best([lucky, steady], [1.0] * 4).median == 9.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--replicas 1", "above 1. Received: 1"),
        ("--replicas 0", "at least 1. Received: 0"),
        ("--replicas 2 3 --batch 1", "3 samples on 2 replicas"),
        ("--scaling fast", "'fast' is not one of"),
    ],
)
def test_what_cannot_be_run_is_answered_by_one_sentence(
    capsys, tmp_path, monkeypatch, arguments, said
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        run_command(bench, "tools.bench", ["train", *arguments.split()])
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("tools.bench: error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_scaling_is_drawn_from_its_table(tmp_path):
    ratio = Ratio(0.5, 0.4, 0.6, 9)
    rows = [
        Row("1M", scaling, count, 8, 0.1, 80.0, ratio, ratio)
        for scaling in ("weak", "strong")
        for count in (1, 2)
    ]
    plot("mlp", rows, "caption", tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
