"""Checks of a planned step, before any replica waits for another one.

The first step of each loop of a model is compared between workers. Its gathers are
reported once; they are an error if options forbid them or memory is too small.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tfdp.communication.coordination.checks import check_same_program
from tfdp.ground import user_code
from tfdp.ground._compat import runtime
from tfdp.ground.base.loops import Loop
from tfdp.ground.base.memory import free_bytes
from tfdp.ground.plans.gathers import StepGathers, megabytes
from tfdp.training.program.gathers import (
    Conversion,
    describe_operation,
    fingerprint_of,
    gathers_of,
)

_log = logging.getLogger("tfdp")
# A gather holds two copies of its tensor at the same time: the rows of all replicas,
# padded to one length, and the tensor that is built from them.
_COPIES = 2


def check_step(
    strategy: Any,
    loop: Loop,
    conversions: list[Conversion],
    ids_in_update: set[int],
    operations: list[tuple[str, Any]],
    rows: int | None,
) -> None:
    """Compare a loop's first step between workers, and check what a step gathers.

    What it gathers is stored in `extended.step_gathers`. A warning names large gathers.

    Args:
        strategy: A tfdp strategy.
        loop: `Loop` of Keras that runs the step.
        conversions: List of `Conversion`, each a tensor that is gathered or summed over
            replicas, in the order of the program.
        ids_in_update: Set of the `id`s of tensors that the update gathers, rows of
            sparse gradients. No operation needs them, so they are not reported.
        operations: List of pairs of a signature and an operation, see
            `tfdp.training.program.gathers.operations_of`.
        rows: Int, number of rows of a global batch, or `None` if not known.

    Raises:
        ValueError: On every worker, if steps differ between workers, if a gathered
            tensor would not fit in memory, or if options forbid gathers.
    """
    extended = strategy.extended
    reported = [c for c in conversions if id(c.tensor) not in ids_in_update]
    gathers = StepGathers(rows, gathers_of(reported))
    gathers_by_loop = extended.step_gathers.setdefault(loop.model, {})
    available = available_bytes(extended.worker_devices)
    # Workers compare only the first step of a loop, which all of them trace. Later, a
    # batch of another size may make only some workers trace again, and a comparison
    # waits for all.
    if loop.name not in gathers_by_loop:
        available = check_same_program(
            extended.worker_group,
            f"the first step of `{loop.name}`",
            fingerprint_of(conversions),
            [signature for signature, _ in operations],
            lambda index: describe_operation(operations[index][1]),
            available,
        )
    gathers_by_loop[loop.name] = gathers
    in_memory = StepGathers(rows, gathers_of(conversions))
    _check_memory(loop, in_memory, extended.num_local, available)
    if extended.options.gathers == "error" and gathers.large:
        raise ValueError(
            f"{_describe_gathers(loop, gathers, gathers.large)}. "
            '`CommunicationOptions(gathers="error")` forbids gathers. Change these '
            "lines (see docs/one_program.md), or remove the option."
        )
    _warn_of_gathers(strategy, loop, gathers)


def check_exchange(loop: Loop, conversions: list[Conversion]) -> None:
    """Check that a step with a `GradientExchange` does not wait for all workers.

    A `GradientExchange` sums gradients without waiting for all workers, but a
    conversion in the step would wait for all of them.

    Args:
        loop: `Loop` of Keras that runs the step.
        conversions: List of `Conversion` (tensors that are gathered or summed over
            replicas), without those of the update.

    Raises:
        ValueError: If the loop has a `GradientExchange`, and the list is not empty.
    """
    if loop.exchange is None or not conversions:
        return
    places = list(dict.fromkeys(describe_operation(c.op) for c in conversions))
    raise ValueError(
        f"{loop.exchange.label} needs steps that wait for other workers only to sum "
        f"gradients, but a step of `{loop.name}` of {loop.model.name!r} needs values "
        f"of the whole batch for {', '.join(places[:3])}. Change these lines (see "
        "docs/one_program.md), or remove the option."
    )


def _describe_gathers(loop: Loop, gathers: StepGathers, listed: Any) -> str:
    """Return the sentence of a message that lists gathers of a step.

    Args:
        loop: `Loop` of Keras that runs the step.
        gathers: `StepGathers` of the step.
        listed: Sequence of the `Gather`s of the step to list.
    """
    return (
        f"A step of `{loop.name}` of {loop.model.name!r} gathers what operations need "
        f"of the whole batch: {gathers.describe(listed)}"
    )


def _warn_of_gathers(strategy: Any, loop: Loop, gathers: StepGathers) -> None:
    """Warn on the first worker, once per user's line and model, of large gathers."""
    topics = {f"{g.operation} {g.place}" for g in gathers.large}
    unread = {topic for topic in topics if user_code.record_if_new(topic, loop.model)}
    new = [g for g in gathers.large if f"{g.operation} {g.place}" in unread]
    if new and strategy.extended.worker_group.is_chief:
        _log.warning(
            "tfdp: %s. The result is that of one device; each replica computes these "
            "operations for the whole batch. docs/one_program.md says how to avoid it.",
            _describe_gathers(loop, gathers, new),
        )


def _check_memory(
    loop: Loop, gathers: StepGathers, num_local: int, available: int | None
) -> None:
    """Check that the largest gather of a step fits in memory.

    Args:
        loop: `Loop` of Keras that runs the step.
        gathers: `StepGathers` of the step.
        num_local: Int, number of local replicas, which gather at the same time.
        available: Int, free memory in bytes, or `None` if not known: nothing is
            checked.

    Raises:
        ValueError: If it does not fit.
    """
    if available is None or gathers.largest is None:
        return
    num_bytes, gather = gathers.largest
    needed = _COPIES * num_bytes * num_local
    if needed > available:
        raise ValueError(
            f"A step of `{loop.name}` of {loop.model.name!r} cannot gather "
            f"{gather.describe(gathers.rows)}: each worker needs {megabytes(needed)}, "
            f"but has {megabytes(available)} free. Use a smaller batch, or change that "
            "line (see docs/one_program.md)."
        )


def available_bytes(devices: Sequence[str]) -> int | None:
    """Return the free memory for tensors on devices in bytes, or `None` if not known.

    Args:
        devices: Sequence of strings, names of devices. The result is `None` unless all
            are CPUs.
    """
    if any(runtime.device_type(device) != "CPU" for device in devices):
        return None
    return free_bytes()
