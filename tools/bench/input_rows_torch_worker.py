"""One process of one core that trains by PyTorch's DDP on JPEGs that it prepares.

It does the work of `tools.bench.input_rows_worker`; pictures are decoded and changed by
Pillow, as torchvision's transforms do it.
"""

from __future__ import annotations

import math
import time
from typing import Any

from tfdp.launch.bench.channel import Variants, work
from tools.bench.meters import pin_to_core

SIZE, SKIPPED = 224, 3
# Passes over the files in one of the loader, which starts anew for each.
_PASSES = 100


class Pictures:
    """A dataset in the sense of `torch.utils.data`: labelled pictures by number.

    Args:
        paths: List of strings.
    """

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return _PASSES * len(self._paths)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        import numpy as np
        import torch
        from PIL import Image, ImageEnhance

        file = number % len(self._paths)
        drawn = torch.rand(8).tolist()
        picture = Image.open(self._paths[file]).convert("RGB")
        box = _window(picture.size, drawn[:4])
        picture = picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
        if drawn[4] < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        brightness, contrast, colour = (0.6 + 0.8 * each for each in drawn[5:])
        picture = ImageEnhance.Brightness(picture).enhance(brightness)
        picture = ImageEnhance.Contrast(picture).enhance(contrast)
        picture = ImageEnhance.Color(picture).enhance(colour)
        # As torchvision's `to_tensor`.
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div(255), file % 10


def _window(size: tuple[int, int], drawn: list[float]) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a crop of 8 to 100 % of a picture."""
    width, height = size
    area = height * width * (0.08 + 0.92 * drawn[0])
    ratio = math.exp((2 * drawn[1] - 1) * math.log(4 / 3))
    rows = min(int(math.sqrt(area / ratio)), height)
    columns = min(int(math.sqrt(area * ratio)), width)
    top, left = int(drawn[2] * (height - rows)), int(drawn[3] * (width - columns))
    return left, top, left + columns, top + rows


def make_variants(setup: dict[str, Any]) -> Variants:
    """Make a model that trains with pictures loaded by its process or by another."""
    pin_to_core(setup["rank"])
    import torch
    from torch import nn

    torch.set_num_threads(1)
    num_workers = len(setup["addresses"])
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{setup['addresses'][0]}",
        rank=setup["rank"],
        world_size=num_workers,
    )
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(3, 16, 16, stride=16), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(16, 10)),
    )
    network = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    loss_function = nn.CrossEntropyLoss()
    pictures = Pictures(setup["paths"])
    sampler = torch.utils.data.distributed.DistributedSampler(pictures, seed=1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = loss_function(network(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        loss.item()

    def block(num_loaders: int, steps: int) -> dict[str, float]:
        loader = torch.utils.data.DataLoader(
            pictures,
            setup["batch"] // num_workers,
            sampler=sampler,
            num_workers=num_loaders,
        )
        batches = iter(loader)
        for _ in range(SKIPPED):
            step(next(batches))
        begin, cpu = time.time(), time.process_time()
        for _ in range(steps):
            step(next(batches))
        # Without that of another process.
        cpu_seconds = (time.process_time() - cpu) / steps
        return {"begin": begin, "end": time.time(), "cpu_seconds": cpu_seconds}

    return {
        "no loader": lambda steps: block(0, steps),
        "a loader": lambda steps: block(1, steps),
    }


if __name__ == "__main__":
    work(make_variants)
