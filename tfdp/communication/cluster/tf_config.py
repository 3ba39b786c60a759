"""Parser of `TF_CONFIG`, with an error message for each malformed value."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

_JOBS = ("chief", "worker", "evaluator")
# Keys of the object "tfdp" that a `Cluster` has as fields. Features read other keys.
SETTINGS = ("devices_per_worker", "rebalance", "elastic", "secret")


def parse(text: str) -> dict[str, Any] | None:
    """Parse the text of `TF_CONFIG` into the fields of a `Cluster`.

    Args:
        text: String, JSON.

    Returns:
        A dict of the arguments of `Cluster`, or `None` if the text names no
        cluster.

    Raises:
        ValueError: If the text is not a valid `TF_CONFIG`.
    """
    if not text.strip():
        return None
    config = _load_object(text)
    jobs = _read_jobs(config)
    settings = _read_tfdp_key(config)
    if not any(jobs.values()):
        _check_single_task(config)
        return None
    task_type, task_index = _read_task(config)
    if task_type == "chief" and not jobs["chief"]:
        raise ValueError(
            "This task of TF_CONFIG is the chief, but its cluster has none. Add a "
            f"'chief' job or make the task a worker. Received: {shorten(text)}"
        )
    return {
        "workers": jobs["chief"] + jobs["worker"],
        "task_type": task_type,
        "task_index": task_index,
        "devices_per_worker": settings.get("devices_per_worker"),
        "rebalance": settings.get("rebalance", False),
        "elastic": settings.get("elastic"),
        "secret": settings.get("secret"),
        "evaluators": jobs["evaluator"],
        "has_chief": bool(jobs["chief"]),
    }


def read_settings(text: str) -> dict[str, Any]:
    """Read the `tfdp` key of `TF_CONFIG`, the launcher's own settings.

    Args:
        text: String, JSON.

    Returns:
        Dict, empty if there is no such key.

    Raises:
        ValueError: If the text is not a valid `TF_CONFIG`.
    """
    return _read_tfdp_key(_load_object(text))


def check_job_name(name: object) -> None:
    """Check that a job name is `"chief"`, `"worker"` or `"evaluator"`.

    Args:
        name: The name, of any type.

    Raises:
        ValueError: If the name is another one.
    """
    if name == "ps":
        raise ValueError(
            "Parameter servers are not supported: tfdp trains with all-reduce "
            "among workers. Remove the 'ps' job from TF_CONFIG, or make its tasks "
            "workers. Received: job 'ps'"
        )
    if name not in _JOBS:
        raise ValueError(
            "A task of the cluster is a 'chief', a 'worker' or an 'evaluator'; "
            f"correct the job name in TF_CONFIG. Received: {describe(name)}"
        )


def _load_object(text: str) -> dict[str, Any]:
    """Parse `TF_CONFIG`; raise `ValueError` unless it is a JSON object."""
    try:
        config = json.loads(text, object_pairs_hook=_to_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"TF_CONFIG is not valid JSON ({error}). Set it to an object with "
            f"'cluster' and 'task', or unset it. Received: {shorten(text)}"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(
            "TF_CONFIG must be a JSON object with 'cluster' and 'task'. "
            f"Received: {shorten(text)}"
        )
    return config


def _to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of an object of JSON; raise `ValueError` if it has a key twice.

    Python would keep only the last value, so one of two lists of workers would be lost.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {describe(twice)} occurs twice in one object")
    return values


def _check_single_task(config: dict[str, Any]) -> None:
    """Raise `ValueError` if a `TF_CONFIG` of several tasks names no cluster.

    Otherwise each task would train a model by itself. Several tasks show in a list of
    addresses under another key, as in `{"Cluster": {"worker": [...]}}`, and in an
    index above 0.
    """
    for key, value in config.items():
        if isinstance(value, dict) and any(value.get(job) for job in _JOBS):
            raise ValueError(
                f"TF_CONFIG has the tasks of a cluster under the key {describe(key)}, "
                f"and none under 'cluster'; rename it. Received: {describe(value)}"
            )
    task = config.get("task")
    index = _to_index(task.get("index")) if isinstance(task, dict) else 0
    if isinstance(index, int) and index > 0:
        raise ValueError(
            f"TF_CONFIG has no 'cluster', although its task has the index {index}: "
            "each task would train a separate model. Add the addresses of all tasks "
            f"as 'cluster', or unset TF_CONFIG. Received: task={describe(task)}"
        )


def _read_jobs(config: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the addresses of each job by its name; raise `ValueError` if malformed."""
    cluster = _read_object(
        config, "cluster", "that maps each job to a list of addresses"
    )
    for name, tasks in cluster.items():
        check_job_name(name)
        if not isinstance(tasks, list):
            raise ValueError(
                f"Job {name!r} in TF_CONFIG must be a list of 'host:port' strings. "
                f"Received: {describe(tasks)}"
            )
    jobs = {name: tuple(cluster.get(name, ())) for name in _JOBS}
    if len(jobs["chief"]) > 1:
        raise ValueError(
            "A cluster has at most one 'chief'; make the others workers in "
            f"TF_CONFIG. Received: {describe(list(jobs['chief']))}"
        )
    return jobs


def _read_task(config: dict[str, Any]) -> tuple[str, int]:
    """Return type and index of this task, such as `("worker", 1)`."""
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise ValueError(
            "TF_CONFIG has a 'cluster', so it must also say which task this is: "
            "'task' must be an object with 'type' and 'index'. "
            f"Received: task={describe(task)}"
        )
    check_job_name(task["type"])
    return task["type"], _to_index(task["index"])


def _to_index(index: Any) -> Any:
    """Convert the index of a task to an int if it is a string of up to nine digits.

    Any other value is returned unchanged.

    Shell scripts write the index as a string, and TensorFlow's resolver accepts it.
    """
    if isinstance(index, str) and re.fullmatch("[0-9]{1,9}", index):
        return int(index)
    return index


def _read_tfdp_key(config: dict[str, Any]) -> dict[str, Any]:
    """Return the value of the `tfdp` key, `{}` by default.

    Raise `ValueError` if it is not an object, or misspells one of `SETTINGS`.
    """
    settings = _read_object(config, "tfdp", "such as {'devices_per_worker': 2}")
    for key in settings.keys() - {*SETTINGS}:
        if meant := difflib.get_close_matches(key, SETTINGS, 1, cutoff=0.8):
            # The values may contain the job's secret.
            raise ValueError(
                f"'tfdp' in TF_CONFIG has the key {describe(key)}, which is unknown; "
                f"rename it to {meant[0]!r}. Received: {describe(sorted(settings))}"
            )
    return settings


def _read_object(config: dict[str, Any], key: str, kind: str) -> dict[str, Any]:
    """Return the object at a key of a configuration, empty by default.

    Args:
        config: Dict, the parsed `TF_CONFIG`.
        key: String, the key.
        kind: String, description of the object, for the `ValueError` that any other
            value raises.
    """
    value = config.get(key)
    if not isinstance(value, dict | None):
        raise ValueError(
            f"'{key}' in TF_CONFIG must be an object {kind}. Received: "
            f"{describe(value)}"
        )
    return value or {}


def describe(value: object) -> str:
    """Format a value for a message, shortened to one line as by `shorten`.

    Args:
        value: Value of any type.

    Returns:
        String.

    Example:
    >>> describe({"a": [1]}), len(describe(10**4000))
    ("{'a': [1]}", 203)
    """
    try:
        return shorten(repr(value))
    except (ValueError, RecursionError):  # `repr` fails for huge ints and deep nesting
        return f"a value of type {type(value).__name__}"


def shorten(text: str) -> str:
    """Shorten a text to one printable line, of 200 characters and `"..."` at most.

    Args:
        text: String.

    Returns:
        String.

    Example:
    >>> shorten("a  b"), len(shorten("x" * 1000))
    ('a b', 203)
    """
    text = " ".join(text.split())[:201]
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= 200 else text[:200] + "..."
