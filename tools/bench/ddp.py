"""One CPU machine, two replicas: `auto_strategy` against PyTorch's DDP with Gloo."""

from __future__ import annotations

import dataclasses

from tfdp.bench.machine import torch_version
from tfdp.bench.sides import Side, alternate, started
from tfdp.bench.stats import paired_ratio
from tools.bench.models import MODELS
from tools.bench.report import Arguments, Figure, Report


def run(args: Arguments) -> None:
    """Measure the MLP, where PyTorch is installed."""
    version = torch_version(args.torch_python)
    if version is None:
        print(
            f"Skipped: {args.torch_python} has no PyTorch. Install it in an "
            "environment of its own and name that with --torch-python."
        )
        return
    setting = {
        "benchmark": "training step, 2 replicas on one machine, SGD, 1 thread each",
        "model": str(MODELS["mlp"]),
        "batch": "32 for each replica",
        "torch": version,
    }
    report = Report(args, setting)
    setup = {"benchmark": "step", "strategy": "auto", "models": ["mlp"]}
    ours = Side("tfdp", "tools.bench.worker", {**setup, "pack_bytes": [0]})
    told = {"model": dataclasses.asdict(MODELS["mlp"]), "batch_size": 32}
    arms_of_torch = {"defaults": told, "tuned": {**told, "tuned": True}}
    theirs = Side(
        "ddp",
        "tfdp.bench.torch_worker",
        {"arms": arms_of_torch},
        num_workers=2,
        python=args.torch_python,
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
