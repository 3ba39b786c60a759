"""Script of the benchmark `start` for PyTorch: the same model and steps by DDP."""

import time

import torch
from torch import distributed, nn

torch.set_num_threads(1)
distributed.init_process_group("gloo")
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
model = nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    x = torch.randn(16, 64)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x[:, :10]).backward()
    optimizer.step()
    if step == 0:
        print(f"first step at {time.time():.3f}", flush=True)
distributed.destroy_process_group()
