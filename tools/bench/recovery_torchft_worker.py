"""Script of the benchmark `recovery` for torchft: a replica group of one process."""

import os
from datetime import timedelta

import torch
from torch import distributed, nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from tools.bench.recovery_record import (
    NUM_STEPS,
    NUM_WORKERS,
    RATE,
    UNITS,
    Record,
    batch,
    data,
)

torch.set_num_threads(1)
rank = int(os.environ["REPLICA_GROUP_ID"])
record = Record(rank)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, UNITS), nn.Tanh(), nn.Linear(UNITS, 1))
inner = torch.optim.Adam(model.parameters(), RATE)


def load(state: dict) -> None:
    """Take the state of a group that is ahead."""
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
    min_replica_size=NUM_WORKERS - 1,
    replica_id=f"group_{rank}",
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=store.port,
    timeout=timedelta(seconds=10),
)
replica = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, inner)
x, y = map(torch.from_numpy, data())
while (step := manager.current_step()) < NUM_STEPS:
    record.before(step)
    # As `torchft.data.DistributedSampler` divides, by the largest number of groups.
    samples = batch(step)[rank::NUM_WORKERS]
    optimizer.zero_grad()
    nn.functional.mse_loss(replica(x[samples]), y[samples]).backward()
    optimizer.step()
    # A group that has just taken the state of others has added zeros.
    if manager.current_step() == step + 1 and manager.is_participating():
        record.after(step, samples)
record.end(nn.functional.mse_loss(model(x), y).item())
manager.shutdown(wait=False)
