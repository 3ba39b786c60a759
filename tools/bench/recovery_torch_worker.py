"""Script of the benchmark `recovery` for torchrun: DDP, with a snapshot each step."""

import os

import torch
from torch import distributed, nn

from tools.bench.recovery_record import NUM_STEPS, RATE, UNITS, Record, batch, data

torch.set_num_threads(1)
distributed.init_process_group("gloo")
rank, size = distributed.get_rank(), distributed.get_world_size()
record = Record(rank)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, UNITS), nn.Tanh(), nn.Linear(UNITS, 1))
optimizer = torch.optim.Adam(model.parameters(), RATE)
snapshot, first = record.folder / "snapshot", 0
if snapshot.exists():
    saved = torch.load(snapshot)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
replica = nn.parallel.DistributedDataParallel(model)
x, y = map(torch.from_numpy, data())
for step in range(first, NUM_STEPS):
    record.before(step)
    samples = batch(step)[rank::size]
    optimizer.zero_grad()
    nn.functional.mse_loss(replica(x[samples]), y[samples]).backward()
    optimizer.step()
    if rank == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "step": step + 1}, f"{snapshot}.new")
        os.replace(f"{snapshot}.new", snapshot)
    record.after(step, samples)
record.end(nn.functional.mse_loss(model(x), y).item())
distributed.destroy_process_group()
