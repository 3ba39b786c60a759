"""One process of PyTorch DistributedDataParallel with Gloo; needs no TensorFlow."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tools.bench.channel import Arm, serve, take_over_output

BATCH_SIZE = 32


def step_arm(*, tuned: bool) -> Arm:
    """Seconds per training step of the MLP."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()),
        nn.Linear(1024, 10),
    )
    model = DistributedDataParallel(module, gradient_as_bucket_view=tuned)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=tuned)
    x = torch.randn(BATCH_SIZE, 784)
    y = torch.randint(0, 10, (BATCH_SIZE,))
    loss_function = nn.CrossEntropyLoss()

    def step() -> Any:
        optimizer.zero_grad()
        loss = loss_function(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def run(steps: int) -> float:
        step().item()  # not timed: see `worker.timed`
        begin = time.perf_counter()
        for _ in range(steps):
            loss = step()
        loss.item()
        return (time.perf_counter() - begin) / steps

    return run


def main() -> None:
    take_over_output()
    setup = json.loads(sys.argv[1])
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{setup['addresses'][0]}",
        rank=setup["rank"],
        world_size=len(setup["addresses"]),
    )
    serve({"defaults": step_arm(tuned=False), "tuned": step_arm(tuned=True)})


if __name__ == "__main__":
    main()
