"""Schema of what a backup tells of its run, beside tensors."""

from __future__ import annotations

from typing import Any

from tfdp.checkpoint import schema
from tfdp.checkpoint.callback_state import check_callback_states, check_value
from tfdp.checkpoint.schema import COUNT, POSITIVE, optional

_WORD = range(2**32)
_SEED = range(-(2**63), 2**64 + 1)


def _words_and_position(value: Any, where: str) -> None:
    schema.list_of(_WORD, least=625, most=625)(value, where)
    schema.check(value[-1], range(625), f"{where}[624]")


# Mersenne twisters: Python has the position after the words, and NumPy beside them.
_TWISTER = (range(3, 4), _words_and_position, optional(schema.number))
_WORDS = schema.list_of(_WORD, least=624, most=624)
_RANDOM = {
    "python": _TWISTER,
    "numpy": ({"MT19937"}, _WORDS, range(625), range(2), schema.number),
    "tensorflow": {
        "seed": optional(_SEED),
        "rng": optional(_TWISTER),
        "generator": optional(schema.list_of(_SEED, least=1, most=16)),
        "stands_in?": schema.boolean,
    },
    "keras": optional((_WORD, _WORD)),
}
_DESCRIPTION = {
    "the kind of the data": schema.name,
    "the number of batches": optional(COUNT),
    "the seeds of `Dataset.shuffle`": [schema.list_of(optional(_SEED), most=2)],
    "the global seed": optional(_SEED),
    "the set of files?": schema.name,
    "the number of workers that share files?": COUNT,
}
_WARMUP = {
    "steps": COUNT,
    "first": schema.number,
    "last": schema.number,
    "start": range(-(2**63), 2**63),
    "momentum_correction": schema.boolean,
}


def _description(value: Any, where: str) -> None:
    workers = schema.list_of(_DESCRIPTION, least=1)
    schema.check(value, workers if type(value) is list else _DESCRIPTION, where)


def _logs(value: Any, where: str) -> None:
    if not isinstance(check_value(value, where), dict):
        schema.refuse(value, where, "the logs of a batch")


# The first versions did not write `rates` and `accumulation`.
_RUN = {
    "format": COUNT,
    "identity": {
        "optimizer": [schema.name],
        "batch_size": optional(POSITIVE),
        "steps_per_epoch": optional(COUNT),
        "steps_per_execution": optional(COUNT),
    },
    "rates?": optional(
        {"schedules": [optional(schema.string)], "warmup": optional(_WARMUP)}
    ),
    "accumulation?": {"steps": POSITIVE, "waiting": COUNT},
    "facts": {"replicas": POSITIVE, "merges": [{"sum", "max", "min"}]},
    "epoch": COUNT,
    "batches": COUNT,
    "steps": COUNT,
    "is_stopped": schema.boolean,
    "logs": _logs,
    "callbacks": check_callback_states,
    "random": schema.list_of(_RANDOM, least=1),
    "data": {
        "steps_seen": COUNT,
        "num_batches": optional(COUNT),
        "taken": [COUNT],
        "order": optional(_SEED),
        "description": _description,
    },
}


def check_run(run: Any) -> None:
    """Raise if it is not what a backup tells of its run.

    Args:
        run: As JSON has it.

    Raises:
        Malformed: Naming the first field that cannot be.
    """
    schema.check(run, _RUN, "run")
    if run["batches"] > run["steps"]:
        schema.refuse(
            run["batches"], "run.batches", f"at most {run['steps']}, its steps"
        )
    if run["batches"] and run["is_stopped"]:
        schema.refuse(True, "run.is_stopped", "false within an epoch")
    # All of them are skipped; an epoch may have had a second iterator.
    epochs = 2 * (run["epoch"] + 2)
    per_epoch = run["identity"]["steps_per_epoch"]
    taken = run["data"]["taken"]
    if len(taken) > epochs or (per_epoch and sum(taken) > epochs * (per_epoch + 1)):
        schema.refuse(taken, "run.data.taken", "what epochs before can have taken")
