"""Measurement of the latency and bandwidth of this cluster's links."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.collectives import ProcessGroup
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground.links import DEFAULT_LINKS, Links
from tfdp.ground.plans.traffic import FLAT, Algorithm
from tfdp.training.reduction.algorithm_selector import (
    AlgorithmChoice,
    AlgorithmSelector,
)
from tfdp.training.reduction.cache_file import load_links, store_links
from tfdp.training.reduction.link_fit import Sample, fit_links

# Steps from which on a measurement of a second or two is repaid.
LONG_RUN_STEPS = 500
_SIZES_BYTES = (2**12, 2**18, 2**22)
_CALLS_PER_REPEAT, _REPEATS = 2, 3
# The version of the cost model that constants are fitted to.
_MODEL_VERSION = 2


def load_or_measure_links(
    algorithm_selector: AlgorithmSelector,
    group: ProcessGroup,
    worker_group: WorkerGroup,
    hosts: str,
    num_steps: int | None,
    *,
    for_plans: bool = False,
) -> None:
    """Set the links of an algorithm selector, the same on all workers.

    Those that were measured before and kept; or measured now if the run is long.
    Every worker has to call it.

    Args:
        algorithm_selector: `AlgorithmSelector`.
        group: `ProcessGroup` of all replicas.
        worker_group: `WorkerGroup`.
        hosts: String, what names the machines.
        num_steps: Int, steps that will be trained, or `None` if unknown.
        for_plans: Bool, whether plans are proposed by them, so that they are needed
            also where no algorithm depends on them. Defaults to `False`.
    """
    is_needed = for_plans or algorithm_selector.depends_on_links
    if algorithm_selector.are_links_known or not is_needed:
        return
    key = cluster_key(algorithm_selector, group, hosts)
    found = load_links(key) if worker_group.is_chief else None
    is_long = num_steps is not None and num_steps >= LONG_RUN_STEPS
    own = [found and dataclasses.asdict(found), is_long]
    kept, is_long = worker_group.all_gather("kept links", own)[0]
    if kept:
        algorithm_selector.set_links(Links.from_dict(kept))
    elif is_long:
        samples = _measure_samples(algorithm_selector, group)
        # The workers' clocks differ, and their figures must not.
        own_fit = _fit(samples, group.backend) if worker_group.is_chief else None
        fitted = worker_group.all_gather("measured links", own_fit)[0]
        if fitted:
            algorithm_selector.set_links(Links.from_dict(fitted))
        if fitted and worker_group.is_chief:
            store_links(key, algorithm_selector.links)


def cluster_key(
    algorithm_selector: AlgorithmSelector, group: ProcessGroup, hosts: str
) -> str:
    """Key of what was measured on a cluster, for a file that outlives the run.

    Args:
        algorithm_selector: `AlgorithmSelector`.
        group: `ProcessGroup` of all replicas.
        hosts: String, what names the machines.

    Returns:
        String.
    """
    parts = (
        _MODEL_VERSION,
        algorithm_selector.topology.nodes,
        group.backend,
        hosts,
        tf.__version__,
    )
    return json.dumps(parts)


def num_fit_steps(arguments: dict[str, Any]) -> int | None:
    """Number of steps that a call of `fit` will train.

    Args:
        arguments: Dict, the arguments of `fit` by name.

    Returns:
        Int, or `None` if its data does not tell.
    """
    skipped = int(arguments.get("initial_epoch") or 0)
    epochs = int(arguments.get("epochs") or 1) - skipped
    steps = arguments.get("steps_per_epoch")
    x = arguments.get("x")
    if steps is None and isinstance(x, tf.data.Dataset):
        cardinality = int(x.cardinality())
        steps = cardinality if cardinality >= 0 else None
    elif steps is None and x is not None:
        leaves = keras.tree.flatten(x)
        shape = getattr(leaves[0], "shape", None) if leaves else None
        rows = shape[0] if shape else None
        kept = 1.0 - float(arguments.get("validation_split") or 0.0)
        batch_size = arguments.get("batch_size") or 32
        steps = -(-math.floor(rows * kept) // batch_size) if rows else None
    return None if steps is None else epochs * int(steps)


def _fit(samples: list[Sample], backend: str) -> dict[str, Any] | None:
    """Fit links, or return `None` where the times make no sense."""
    try:
        links = fit_links(samples, DEFAULT_LINKS[backend])
    except ValueError:
        return None
    return dataclasses.asdict(links)


def _measure_samples(
    algorithm_selector: AlgorithmSelector, group: ProcessGroup
) -> list[Sample]:
    """Measure small and large tensors by each algorithm.

    Only algorithms with other numbers of messages and operations tell what these
    cost, and whether replicas share a link.
    """
    algorithms = [Algorithm(name) for name in FLAT]
    topology = algorithm_selector.topology
    if topology.has_levels:
        algorithms.append(Algorithm("hierarchical"))
    return [
        Sample(algorithm, size, topology, _measure_seconds(algorithm, size, group))
        for algorithm in algorithms
        for size in _SIZES_BYTES
    ]


def _measure_seconds(
    algorithm: Algorithm, num_bytes: int, group: ProcessGroup
) -> float:
    run = _trace(AlgorithmChoice(algorithm).all_reduce, num_bytes // 4, group)
    run()  # makes connections and groups
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) / _CALLS_PER_REPEAT)
    return statistics.median(times)


def _trace(
    all_reduce: Callable, length: int, group: ProcessGroup
) -> Callable[[], None]:
    """Trace several all-reduces of float32 in a row, on every local replica."""

    @tf.function(autograph=False)
    def function() -> list[tf.Tensor]:
        results = []
        for replica, device in enumerate(group.devices):
            with tf.device(device):
                value = tf.zeros([length])  # [length]
                for _ in range(_CALLS_PER_REPEAT):
                    value = all_reduce(value, group, replica)
                results.append(value[0])
        return results

    def run() -> None:
        for result in function():
            result.numpy()

    return run
