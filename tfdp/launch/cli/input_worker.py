"""Worker of `tfdp doctor --input`: runs the user's script, and measures its `fit`."""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Run a script as `python script.py` does, and measure how its `fit` gets data.

    The results are written to the file at `result_path`.

    Args:
        arguments: List of strings: folder of the results, number of steps, path of the
            script and arguments of the script.
    """
    from tfdp.callbacks.input_probe import EnoughSteps, InputProbe, measure_fits
    from tfdp.communication.cluster import Cluster

    folder, num_steps, script, *script_arguments = arguments
    cluster = Cluster.from_environment()
    rank = 0 if cluster is None else cluster.rank
    measure_fits(InputProbe(result_path(Path(folder), rank), int(num_steps)))
    sys.argv = [script, *script_arguments]
    # A script may import modules from its own folder. `runpy` does not add that folder
    # to `sys.path`; it adds only a folder or an archive that it runs.
    if os.path.isfile(script):
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    # Python must not exit while TensorFlow's threads that prefetch data may still call
    # it. They end once the dataset is freed. The frames of `EnoughSteps` refer to the
    # dataset, so this exception is dropped, and garbage is collected.
    with contextlib.suppress(EnoughSteps):
        runpy.run_path(script, run_name="__main__")
    gc.collect()


def result_path(folder: Path, rank: int) -> Path:
    """Return the path of a worker's results.

    Args:
        folder: Path of the folder of all results.
        rank: Int, rank of the worker.
    """
    return folder / f"worker-{rank}.json"


if __name__ == "__main__":
    main(sys.argv[1:])
