"""One process of DistributedDataParallel with Gloo, training the transformer."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tools.bench.channel import Arm, serve, take_over_output

# As examples/char_transformer.py, which needs Keras to be read.
VOCABULARY, CONTEXT = 128, 64
WIDTH, NUM_BLOCKS, NUM_HEADS = 512, 6, 8


def transformer() -> Any:
    """The model of `tools.bench.models`, layer by layer."""
    import torch
    from torch import nn

    class Transformer(nn.Module):
        """Embeddings, pre-norm blocks and a linear head."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.positions = nn.Embedding(CONTEXT, WIDTH)
            block = nn.TransformerEncoderLayer(
                *(WIDTH, NUM_HEADS, 4 * WIDTH, 0.0, "gelu"),
                batch_first=True,
                norm_first=True,
            )
            self.blocks = nn.TransformerEncoder(
                block, NUM_BLOCKS, nn.LayerNorm(WIDTH), enable_nested_tensor=False
            )
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, ids: Any) -> Any:  # [batch, CONTEXT], int64
            x = self.tokens(ids) + self.positions(torch.arange(CONTEXT))
            mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
            return self.head(self.blocks(x, mask=mask, is_causal=True))

    torch.manual_seed(0)
    return Transformer()


def step_arm(batch_size: int, *, bf16: bool) -> Arm:
    """Seconds per training step; the settings are those that serve DDP best."""
    import torch
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(transformer(), gradient_as_bucket_view=True)
    if bf16:
        # DDP refuses the hook itself, by its name, without a GPU. Gloo can do it.
        model.register_comm_hook(
            None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    x = torch.randint(0, VOCABULARY, (batch_size, CONTEXT))
    y = torch.randint(0, VOCABULARY, (batch_size * CONTEXT,))
    loss_function = nn.CrossEntropyLoss()

    def step() -> Any:
        optimizer.zero_grad()
        loss = loss_function(model(x).flatten(0, 1), y)
        loss.backward()
        optimizer.step()
        return loss

    def run(steps: int) -> float:
        torch.distributed.barrier()
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
    size = setup["batch_size"]
    serve({name: step_arm(size, bf16=name == "bf16") for name in ("float32", "bf16")})


if __name__ == "__main__":
    main()
