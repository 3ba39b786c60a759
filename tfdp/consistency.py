"""Workers compare what has to be alike before they wait for each other."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from tfdp.agreement import Agreement

_AUTO_NUMBER = re.compile(r"_\d+(?=/|:|$)")


def check_same_variables(
    agreement: Agreement, topic: str, variables: Sequence[Any], verb: str
) -> None:
    """Raises on every worker if they do not have the same variables.

    Args:
        agreement: `Agreement` between the workers.
        topic: String, where in the program this is.
        variables: Sequence of variables; order counts.
        verb: String, what a worker does with them, such as `"trains"`.

    Raises:
        ValueError: Naming the first variable that differs.
    """
    if agreement.num_workers == 1:
        return
    rows = [_row(variable) for variable in variables]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    same, _ = agreement.same(topic, digest)
    if same:
        return
    described = [_describe(variable) for variable in variables]
    texts = agreement.exchange(f"{topic}: variables", json.dumps([rows, described]))
    tables = [json.loads(text) for text in texts]
    agreement.part()
    raise ValueError(_first_difference(tables, verb))


def _first_difference(tables: list, verb: str) -> str:
    reference_rows, reference = tables[0]
    for rank, (rows, described) in enumerate(tables[1:], start=1):
        for index in range(max(len(rows), len(reference_rows))):
            own = rows[index] if index < len(rows) else None
            first = reference_rows[index] if index < len(reference_rows) else None
            if own == first:
                continue
            ours = described[index] if own else "nothing"
            theirs = reference[index] if first else "nothing"
            return (
                "Workers have different models. Build the same one on every "
                f"worker. First difference, variable {index}: worker 0 {verb} "
                f"{theirs}, worker {rank} {verb} {ours}."
            )
    return "Workers have different models. Build the same one on every worker."


def _row(variable: Any) -> list:
    # Automatic numbers differ when a worker has built another model before.
    return [_AUTO_NUMBER.sub("", _name(variable)), *_type(variable)]


def _describe(variable: Any) -> str:
    shape, dtype = _type(variable)
    return f"{_name(variable)!r} with shape {tuple(shape)} and dtype {dtype}"


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name).split(":")[0]


def _type(variable: Any) -> tuple[list, str]:
    dtype = getattr(variable.dtype, "name", variable.dtype)
    return list(variable.shape), str(dtype)
