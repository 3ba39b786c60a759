"""A worker of `tfdp doctor --input`: the user's script, with its `fit` measured."""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Run a script as `python script.py` does.

    Args:
        arguments: List of strings: folder of the results, number of steps, script and
            its own arguments.
    """
    from tfdp.callbacks.input_probe import EnoughSteps, InputProbe, measure_fits
    from tfdp.communication.cluster import Cluster

    folder, num_steps, script, *own = arguments
    cluster = Cluster.from_environment()
    rank = 0 if cluster is None else cluster.rank
    measure_fits(InputProbe(result_path(Path(folder), rank), int(num_steps)))
    sys.argv = [script, *own]
    if os.path.isfile(script):  # of a folder or an archive `runpy` adds the path
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    # Python must not end while data is read ahead by threads that may call Python: the
    # frames of the exception hold the data.
    with contextlib.suppress(EnoughSteps):
        runpy.run_path(script, run_name="__main__")
    gc.collect()


def result_path(folder: Path, rank: int) -> Path:
    """Path of the file that a worker writes.

    Args:
        folder: `Path`.
        rank: Int, the worker's.
    """
    return folder / f"worker-{rank}.json"


if __name__ == "__main__":
    main(sys.argv[1:])
