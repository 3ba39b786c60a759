"""Faults within a collective: its arrays travel in small pieces, which are counted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.faults.faulty import Trigger

# So that a small model's gradients go through all phases of a ring.
_PIECE_BYTES = 64
# Before it, workers agree on other things, and trace.
_FIRST_STEP = 3


def install(trigger: Trigger) -> None:
    """Changes tfdp's transport in this process, which has this job only.

    Args:
        trigger: `Trigger`, which is told of each piece of data that moves.
    """
    from tfdp.communication.transport import (
        SharedMemoryCommunicator,
        SocketCommunicator,
        flows,
    )

    def reach() -> None:
        if trigger.count("training") >= _FIRST_STEP:
            trigger.reach("collective")

    def counted(flow: Any, move: Callable[[Any], bool]) -> bool:
        has_moved = move(flow)
        if has_moved:
            reach()
        return has_moved

    exchange_ready_messages = SharedMemoryCommunicator._exchange_ready_messages

    def counted_messages(*args: Any) -> None:
        reach()
        exchange_ready_messages(*args)

    for kind, sizes in (
        (SocketCommunicator, {"segment_bytes": _PIECE_BYTES}),
        # Those of both members.
        (SharedMemoryCommunicator, {"chunks_bytes": 2 * _PIECE_BYTES}),
    ):
        small = sizes | {"small_bytes": _PIECE_BYTES}
        _replace(kind, "__init__", functools.partialmethod(kind.__init__, **small))
    _replace(SharedMemoryCommunicator, "_exchange_ready_messages", counted_messages)
    for name in ("push", "pull"):
        move = getattr(flows.Flow, name)
        _replace(flows.Flow, name, functools.partialmethod(counted, move))


def _replace(kind: type, name: str, value: Any) -> None:
    setattr(kind, name, value)
