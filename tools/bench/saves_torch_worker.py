"""Script of the benchmark `saves` for PyTorch: DDP and `dcp.async_save`."""

import json
import shutil
import sys
import time

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

STEPS = 6  # in each block
FOLDER = "saved"

seconds: dict[str, list[float]] = {"step": [], "step_while_saving": []}


def timed(name: str, action):
    """Keep the time of an action under a name; return its result."""
    begin = time.perf_counter()
    result = action()
    seconds.setdefault(name, []).append(time.perf_counter() - begin)
    return result


class Trainer:
    """DDP of dense layers with Adam, whose state DCP saves.

    Args:
        units: Int, width of the layers.
        num_layers: Int.
        kind: String, what writes: `"thread"` or `"process"`.
    """

    def __init__(self, units: int, num_layers: int, kind: str) -> None:
        layers = nn.Sequential(*(nn.Linear(units, units) for _ in range(num_layers)))
        self.layers, self._kind = layers, AsyncCheckpointerType(kind)
        self._model = nn.parallel.DistributedDataParallel(
            layers, gradient_as_bucket_view=True
        )
        self._optimizer = torch.optim.Adam(self._model.parameters())
        # Saves by a thread call collectives on it.
        is_thread = self._kind == AsyncCheckpointerType.THREAD
        self._group = distributed.new_group(backend="gloo") if is_thread else None
        self._x = torch.ones(32, units)

    def step(self) -> None:
        """Train with one batch."""
        self._optimizer.zero_grad()
        nn.functional.mse_loss(self._model(self._x), self._x).backward()
        self._optimizer.step()

    def save(self):
        """Begin a save; return its future."""
        model, optimizer = self.layers.state_dict(), self._optimizer.state_dict()
        return checkpoint.async_save(
            {"model": model, "optimizer": optimizer},
            checkpoint_id=FOLDER,
            process_group=self._group,
            async_checkpointer_type=self._kind,
        )


def train_and_save(trainer: Trainer) -> None:
    """Take the time of steps without a save under way, and with one."""
    for _ in range(STEPS):
        timed("step", trainer.step)
    pending = timed("pause", trainer.save)
    for number in range(STEPS):
        if number == 0 or not pending.done():
            timed("step_while_saving", trainer.step)
        else:
            trainer.step()
    end(pending)


def end(pending) -> None:
    """Wait for the end of a save, and delete its files."""
    pending.result()
    distributed.barrier()
    if distributed.get_rank() == 0:
        shutil.rmtree(FOLDER)
    distributed.barrier()


def main() -> None:
    """Measure, and print the times of worker 0."""
    units, num_layers, blocks = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    distributed.init_process_group("cpu:gloo")
    torch.manual_seed(0)
    trainer = Trainer(units, num_layers, sys.argv[4])
    for _ in range(2):
        trainer.step()
    end(trainer.save())  # starts the process
    for _ in range(blocks):
        train_and_save(trainer)
    half = 3 * sum(p.numel() for p in trainer.layers.parameters()) // 2
    source, target = torch.ones(half), torch.full((half,), 2.0)
    for _ in range(blocks):
        distributed.barrier()  # as in a save, the workers of a host copy together
        timed("copy", lambda: target.copy_(source))
    if distributed.get_rank() == 0:
        print("seconds:", json.dumps(seconds), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":  # saves by a process import this script again
    main()
