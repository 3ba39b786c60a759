"""Schema of the run metadata that a backup holds in addition to tensors."""

from __future__ import annotations

from typing import Any

from tfdp.checkpoint import schema
from tfdp.checkpoint.callback_state import check_callback_states, check_value
from tfdp.checkpoint.schema import COUNT, POSITIVE, optional

# A word of the Mersenne twister has 32 bits. A seed may be a signed or an unsigned
# integer of 64 bits, so the range of seeds covers both.
_WORD = range(2**32)
_SEED = range(-(2**63), 2**64)


def _check_words_and_position(value: Any, where: str) -> None:
    """Raise `Malformed` unless a value is a Mersenne twister's words and position.

    Args:
        value: Value, as JSON has it.
        where: String, place of the value in the file.
    """
    schema.list_of(_WORD, least=625, most=625)(value, where)
    schema.check(value[-1], range(625), f"{where}[624]")


# The states of Python's and NumPy's Mersenne twister need separate schemas:
# `random.getstate()` has the position as a last word, while NumPy's state has a
# separate entry for the position.
_TWISTER = (range(3, 4), _check_words_and_position, optional(schema.number))
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


def _check_description(value: Any, where: str) -> None:
    """Raise `Malformed` unless a value is a description of data, or a list of them.

    A description is a dict by the schema `_DESCRIPTION`: the kind of the data of `fit`,
    its number of batches, its seeds, and for shared files their set.

    Args:
        value: Value, as JSON has it: one description for all workers, or a list with
            one description by worker.
        where: String, place of the value in the file.
    """
    workers = schema.list_of(_DESCRIPTION, least=1)
    schema.check(value, workers if type(value) is list else _DESCRIPTION, where)


def _check_logs(value: Any, where: str) -> None:
    """Raise `Malformed` unless a value encodes a dict, such as the logs of a batch."""
    if not isinstance(check_value(value, where), dict):
        schema.raise_malformed(value, where, "the logs of a batch")


# The backups of `fit` and of `ElasticState` share these two schemas. `FACTS` are what a
# backup's tensors depend on: the number of replicas, the features with a state, and the
# name and merge function of each metric variable.
RANDOM_STATES = schema.list_of(_RANDOM, least=1)
FACTS = {
    "replicas": POSITIVE,
    "features?": [schema.string],
    "metrics?": [schema.string],
    "merges": [{"sum", "max", "min"}],
}
# The fields `rates` and `accumulation` are optional, since the first versions of tfdp
# did not write them.
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
    "facts": FACTS,
    "epoch": COUNT,
    "batches": COUNT,
    "steps": COUNT,
    "is_stopped": schema.boolean,
    "logs": _check_logs,
    "callbacks": check_callback_states,
    "random": RANDOM_STATES,
    "data": {
        "steps_seen": COUNT,
        "num_batches": optional(COUNT),
        "taken": [COUNT],
        "validations?": [(COUNT, schema.boolean)],
        "order": optional(_SEED),
        "description": _check_description,
    },
}


def check_run(run: Any) -> None:
    """Check the fields, types and bounds of a run's metadata in a backup.

    Args:
        run: Parsed JSON, as `Index.run` holds it.

    Raises:
        Malformed: If a value is wrong; the message names the first wrong field.
    """
    schema.check(run, _RUN, "run")
    if run["batches"] > run["steps"]:
        schema.raise_malformed(
            run["batches"], "run.batches", f"at most {run['steps']}, its steps"
        )
    if run["batches"] and run["is_stopped"]:
        schema.raise_malformed(True, "run.is_stopped", "false within an epoch")
    # A resumed run skips the batches that `taken` counts, so a damaged number would
    # make it skip indefinitely. The list has a number for each iterator, at most two
    # per epoch.
    epochs = 2 * (run["epoch"] + 2)
    per_epoch = run["identity"]["steps_per_epoch"]
    taken = run["data"]["taken"]
    if len(taken) > epochs or (per_epoch and sum(taken) > epochs * (per_epoch + 1)):
        schema.raise_malformed(
            taken, "run.data.taken", "what earlier epochs can have taken"
        )
    validations = run["data"].get("validations", [])
    if len(validations) > epochs:
        schema.raise_malformed(
            validations, "run.data.validations", "those of earlier epochs"
        )
