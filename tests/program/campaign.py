"""Many random programs in one process, and the table of what came of them."""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

EQUAL, SKIPPED, ILL = "equal", "fails on one device", "ill-conditioned"
GOOD = (EQUAL, SKIPPED, ILL)
# A program that fails is made smaller for so long at most.
MINIMISE_SECONDS = 240


def prepare() -> None:
    """Prepare a process that has not used TensorFlow for programs on replicas."""
    import tensorflow as tf

    from tfdp.testing import logical_cpus

    logical_cpus(4)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # Programs run a few times only: their graphs are not worth improving.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    tf.get_logger().setLevel("ERROR")  # It warns of each function that it traces.


def run(seeds: Sequence[int], write: Callable[[str], Any]) -> None:
    """Run the programs of some seeds, and write lines of JSON for each.

    Args:
        seeds: Sequence of ints.
        write: Callable of a line. The last one for a seed says what came of it.
    """
    prepare()
    import keras

    from tests.program import fuzzing, random_programs

    campaign = fuzzing.Campaign()
    for seed in seeds:
        write(json.dumps({"number": seed, "result": ""}))
        program, tried = campaign.compose(seed)
        count = campaign.count_of(seed)
        outcome = campaign.run(program, count, tried)
        row = {
            "number": seed,
            "result": outcome.result,
            "steps": [step.name for step in program.steps],
            "occurred": dict(campaign.occurred),
            "ran whole": dict(+campaign.ran_whole),
        }
        if outcome.result not in GOOD:
            end = time.monotonic() + MINIMISE_SECONDS

            def fails(
                smaller: Any,
                count: int = count,
                tried: Any = tried,
                outcome: Any = outcome,
                end: float = end,
                seed: int = seed,
            ) -> bool:
                if time.monotonic() > end:
                    return False
                write(json.dumps({"number": seed, "result": outcome.result}))
                return campaign.run(smaller, count, tried).result == outcome.result

            program = random_programs.minimise(program, fails)
            row["replicas"] = count
            row["program"] = random_programs.written(program)
            row["details"] = campaign.run(program, count, tried).details
        campaign.occurred.clear()
        campaign.ran_whole.clear()
        write(json.dumps(row))
        if seed % 20 == 0:
            keras.backend.clear_session(free_memory=True)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a page of what came of programs, and of how their operations ran."""
    results = collections.Counter(row["result"] for row in rows)
    steps: collections.Counter[str] = collections.Counter()
    occurred: collections.Counter[str] = collections.Counter()
    whole: collections.Counter[str] = collections.Counter()
    for row in rows:
        steps.update(row.get("steps", ()))
        occurred.update(row.get("occurred", {}))
        whole.update(row.get("ran whole", {}))
    lines = ["| result | programs |", "| --- | --- |"]
    lines += [f"| {name} | {count} |" for name, count in results.most_common()]
    lines += ["", "| composed of | times |", "| --- | --- |"]
    lines += [f"| {name} | {count} |" for name, count in steps.most_common()]
    lines += ["", "| operation | occurred | ran whole |", "| --- | --- | --- |"]
    lines += [
        f"| {name} | {count} | {whole[name]} |"
        for name, count in sorted(
            occurred.items(), key=lambda item: (-whole[item[0]], -item[1])
        )
    ]
    return "\n".join(lines)
