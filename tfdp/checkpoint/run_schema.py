"""Schema of what a backup tells of its run, beside tensors."""

from __future__ import annotations

from typing import Any

from tfdp.checkpoint.callback_state import check_callback_states, check_value
from tfdp.checkpoint.schema import (
    boolean,
    integer,
    list_of,
    name,
    number,
    one_of,
    optional,
    record,
    refuse,
    row,
    string,
)

_WORD = integer(0, 2**32 - 1)
_SEED = integer(-(2**63), 2**64)
_COUNT, _POSITIVE = integer(), integer(1)


def _words_and_position(value: Any, where: str) -> None:
    list_of(_WORD, least=625, most=625)(value, where)
    integer(0, 624)(value[-1], f"{where}[624]")


# Mersenne twisters: Python has the position after the words, and NumPy beside them.
_TWISTER = row(integer(3, 3), _words_and_position, optional(number))
_RANDOM = record(
    {
        "python": _TWISTER,
        "numpy": row(
            one_of("MT19937"),
            list_of(_WORD, least=624, most=624),
            integer(0, 624),
            integer(0, 1),
            number,
        ),
        "tensorflow": record(
            {
                "seed": optional(_SEED),
                "rng": optional(_TWISTER),
                "generator": optional(list_of(_SEED, least=1, most=16)),
                "stands_in": boolean,
            },
            may_miss=("stands_in",),
        ),
        "keras": optional(row(_WORD, _WORD)),
    }
)
_DESCRIPTION = record(
    {
        "the kind of the data": name,
        "the number of batches": optional(_COUNT),
        "the seeds of `Dataset.shuffle`": list_of(list_of(optional(_SEED), most=2)),
        "the global seed": optional(_SEED),
        "the set of files": name,
        "the number of workers that share files": _COUNT,
    },
    may_miss=("the set of files", "the number of workers that share files"),
)
_WARMUP = record(
    {
        "steps": _COUNT,
        "first": number,
        "last": number,
        "start": integer(-(2**63)),
        "momentum_correction": boolean,
    }
)


def _description(value: Any, where: str) -> None:
    check = list_of(_DESCRIPTION, least=1) if type(value) is list else _DESCRIPTION
    check(value, where)


def _logs(value: Any, where: str) -> None:
    if not isinstance(check_value(value, where), dict):
        refuse(value, where, "the logs of a batch")


_RUN = record(
    {
        "format": _COUNT,
        "identity": record(
            {
                "optimizer": list_of(name),
                "batch_size": optional(_POSITIVE),
                "steps_per_epoch": optional(_COUNT),
                "steps_per_execution": optional(_COUNT),
            }
        ),
        "rates": optional(
            record(
                {
                    "schedules": list_of(optional(string)),
                    "warmup": optional(_WARMUP),
                }
            )
        ),
        "accumulation": record({"steps": _POSITIVE, "waiting": _COUNT}),
        "facts": record(
            {"replicas": _POSITIVE, "merges": list_of(one_of("sum", "max", "min"))}
        ),
        "epoch": _COUNT,
        "batches": _COUNT,
        "steps": _COUNT,
        "is_stopped": boolean,
        "logs": _logs,
        "callbacks": check_callback_states,
        "random": list_of(_RANDOM, least=1),
        "data": record(
            {
                "steps_seen": _COUNT,
                "num_batches": optional(_COUNT),
                "taken": list_of(_COUNT),
                "order": optional(_SEED),
                "description": _description,
            }
        ),
    },
    # Those that the first versions did not write.
    may_miss=("rates", "accumulation"),
)


def check_run(run: Any) -> None:
    """Raise if it is not what a backup tells of its run.

    Args:
        run: As JSON has it.

    Raises:
        Malformed: Naming the first field that cannot be.
    """
    _RUN(run, "run")
    if run["batches"] > run["steps"]:
        refuse(run["batches"], "run.batches", f"at most {run['steps']}, its steps")
    if run["batches"] and run["is_stopped"]:
        refuse(True, "run.is_stopped", "false within an epoch")
    # All of them are skipped; an epoch may have had a second iterator.
    epochs = 2 * (run["epoch"] + 2)
    per_epoch = run["identity"]["steps_per_epoch"]
    taken = run["data"]["taken"]
    if len(taken) > epochs or (per_epoch and sum(taken) > epochs * (per_epoch + 1)):
        refuse(taken, "run.data.taken", "what epochs before can have taken")
