"""Workers of a Slurm step of several tasks, started by `srun`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from tfdp.communication.cluster.gpus import gpu_environment, visible_gpus
from tfdp.ground.text import pluralize

# Slurm assigns hosts but no ports, so tfdp chooses them from this range. It is below
# the one from which Linux takes the source ports of outgoing connections (32768 and
# up).
_FIRST_PORT = 10000
_NUM_PORTS = 20000


def read(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Read the addresses of a Slurm step's tasks, and this task's rank.

    Args:
        environ: Mapping of environment variables.

    Returns:
        A dict of the arguments of `Cluster`; or `None` outside of a step, or in a
        step of a single task.

    Raises:
        ValueError: If the environment variables contradict each other.
    """
    # Only srun sets the node list of a step: a batch script that starts Python without
    # srun also has SLURM_NTASKS and SLURM_PROCID, but is a single process.
    if "SLURM_STEP_NODELIST" not in environ or "SLURM_PROCID" not in environ:
        return None
    name = "SLURM_STEP_NUM_TASKS"
    name = name if name in environ else "SLURM_NTASKS"
    num_tasks = _read_int(environ, name, default=1)
    if num_tasks <= 1:
        return None
    hosts = expand_nodelist(environ["SLURM_STEP_NODELIST"])
    counts = _tasks_per_node(environ, len(hosts), num_tasks)
    base = _base_port(environ, max(counts))
    # Ranks count node by node. With `--distribution=cyclic` this is not the order of
    # SLURM_PROCID, but every task computes the same order for any distribution.
    workers = [
        f"{host}:{base + local_id}"
        for host, count in zip(hosts, counts, strict=True)
        for local_id in range(count)
    ]
    return {"workers": workers, "task_index": _rank(environ, counts)}


def gpus_of_task(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that gives a task its part of the GPUs of its node.

    With `--gres=gpu:4` or `--gpus-per-node=4` every task of a node sees all four GPUs,
    and NCCL refuses two workers on one GPU.

    Args:
        environ: Mapping of environment variables.

    Returns:
        Dict of environment variables; empty unless this task sees all GPUs of its node,
        and shares the node with other tasks of the step.

    Example:

    >>> environ = {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    >>> environ |= {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "0"}
    >>> environ |= {"SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "4"}
    >>> environ |= {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    >>> gpus_of_task(environ)
    {'CUDA_VISIBLE_DEVICES': '2,3'}
    """
    gpus = visible_gpus(environ)
    is_task = read(environ) is not None and "SLURM_LOCALID" in environ
    if not is_task or environ.get("SLURM_GPUS_ON_NODE") != str(len(gpus)):
        return {}
    counts = expand_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    count = counts[_read_int(environ, "SLURM_NODEID", default=0)]
    return gpu_environment(_read_int(environ, "SLURM_LOCALID", default=0), count, gpus)


def _rank(environ: Mapping[str, str], counts: list[int]) -> int:
    """Return this task's rank, counted node by node.

    Args:
        environ: Mapping of environment variables.
        counts: List of ints, the number of tasks on each node.
    """
    if "SLURM_NODEID" not in environ or "SLURM_LOCALID" not in environ:
        return _read_int(environ, "SLURM_PROCID", default=0)
    node = _read_int(environ, "SLURM_NODEID", default=0)
    local_id = _read_int(environ, "SLURM_LOCALID", default=0)
    if node >= len(counts) or local_id >= counts[node]:
        raise ValueError(
            "SLURM_NODEID and SLURM_LOCALID name a task that is not in "
            "SLURM_STEP_TASKS_PER_NODE; set TF_CONFIG instead. Received: "
            f"SLURM_NODEID={node}, SLURM_LOCALID={local_id}, tasks per node {counts}"
        )
    return sum(counts[:node]) + local_id


def _tasks_per_node(
    environ: Mapping[str, str], num_nodes: int, num_tasks: int
) -> list[int]:
    """Return the number of tasks on each node of the step.

    Args:
        environ: Mapping of environment variables.
        num_nodes: Int, number of nodes of the step.
        num_tasks: Int, number of tasks of the step.
    """
    name = "SLURM_STEP_TASKS_PER_NODE"
    if name not in environ and num_nodes == 1:
        return [num_tasks]
    counts = expand_tasks_per_node(environ.get(name, ""))
    if len(counts) != num_nodes or sum(counts) != num_tasks:
        raise ValueError(
            "The Slurm variables are inconsistent: SLURM_STEP_TASKS_PER_NODE "
            f"must list {pluralize(num_tasks, 'task')} on "
            f"{pluralize(num_nodes, 'node')}; set TF_CONFIG instead. "
            f"Received: {environ.get(name)!r}"
        )
    return counts


def _base_port(environ: Mapping[str, str], tasks_per_node: int) -> int:
    """Return the first of a step's consecutive ports, from the ids of job and step.

    Args:
        environ: Mapping of environment variables.
        tasks_per_node: Int, number of these ports: the most tasks of a node.
    """
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or "0"
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or "0"
    if not (job.isdecimal() and step.isdecimal()):
        raise ValueError(
            "The ids of the Slurm job and step must be numbers; set TF_CONFIG "
            f"instead. Received: SLURM_JOB_ID={job!r}, SLURM_STEP_ID={step!r}"
        )
    # Jobs with consecutive ids may share a node, so they get different blocks of ports.
    # The factor leaves room for the blocks of a job's steps.
    num_blocks = max(1, _NUM_PORTS // tasks_per_node)
    block = (37 * int(job) + int(step)) % num_blocks
    return _FIRST_PORT + block * tasks_per_node


def _read_int(environ: Mapping[str, str], name: str, default: int) -> int:
    """Parse the environment variable `name`; return `default` if it is not set.

    Raise `ValueError` unless its value is an int of at least 0.
    """
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(
            f"{name} must be a number; start the tasks with srun, or set TF_CONFIG. "
            f"Received: {text!r}"
        )
    return int(text)


def expand_nodelist(text: str) -> list[str]:
    """Expand Slurm's compressed list of hosts.

    Args:
        text: String such as `"n[01-03,7],m1"`.

    Returns:
        List of strings, the hosts, in Slurm's order.

    Raises:
        ValueError: If the text is not such a list.

    Example:
    >>> expand_nodelist("n[01-03,7],m1")
    ['n01', 'n02', 'n03', 'n7', 'm1']

    Source: https://slurm.schedmd.com/scontrol.html (`show hostnames`)
    """
    # No library fits: ranks follow Slurm's order, in which a host may be repeated, but
    # ClusterShell's NodeSet sorts hosts and drops repeats, and python-hostlist is under
    # the GPL.
    hosts: list[str] = []
    # A comma inside brackets, as in `n[1,3]`, does not separate hosts.
    for item in re.split(r",(?![^\[]*\])", text):
        if not re.fullmatch(r"(?:[^\[\],\s]+|\[[0-9,-]+\])+", item):
            raise ValueError(_not_a_list("SLURM_STEP_NODELIST", text))
        choices = [
            _expand_range(part[1:-1], text) if part.startswith("[") else [part]
            for part in re.findall(r"\[[^\]]*\]|[^\[]+", item)
        ]
        hosts.extend("".join(parts) for parts in itertools.product(*choices))
    return hosts


def _expand_range(ranges: str, text: str) -> list[str]:
    """Expand `"01-03,7"` into `["01", "02", "03", "7"]`.

    Args:
        ranges: String, numbers and ranges with commas between them.
        text: String, the whole list of hosts, for the error message.
    """
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise ValueError(_not_a_list("SLURM_STEP_NODELIST", text))
        numbers += [
            str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)
        ]
    return numbers


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's compressed list of the number of tasks on each node.

    Args:
        text: String such as `"2(x3),1"`.

    Returns:
        List of int, one for each node.

    Raises:
        ValueError: If the text is not such a list.

    Example:
    >>> expand_tasks_per_node("2(x3),1")
    [2, 2, 2, 1]

    Source: https://slurm.schedmd.com/srun.html (`SLURM_TASKS_PER_NODE`)
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)(?:\(x([1-9]\d*)\))?", part.strip())
        if match is None:
            raise ValueError(_not_a_list("SLURM_STEP_TASKS_PER_NODE", text))
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _not_a_list(name: str, text: str) -> str:
    """Format the error of a variable that is not a list in Slurm's format.

    Args:
        name: String, name of the variable.
        text: String, its value.
    """
    return (
        f"{name} is not a list in Slurm's form; start the tasks with srun, or set "
        f"TF_CONFIG instead. Received: {text!r}"
    )
