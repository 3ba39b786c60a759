"""Script of the benchmark `saves` for PyTorch: DDP and `dcp.async_save`."""

import json
import shutil
import sys
import time

import torch
from torch import distributed, nn
from torch.distributed import checkpoint

UNITS, LAYERS, BLOCKS = map(int, sys.argv[1:4])
STEPS = 6

torch.set_num_threads(1)
distributed.init_process_group("cpu:gloo")
# Saves call collectives on a thread of their own.
group = distributed.new_group(backend="gloo")
torch.manual_seed(0)
layers = nn.Sequential(*(nn.Linear(UNITS, UNITS) for _ in range(LAYERS)))
model = nn.parallel.DistributedDataParallel(layers, gradient_as_bucket_view=True)
optimizer = torch.optim.Adam(model.parameters())
x = torch.ones(32, UNITS)
seconds: dict[str, list[float]] = {"step": [], "step_while_saving": []}


def step() -> None:
    """Train with one batch."""
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()


def state() -> dict:
    """Return the tensors of model and optimizer."""
    return {"model": layers.state_dict(), "optimizer": optimizer.state_dict()}


def timed(name: str, action):
    """Keep the time of an action under a name; return its result."""
    begin = time.perf_counter()
    result = action()
    seconds.setdefault(name, []).append(time.perf_counter() - begin)
    return result


for _ in range(2):
    step()
for block in range(2 * BLOCKS):
    pending = None
    if block % 2:
        folder = f"saved-{block}"
        pending = timed(
            "pause",
            lambda folder=folder: checkpoint.async_save(
                state(),
                checkpoint_id=folder,
                process_group=group,
            ),
        )
    for number in range(STEPS):
        if pending is None:
            timed("step", step)
        elif number == 0 or not pending.done():
            timed("step_while_saving", step)
        else:
            step()
    if pending is not None:
        pending.result()
        distributed.barrier()
        if distributed.get_rank() == 0:
            shutil.rmtree(folder)
half = 3 * sum(p.numel() for p in layers.parameters()) // 2
source, target = torch.ones(half), torch.full((half,), 2.0)
for _ in range(BLOCKS):
    timed("copy", lambda: target.copy_(source))
if distributed.get_rank() == 0:
    print("seconds:", json.dumps(seconds), flush=True)
distributed.destroy_process_group()
