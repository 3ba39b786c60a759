"""Facts that must be the same on all workers, compared at a moment of the program.

A room lists the facts of its moment, and `compare` exchanges them in one all-gather. If
one differs, all workers raise one error, which names the first difference. The moments:

- strategy: set-up (`checks.check_same_setup`). Other rooms add to it by `add_facts`.
- shards: variables, plans and options (`tfdp.training.sharding.sharded_state`).
- dataset: elements, values, order and length (`tfdp.training.data`).
- call of Keras: settings, arrays and configs (`tfdp.training.keras_hooks`). A callback
  adds the attributes that its `compared` names.
- first step: variables, buckets and operations (`checks`).
- checkpoint: variables (`checks.check_same_variables`).

Not here: weights within `fit` are compared by checksums in a collective, since they are
on devices and sharded; weights and learning rates that a script has assigned outside of
steps, at the next loop; assignments to sharded weights also by what earlier comparisons
have found; seeds, transports and new variables are not refused but set alike.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp.communication.coordination.worker_group import WorkerGroup

# A value in the description of a difference is cut to this many characters, so that a
# long one does not hide the rest of the error.
_MAX_VALUE = 60


@dataclasses.dataclass(frozen=True)
class SharedFact:
    """A value that must be the same on all workers.

    Args:
        name: String, a noun for messages.
        value: Value of this worker, which JSON must support.
        problem: String, the problem and its remedy, to which the first difference is
            appended. Or a callable, from a dict of the workers' values by rank to the
            text of the error, `""` if the values may differ. All workers call it.
        whole: Callable without arguments, or `None`. Workers exchange only a digest of
            `value`; if digests differ, worker 0 and the first worker that differs send
            what `whole` returns, and `problem` is about these. Defaults to `None`:
            workers exchange `value`.
    """

    name: str
    value: Any
    problem: str | Callable[[dict[int, Any]], str]
    whole: Callable[[], Any] | None = None


def compare(
    worker_group: WorkerGroup,
    moment: str,
    facts: Sequence[SharedFact],
    extra: Any = "",
    *,
    timeout_seconds: float | None = None,
    before: Callable[[Sequence[Any]], None] = lambda gathered: None,
) -> list[Any]:
    """Compare facts between workers in one all-gather; raise on all if one differs.

    If a fact with `whole` differs, further all-gathers exchange the whole values.

    Args:
        worker_group: `WorkerGroup` between the workers.
        moment: String, the point of the program, for error messages.
        facts: Sequence of `SharedFact`, with the same names on all workers. The first
            one that differs is the error.
        extra: Value that is gathered in the same call. Defaults to `""`.
        timeout_seconds: Float or `None`, as for `WorkerGroup.all_gather`. Defaults to
            `None`.
        before: Callable, called with the workers' `extra` before facts are compared.
            Defaults to a function that does nothing.

    Returns:
        List of each worker's `extra`, ordered by rank.

    Raises:
        ValueError: If a fact differs, unless its `problem` returns `""` for the values.
    """
    if worker_group.num_workers == 1:
        before([extra])
        return [extra]
    own = [digest(fact.value) if fact.whole else fact.value for fact in facts]
    answers = worker_group.all_gather(moment, [own, extra], timeout_seconds)
    values_of_workers, gathered = zip(*answers, strict=True)
    before(gathered)
    for fact, *values in zip(facts, *values_of_workers, strict=True):
        for other in _ranks_that_differ(values, are_digests=fact.whole is not None):
            by_rank = dict(enumerate(values))
            if fact.whole is not None:
                sent = fact.whole() if worker_group.rank in (0, other) else None
                wholes = worker_group.all_gather(f"{moment}: {fact.name}", sent)
                by_rank = {rank: wholes[rank] for rank in (0, other)}
            is_text = isinstance(fact.problem, str)
            text = explain(fact.problem, by_rank) if is_text else fact.problem(by_rank)
            if text:
                raise ValueError(text)
    return list(gathered)


def _ranks_that_differ(values: Sequence[Any], *, are_digests: bool) -> list[int]:
    """Return ranks whose value of a fact differs from that of rank 0.

    Args:
        values: Sequence of a fact's value or digest on each worker.
        are_digests: Bool, whether `values` are digests. If not, the result has only the
            first rank that differs. If so, it has the first rank with each digest that
            differs: the caller then compares the values of these ranks themselves,
            which may be equal, such as 1 and 1.0.

    Returns:
        List of ints, empty if no value differs.
    """
    ranks = [
        rank
        for rank, value in enumerate(values)
        if value != values[0] and rank == values.index(value)
    ]
    return ranks if are_digests else ranks[:1]


def digest(value: Any) -> str:
    """Return the SHA-256 of a value, encoded as JSON, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def explain(problem: str, values: Mapping[int, Any]) -> str:
    """Return the text of an error about workers' values, or `""` if they are equal.

    Args:
        problem: String, the problem and its remedy; the first difference is appended.
        values: Mapping from a worker's rank to a nest of dicts, lists and plain values.
    """
    difference = describe_difference(values)
    return f"{problem} Received: {difference}" if difference else ""


def describe_difference(values: Mapping[int, Any]) -> str:
    """Describe the first difference between workers' nests, or return `""`.

    Args:
        values: Mapping from a worker's rank to a nest of dicts, lists and plain values.

    Returns:
        String: the path, and each worker's value at it.

    Example:

    >>> describe_difference({0: {"a": 1, "b": [2, 3]}, 1: {"a": 1, "b": [2]}})
    'b/1: 3 on worker 0, nothing on worker 1'
    """
    first = values[min(values)]
    paths = (_first_differing_path(first, other) for other in values.values())
    path = next((found for found in paths if found is not None), None)
    if path is None:
        return ""
    by_rank = ", ".join(
        f"{_short_repr(_value_at(value, path))} on worker {rank}"
        for rank, value in values.items()
    )
    return f"{'/'.join(map(str, path))}: {by_rank}"


class _Missing:
    """Placeholder for a value that a worker lacks and another worker has."""

    def __repr__(self) -> str:
        return "nothing"


_MISSING = _Missing()


def _first_differing_path(first: Any, other: Any) -> tuple | None:
    """Return the path of the first difference between two nested values, or `None`.

    Returns:
        Tuple of keys of dicts and indices of lists, the outermost first.
    """
    keys: list[Any]
    if isinstance(first, dict) and isinstance(other, dict):
        keys = [*first, *(key for key in other if key not in first)]
    elif isinstance(first, list) and isinstance(other, list):
        keys = list(range(max(len(first), len(other))))
    else:
        # NaN is not equal to itself in Python, but two workers that both have NaN do
        # not differ.
        is_same = first == other or (first != first and other != other)
        return None if is_same else ()
    for key in keys:
        path = _first_differing_path(_value_at(first, (key,)), _value_at(other, (key,)))
        if path is not None:
            return (key, *path)
    return None


def _value_at(value: Any, path: tuple) -> Any:
    """Return the value at a path of keys in nested dicts and lists, of any type.

    It is `_MISSING` if there is no such path.
    """
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return _MISSING
    return value


def _short_repr(value: Any) -> str:
    """Format a value, shortened to `_MAX_VALUE` characters."""
    text = repr(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
