"""Gradients of published models between two hosts in jobs of MPI, over MPI itself."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click

from tools.bench.hosts_bed import NUM_HOSTS, TwoHosts
from tools.bench.hosts_sides import RATE_OF_START
from tools.bench.report import Arguments

# Each rank enters the network of the host that it is for: with consecutive ranks on
# a host, as the launchers place them.
_ENTER = 'if [ "$PMI_RANK" -lt {} ]; then exec {} "$@"; else exec {} "$@"; fi'
# The hosts share a kernel, and UCX finds out: only OFI does without its memory.
OVER_THE_LINK = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi"}
_ON_CPUS = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
_BACKENDS = ("direct", "mpi")


def entered(bed: TwoHosts, workers_per_host: int) -> list[str]:
    """Return what to put before a command, so that each rank of MPICH is on its host.

    Args:
        bed: `TwoHosts`, entered.
        workers_per_host: Int, ranks on each host.
    """
    hosts = (shlex.join(bed.enter(host)) for host in range(NUM_HOSTS))
    return ["sh", "-c", _ENTER.format(workers_per_host, *hosts), "sh"]


def run(args: Arguments) -> None:
    """Start `models` as a job of MPICH for each rate and number of workers.

    Raises:
        click.UsageError: If MPI has no launcher here.
        subprocess.CalledProcessError: If a job fails.
    """
    for workers_per_host in args.workers_per_host:
        for rate in args.rates:
            with TwoHosts(RATE_OF_START) as bed:
                bed.set_rate(rate)
                _run_job(bed, args, workers_per_host)


def _run_job(bed: TwoHosts, args: Arguments, workers_per_host: int) -> None:
    levels = ("hierarchical",) if workers_per_host > 1 else ()
    job = [
        *(launcher(), "-n", str(NUM_HOSTS * workers_per_host)),
        *entered(bed, workers_per_host),
        *(sys.executable, "-m", "tools.bench", "models"),
        *("--models", *args.models, "--backends", *_BACKENDS),
        *("--algorithms", "ring", *levels, "--blocks", str(args.blocks)),
        *("--node-size", str(workers_per_host), "--link-rate", bed.rate),
        "--no-plot",
    ]
    if args.out:
        name = f"{args.out.stem}-{NUM_HOSTS}x{workers_per_host}-{bed.rate}"
        job += ["--json", str(args.out.with_name(name + args.out.suffix))]
    print(f"\n{NUM_HOSTS} x {workers_per_host}, {bed.rate}", flush=True)
    subprocess.run(job, env={**os.environ, **OVER_THE_LINK, **_ON_CPUS}, check=True)


def launcher() -> str:
    """Path of `mpiexec`: that of the wheel, beside this Python, comes first.

    Raises:
        click.UsageError: If there is none.
    """
    beside = Path(sys.executable).parent
    found = shutil.which("mpiexec", path=f"{beside}:{os.environ['PATH']}")
    if found is None:
        raise click.UsageError("This benchmark needs the wheels mpi4py and mpich")
    return found
