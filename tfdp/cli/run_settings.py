"""Settings of `tfdp run` for the workers of one machine."""

from __future__ import annotations

import dataclasses
import sys


class AutoCount(int):
    """A number of workers that follows from the GPUs or cores of this machine."""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """What the command line says of the workers of this machine."""

    num_workers: int
    devices_per_worker: int | None
    log_dir: str | None
    timeout: float | None
    grace: float
    max_restarts: int
    rebalance: bool
    log_format: str
    forks: bool
    is_module: bool
    script: str
    args: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """List of strings, what every worker runs."""
        module = ["-m"] if self.is_module else []
        return [sys.executable, *module, self.script, *self.args]
