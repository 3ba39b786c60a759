"""What each rank does in the tests of an MPI job's start; the argument says which.

Prints one line of JSON: the workers' addresses and this rank, or the error.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

TIMEOUT_SECONDS = 4.0


def own_rank() -> int:
    return int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])


def main() -> None:
    mode = sys.argv[1]
    is_absent = own_rank() == 1
    if mode == "has_no_mpi" and is_absent:
        time.sleep(60)
    if mode in ("mpi_is_theirs", "comes_not"):
        from mpi4py import MPI  # starts MPI, as a user's script may
    if mode == "comes_not" and is_absent:
        time.sleep(60)
    if mode == "funneled":
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI  # noqa: F401
    from tfdp.communication.cluster import find_cluster

    begin = time.monotonic()
    try:
        cluster = find_cluster(TIMEOUT_SECONDS)
        again = find_cluster(TIMEOUT_SECONDS)
        answer = {
            "rank": cluster.rank,
            "workers": cluster.workers,
            "is_stable": again == cluster,
            "secret": cluster.secret,
        }
    except (ValueError, TimeoutError) as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    answer["seconds"] = time.monotonic() - begin
    maps = Path("/proc/self/maps").read_text()
    answer["pid"] = os.getpid()
    answer["memory"] = re.findall(r"/dev/shm/mpich_shm_\w+", maps)
    os.write(1, f"{json.dumps(answer)}\n".encode())
    if "error" in answer:
        # MPICH's launcher may lose the last output of a rank that fails.
        time.sleep(1.0)
        raise SystemExit(3)
    if mode == "waits":
        time.sleep(60)
    if mode == "dies":
        time.sleep(1.0)
        if is_absent:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


if __name__ == "__main__":
    main()
