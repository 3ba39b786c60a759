"""Cost of an input pipeline on several workers, each of which decodes its own rows."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tfdp.launch.bench.machine import torch_version
from tfdp.launch.bench.sides import Ratio, Side, alternate, paired_ratio, started
from tools.bench.input_rows_worker import NUM_COUNTED
from tools.bench.pictures import HEIGHT, WIDTH, write_pictures
from tools.bench.report import Arguments, Figure, Report, ratio_to_best

# Steps of a block that are timed.
STEPS = 6
GLOBAL_BATCH = 128
WORKERS = (1, 2, 4)
_NUM_PICTURES = 128
_LOADERS = ("no loader", "a loader")

Blocks = dict[str, list[dict[str, float]]]


def run(args: Arguments) -> None:
    """Measure Keras `fit` bound by its input, on 1, 2 and 4 workers of one core."""
    torch = torch_version(args.torch_python)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_pictures(Path(folder), _NUM_PICTURES)
        mean_kb = sum(Path(path).stat().st_size for path in paths) / len(paths) / 1e3
        setting = {
            "benchmark": "Keras fit of a small model, workers of one core; JPEGs of "
            f"{WIDTH} x {HEIGHT} pixels and {mean_kb:.0f} KB are read, decoded, "
            "cropped and resized to 224 x 224, flipped, and changed in brightness, "
            f"contrast and colour; {STEPS} steps a block",
            "batch": f"{GLOBAL_BATCH} for all workers",
            "torch": torch or "not installed: no comparison with DDP",
        }
        report = Report(args, setting)
        found, calls = _measure(args, paths, with_torch=torch is not None)
    for name, blocks in found.items():
        report.add_times({name: [block["seconds"] for block in blocks]})
    for figure in [*calls, *_figures(found)]:
        report.add(figure)
    report.finish()


def _measure(
    args: Arguments, paths: list[str], *, with_torch: bool
) -> tuple[Blocks, list[Figure]]:
    setup = {"paths": paths, "batch": GLOBAL_BATCH}
    module = "tools.bench.input_rows_worker"
    sides = [Side(f"{count}", module, setup, num_workers=count) for count in WORKERS]
    one, two, four = sides
    # Of one worker early and late are the same.
    variants = [(one, "late"), (two, "early"), (two, "late"), (four, "early")]
    if with_torch:
        module, python = "tools.bench.input_rows_torch_worker", args.torch_python
        ddp = Side("ddp", module, setup, num_workers=2, python=python)
        # Beside that which it is compared with.
        variants[1:1] = [(ddp, variant) for variant in _LOADERS]
        sides.append(ddp)
    with started(*sides):
        calls = [
            _calls(side, count) for side, count in zip(sides, WORKERS, strict=False)
        ]
        found = alternate(
            variants, blocks=args.blocks, steps=STEPS, warm_up=0, slowest=_of_all
        )
    return found, calls[1:]


def _calls(side: Side, num_workers: int) -> Figure:
    calls = sum(side.run("calls", 1)) / NUM_COUNTED
    name = f"{num_workers} workers: calls of `map` on all of them for an element"
    return Figure(name, calls, at_most=1.02)


def _figures(found: Blocks) -> list[Figure]:
    one = found["1/late"]
    figures = []
    for side, at_most in (("2/early", 1.1), ("4/early", 1.1), ("2/late", None)):
        ratio = _ratio("cpu_seconds", found[side], one)
        count, variant = side.split("/")
        name = f"{count} workers, rows taken {variant}: CPU time of a sample"
        figures.append(Figure(f"{name} relative to one", ratio, at_most=at_most))
    own = found["2/early"]
    speed = _ratio("seconds", one, own)
    name = "2 workers: samples per second relative to one"
    figures.append(Figure(name, speed, at_least=1.8))
    # What other programs take of the machine is not in it, nor is waiting.
    bound = _ratio("busiest_seconds", one, own)
    name = "2 workers: the same by the CPU time of the busiest worker"
    figures.append(Figure(name, bound, note="an upper bound of the one above"))
    if "ddp/no loader" not in found:
        return figures
    rivals = [
        [block["seconds"] for block in found[f"ddp/{variant}"]] for variant in _LOADERS
    ]
    name = "2 workers: samples per second relative to DistributedDataParallel"
    speed = ratio_to_best(rivals, [block["seconds"] for block in own])
    note = "the faster of no loader process and one for each"
    figures.append(Figure(name, speed, at_least=1.0, note=note))
    name = "2 workers: CPU time of a sample relative to DistributedDataParallel"
    ratio = _ratio("cpu_seconds", own, found["ddp/no loader"])
    return [*figures, Figure(name, ratio, note="no loader process")]


def _of_all(workers: Sequence[dict[str, float]]) -> dict[str, float]:
    """The time of the slowest worker, and what all and the busiest took of a core."""
    begin = max(found["begin"] for found in workers)
    end = max(found["end"] for found in workers)
    return {
        # All have begun, and none is still reading ahead.
        "seconds": (end - begin) / STEPS,
        "cpu_seconds": sum(found["cpu_seconds"] for found in workers),
        "busiest_seconds": max(found["cpu_seconds"] for found in workers),
    }


def _ratio(what: str, of: Sequence[dict], to: Sequence[dict]) -> Ratio:
    return paired_ratio([block[what] for block in of], [block[what] for block in to])
