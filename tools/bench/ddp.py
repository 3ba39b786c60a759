"""One CPU machine, two replicas: `auto_strategy` against PyTorch's DDP with Gloo."""

from __future__ import annotations

import argparse
import shutil
import subprocess

from tools.bench.report import Figure, Report
from tools.bench.sides import Side, alternate, started
from tools.bench.stats import paired_ratio


def run(args: argparse.Namespace) -> None:
    """Measures the MLP, where PyTorch is installed."""
    version = torch_version(args.torch_python)
    if version is None:
        print(
            f"Skipped: {args.torch_python} has no PyTorch. Install it in an "
            "environment of its own and name that with --torch-python."
        )
        return
    setting = {
        "benchmark": "training step, 2 replicas on one machine, SGD, 1 thread each",
        "model": "MLP 784-1024-1024-10, 1.86 million parameters",
        "batch": "32 for each replica",
        "torch": version,
    }
    report = Report(args, setting)
    setup = {"benchmark": "step", "strategy": "auto", "models": ["mlp"]}
    ours = Side("tfdp", "tools.bench.worker", {**setup, "pack_bytes": [0]})
    theirs = Side(
        "ddp", "tools.bench.torch_worker", {}, num_workers=2, python=args.torch_python
    )
    with started(ours, theirs):
        arms = [(ours, "mlp"), (theirs, "defaults"), (theirs, "tuned")]
        times = alternate(arms, blocks=args.blocks, steps=20)
    report.add_times(times)
    name = "throughput relative to DistributedDataParallel with "
    for arm in ("defaults", "tuned"):
        ratio = paired_ratio(times[f"ddp/{arm}"], times["tfdp/mlp"])
        note = "" if arm == "defaults" else "gradient_as_bucket_view, foreach SGD"
        report.add(Figure(f"{name}{arm}", ratio, at_least=1.3, note=note))
    report.finish()


def torch_version(python: str) -> str | None:
    """The PyTorch of an interpreter, or `None`."""
    if shutil.which(python) is None:
        return None
    command = [python, "-c", "import torch; print(torch.__version__)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
