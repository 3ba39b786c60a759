"""Checks of a step that is planned, before any replica waits for another one.

The first step of each loop of a model is compared between workers; what it gathers is
told once, and is an error where the options say so or where memory is too small.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tfdp.communication.coordination.checks import check_same_program
from tfdp.ground import _compat, user_code
from tfdp.ground.base.loops import Loop
from tfdp.ground.plans.gathers import StepGathers, megabytes
from tfdp.training.program.gathers import (
    Conversion,
    describe_operation,
    fingerprint_of,
    gathers_of,
)

_log = logging.getLogger("tfdp")
# Rows that are padded to one length, and the whole that is made of them.
_COPIES = 2
_CGROUP = Path("/sys/fs/cgroup")


def check_step(
    strategy: Any,
    loop: Loop,
    conversions: list[Conversion],
    operations: list[tuple[str, Any]],
    rows: int | None,
) -> None:
    """Compare a step between workers, and check what it gathers.

    Args:
        strategy: A tfdp strategy.
        loop: `Loop` of Keras, whose step it is.
        conversions: List of `Conversion`, see `tfdp.training.program.gathers`.
        operations: List of pairs of a signature and an operation, see there.
        rows: Int, rows of a global batch, or `None` where they are not known.

    Raises:
        ValueError: On every worker, where steps differ, where a tensor would not fit
            in memory, or where nothing may be gathered.
    """
    extended = strategy.extended
    gathers = StepGathers(rows, gathers_of(conversions))
    of_model = extended.step_gathers.setdefault(loop.model, {})
    available = available_bytes(extended.worker_devices)
    # Once: not all workers trace again when a batch has another size.
    if loop.name not in of_model:
        available = check_same_program(
            extended.worker_group,
            f"the first step of `{loop.name}`",
            fingerprint_of(conversions),
            [signature for signature, _ in operations],
            lambda index: describe_operation(operations[index][1]),
            available,
        )
    of_model[loop.name] = gathers
    _check_memory(loop, gathers, extended.num_local, available)
    if extended.options.gathers == "error" and gathers.large:
        raise ValueError(
            f"{_sentence(loop, gathers, gathers.large)}. "
            '`CommunicationOptions(gathers="error")` allows none: change these lines '
            "as docs/one_program.md says, or leave the option out."
        )
    _tell(strategy, loop, gathers)


def _sentence(loop: Loop, gathers: StepGathers, some: Any) -> str:
    return (
        f"A step of `{loop.name}` of {loop.model.name!r} gathers what operations need "
        f"of the whole batch: {gathers.describe(some)}"
    )


def _tell(strategy: Any, loop: Loop, gathers: StepGathers) -> None:
    """Tell the first worker's user, once for a model, of what is gathered."""
    topics = {f"{g.operation} {g.place}" for g in gathers.large}
    unread = {topic for topic in topics if user_code.is_new(topic, loop.model)}
    new = [g for g in gathers.large if f"{g.operation} {g.place}" in unread]
    if new and strategy.extended.worker_group.is_chief:
        _log.warning(
            "tfdp: %s. The result is that of one device; each replica computes these "
            "operations for the whole batch. docs/one_program.md says how to avoid it.",
            _sentence(loop, gathers, new),
        )


def _check_memory(
    loop: Loop, gathers: StepGathers, num_local: int, available: int | None
) -> None:
    if available is None or gathers.largest is None:
        return
    num_bytes, gather = gathers.largest
    needed = _COPIES * num_bytes * num_local
    if needed > available:
        raise ValueError(
            f"A step of `{loop.name}` of {loop.model.name!r} cannot gather "
            f"{gather.describe(gathers.rows)}: that needs {megabytes(needed)} on each "
            f"worker, and {megabytes(available)} are free. Use a smaller batch, or "
            "change that line as docs/one_program.md says."
        )


def available_bytes(devices: Sequence[str]) -> int | None:
    """Return the bytes that are free for tensors of devices, or `None` if not known.

    Args:
        devices: Sequence of strings. Of GPUs it is not known.
    """
    if any(_compat.device_type(device) != "CPU" for device in devices):
        return None
    found = min(psutil.virtual_memory().available, _left_in_group())
    return int(found)


def _left_in_group() -> float:
    """Bytes until the limit of a container; TensorFlow knows of none."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        return max(limit - used + _cache_of_group(), 0)
    return float("inf")


def _cache_of_group() -> int:
    """Bytes of cached files, which the kernel gives away."""
    lines = (_CGROUP / "memory.stat").read_text().splitlines()
    fields = dict(line.split() for line in lines)
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
