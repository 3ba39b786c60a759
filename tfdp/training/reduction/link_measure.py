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
from tfdp.ground.plans.traffic import FLAT, HIERARCHICAL, Algorithm
from tfdp.training.reduction.algorithm_selector import (
    AlgorithmChoice,
    AlgorithmSelector,
)
from tfdp.training.reduction.cache_file import load_links, store_links
from tfdp.training.reduction.link_fit import Sample, fit_links

# Only runs of at least this many steps measure links: a measurement takes a second or
# two, more than faster steps would save in a shorter run.
LONG_RUN_STEPS = 500
# Bytes of the tensors in timed all-reduces: small tensors show the latency of links,
# large tensors the bandwidth.
_SIZES_BYTES = (2**12, 2**18, 2**22)
# Each timing covers several all-reduces, which share the cost of one call, and the
# median of several timings is used, so that a single slow one does not count.
_CALLS_PER_REPEAT, _REPEATS = 2, 3
# Version of the cost model, a part of the key in the cache: links that were fitted to
# another version are not used, since the constants of that version may have another
# meaning.
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

    They are loaded from the chief's cache, or else measured if the run is long. Links
    that are already known or not needed stay. Every worker has to call this function.

    Args:
        algorithm_selector: `AlgorithmSelector` that receives the links.
        group: `ProcessGroup` of all replicas.
        worker_group: `WorkerGroup` of all workers.
        hosts: String, names of the machines.
        num_steps: Int, number of steps that will be trained, or `None` if unknown. A
            run of at least `LONG_RUN_STEPS` steps is long.
        for_plans: Bool, whether plans are proposed from the links, so that they are
            needed even if no algorithm depends on them. Defaults to `False`.
    """
    is_needed = for_plans or algorithm_selector.depends_on_links
    if algorithm_selector.are_links_known or not is_needed:
        return
    key = cluster_key(algorithm_selector, group, hosts)
    cached = load_links(key) if worker_group.is_chief else None
    is_long = num_steps is not None and num_steps >= LONG_RUN_STEPS
    own = [cached and dataclasses.asdict(cached), is_long]
    kept, is_long = worker_group.all_gather("kept links", own)[0]
    if kept:
        algorithm_selector.set_links(Links.from_dict(kept))
    elif is_long:
        samples = _measure_samples(algorithm_selector, group)
        # Workers measure different times but must choose the same algorithms, so all of
        # them use the links that the chief has fitted.
        own_fit = _try_fit(samples, group.backend) if worker_group.is_chief else None
        fitted = worker_group.all_gather("measured links", own_fit)[0]
        if fitted:
            algorithm_selector.set_links(Links.from_dict(fitted))
        if fitted and worker_group.is_chief:
            store_links(key, algorithm_selector.links)


def cluster_key(
    algorithm_selector: AlgorithmSelector, group: ProcessGroup, hosts: str
) -> str:
    """Return the key of a cluster's links in a cache file.

    Args:
        algorithm_selector: `AlgorithmSelector`, with the topology.
        group: `ProcessGroup` of all replicas.
        hosts: String, names of the machines.

    Returns:
        String, JSON: versions of the cost model and TensorFlow, nodes, backend, hosts.
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
    """Return the number of steps that a call of `fit` will train.

    Args:
        arguments: Dict, the arguments of `fit` by name.

    Returns:
        Int, or `None` if the size of the data is not known.
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


def _try_fit(samples: list[Sample], backend: str) -> dict[str, Any] | None:
    """Fit links to samples, and return them as a dict for `Links.from_dict`.

    Returns:
        Dict with the fields of `Links`, or `None` if the samples do not determine alpha
        and beta, see `fit_links`.
    """
    try:
        links = fit_links(samples, DEFAULT_LINKS[backend])
    except ValueError:
        return None
    return dataclasses.asdict(links)


def _measure_samples(
    algorithm_selector: AlgorithmSelector, group: ProcessGroup
) -> list[Sample]:
    """Measure the time of all-reduces of small and large tensors by each algorithm.

    Algorithms differ in the number of messages and operations. From these differences
    `fit_links` determines the cost of an operation, and whether replicas share a link.

    Args:
        algorithm_selector: `AlgorithmSelector`, with the topology.
        group: `ProcessGroup` of all replicas. Every worker has to call this function.

    Returns:
        List of `Sample`, one for each algorithm and size.
    """
    algorithms = [Algorithm(name) for name in FLAT]
    topology = algorithm_selector.topology
    if topology.supports_hierarchy:
        algorithms.append(HIERARCHICAL)
    return [
        Sample(algorithm, size, topology, _measure_seconds(algorithm, size, group))
        for algorithm in algorithms
        for size in _SIZES_BYTES
    ]


def _measure_seconds(
    algorithm: Algorithm, num_bytes: int, group: ProcessGroup
) -> float:
    """Measure the time of one all-reduce; return the median in seconds.

    Args:
        algorithm: `Algorithm`.
        num_bytes: Int, size of the float32 tensor that is reduced.
        group: `ProcessGroup` of all replicas, which call it together.
    """
    run = _trace(AlgorithmChoice(algorithm).all_reduce, num_bytes // 4, group)
    # The first call opens connections and creates groups, so it is not timed.
    run()
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) / _CALLS_PER_REPEAT)
    return statistics.median(times)


def _trace(
    all_reduce: Callable, length: int, group: ProcessGroup
) -> Callable[[], None]:
    """Return a function that runs `_CALLS_PER_REPEAT` all-reduces on local replicas.

    The all-reduces run one after another. They are traced at the first call.

    Args:
        all_reduce: Callable such as `tfdp.communication.collectives.ring`.
        length: Int, number of elements of the float32 tensor.
        group: `ProcessGroup` of all replicas.

    Returns:
        Function without arguments, which returns when all the all-reduces have ended.
    """

    @tf.function(autograph=False)
    def function() -> list[tf.Tensor]:
        """Run the all-reduces; return an element of the result of each replica."""
        results = []
        for replica, device in enumerate(group.devices):
            with tf.device(device):
                value = tf.zeros([length])
                for _ in range(_CALLS_PER_REPEAT):
                    value = all_reduce(value, group, replica)
                results.append(value[0])
        return results

    def run() -> None:
        """Run the traced function, and wait for its results."""
        for result in function():
            result.numpy()

    return run
