"""The `direct` transport by itself: wall and CPU time of all-reduce, beside Gloo.

In the graph and without TensorFlow, by shared memory, Unix sockets and TCP, and with
several sizes of the chunks in shared memory.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp.communication.transport.shared_memory import CHUNKS_BYTES
from tfdp.launch.bench.machine import torch_version
from tfdp.launch.bench.sides import Ratio, Side, alternate, paired_ratio, started
from tools.bench.all_reduce import BUCKETS, MB, SMALL
from tools.bench.meters import Times, of_all
from tools.bench.report import Arguments, Figure, Report, ratio_to_best

LARGE, LATENCY = "100 MB", "4 KB"
SIZES = {LARGE: BUCKETS, LATENCY: SMALL}
# Small ones of which each waits for the one before, in one step of the graph: what a
# step pays for one, without the call of the step.
ROW, NUM_IN_ROW = "4 KB, in a row", 20
# Of buckets: whether each size has a transport of its own that is the faster one.
BY_SIZE = {
    name: [size // 4]
    for name, size in (("64 KB", MB // 16), ("1 MB", MB), ("8 MB", 8 * MB))
}
CHUNKS = tuple(kb << 10 for kb in (256, 512, 1024, 2048, 4096))
WIRES = ("memory", "tcp", "unix")
CPU = "cpu_seconds"

Blocks = Mapping[str, Sequence[Times]]


def run(args: Arguments) -> None:
    """Measure 100 MB in 25 MB buckets and 4 KB between two processes of one host."""
    torch = torch_version(args.torch_python)
    setting = {
        "benchmark": "all-reduce between 2 processes of one host, float32, "
        "1 thread each",
        "torch": torch or "not installed: no comparison with Gloo",
    }
    report = Report(args, setting)
    with tempfile.TemporaryDirectory() as folder:
        blocks = _measure(args, folder, with_torch=torch is not None)
    report.add_times({name: _times(blocks, name) for name in blocks})
    cpu = {f"{n}, CPU of a process": _times(blocks, n, CPU) for n in blocks}
    report.add_times(cpu)
    for figure in _figures(blocks):
        report.add(figure)
    report.finish()


def _measure(args: Arguments, folder: str, *, with_torch: bool) -> Blocks:
    sides = {name: _tensorflow(name) for name in ("direct", "ring")}
    setup = {"variants": SIZES, "folder": folder, "chunks_bytes": CHUNKS}
    module = "tools.bench.transport_worker"
    sides["bytes"] = Side("bytes", module, setup, num_workers=2)
    rivals = [(sides["direct"], ""), *((sides["bytes"], f"{w}/") for w in WIRES)]
    if with_torch:
        module, python = "tools.bench.transport_torch_worker", args.torch_python
        sides["gloo"] = Side("gloo", module, {"variants": SIZES}, 2, python=python)
        # Beside those that are compared with it.
        rivals.insert(2, (sides["gloo"], ""))
    rivals.insert(0, (sides["ring"], ""))
    chunks = [(sides["bytes"], f"memory, {size}/{LARGE}") for size in CHUNKS]
    with started(*sides.values()):
        large = [(side, f"{wire}{LARGE}") for side, wire in rivals]
        found = alternate(large, blocks=args.blocks, steps=2, slowest=of_all)
        found |= alternate(chunks, blocks=args.blocks, steps=2, slowest=of_all)
        small = [(side, f"{wire}{LATENCY}") for side, wire in rivals]
        small.append((sides["direct"], ROW))
        found |= alternate(small, blocks=args.blocks, steps=100, slowest=of_all)
        for name in BY_SIZE:
            between = [(sides["ring"], name), (sides["direct"], name)]
            found |= alternate(between, blocks=args.blocks, steps=20, slowest=of_all)
    return found


def _tensorflow(backend: str) -> Side:
    setup = {
        "strategy": "tfdp",
        "communication": {"backend": backend},
        "meters": True,
        "variants": {
            name: (lengths, 0)
            for name, lengths in (SIZES | BY_SIZE | {ROW: SMALL}).items()
        },
        "in_a_row": {ROW: NUM_IN_ROW},
    }
    return Side(backend, "tools.bench.worker", setup, num_workers=2)


def _figures(blocks: Blocks) -> list[Figure]:
    figures = _beside_gloo(blocks) if f"gloo/{LARGE}" in blocks else []
    name = "100 MB, CPU time of a process: that of the ring relative to direct"
    ratio = _ratio(blocks, f"ring/{LARGE}", f"direct/{LARGE}", CPU)
    figures.append(Figure(name, ratio, at_least=2.0))
    for size in (*BY_SIZE, *SIZES):
        name = f"{size} in the graph, speed relative to TensorFlow's own ring"
        ratio = _ratio(blocks, f"ring/{size}", f"direct/{size}")
        figures.append(Figure(name, ratio, at_least=1.0))
    return [*figures, *_chunks(blocks)]


def _beside_gloo(blocks: Blocks) -> list[Figure]:
    goals: dict[str, tuple[str, dict[str, Any]]] = {
        "direct": ("in the graph", {"at_least": 1.3, "note": "target 2"}),
        "bytes/memory": ("by shared memory", {"at_least": 1.3, "note": "target 2"}),
        "bytes/tcp": ("by TCP", {"at_least": 1.0}),
    }
    figures = []
    for size in SIZES:
        for variant, (where, goal) in goals.items():
            name = f"{size} {where}, speed relative to Gloo"
            ratio = _ratio(blocks, f"gloo/{size}", f"{variant}/{size}")
            goal = goal if size == LARGE else {"at_least": 1.0}
            figures.append(Figure(name, ratio, **goal))
    name = (
        f"4 KB in the graph, {NUM_IN_ROW} in a row in one step, speed relative to Gloo"
    )
    ratio = _ratio(blocks, f"gloo/{LATENCY}", f"direct/{ROW}").times(NUM_IN_ROW)
    figures.append(Figure(name, ratio, at_least=1.0))
    name = "100 MB in the graph, CPU time of a process: that of Gloo relative to direct"
    ratio = _ratio(blocks, f"gloo/{LARGE}", f"direct/{LARGE}", CPU)
    return [*figures, Figure(name, ratio)]


def _chunks(blocks: Blocks) -> list[Figure]:
    """The bandwidth with each size of the chunks, and how good the chosen one is."""
    times = {size: _times(blocks, _with_chunks(size)) for size in CHUNKS}
    figures = []
    for size, found in times.items():
        bandwidth = 100 * MB / 1e9 / statistics.median(found)
        name = f"100 MB by shared memory, chunks of {size >> 10} kB, GB/s"
        figures.append(Figure(name, round(bandwidth, 3)))
    rivals = [found for size, found in times.items() if size != CHUNKS_BYTES]
    ratio = ratio_to_best(rivals, times[CHUNKS_BYTES])
    name = f"chunks of {CHUNKS_BYTES >> 10} kB, speed relative to the best other size"
    return [*figures, Figure(name, ratio)]


def _with_chunks(size: int) -> str:
    return f"bytes/memory, {size}/{LARGE}"


def _times(blocks: Blocks, variant: str, what: str = "seconds") -> list[float]:
    return [block[what] for block in blocks[variant]]


def _ratio(blocks: Blocks, of: str, to: str, what: str = "seconds") -> Ratio:
    return paired_ratio(_times(blocks, of, what), _times(blocks, to, what))
