"""The sides of a benchmark take turns on the machine, block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Runner(Protocol):
    """What runs blocks of steps: a `Side`, or something in its place."""

    name: str

    def run(self, arm: str, steps: int) -> Any:
        """Runs a block of steps and returns what each worker measured."""


def alternate(
    arms: Sequence[tuple[Runner, str]],
    *,
    blocks: int,
    steps: int,
    warm_up: int = 2,
    on_turn: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Runs blocks of all arms in turn, every other time in reverse order.

    Args:
        arms: Sequence of side and name of an arm.
        blocks: Int, how often each arm has its turn.
        steps: Int, steps in a block.
        warm_up: Int, steps of each arm before the first block. Defaults to `2`.
        on_turn: Callable, called after each block. Defaults to nothing.

    Returns:
        Dict from `side/arm` to seconds per step of the slowest worker, one
        value for each block.
    """
    times: dict[str, list[float]] = {f"{side.name}/{arm}": [] for side, arm in arms}
    for side, arm in arms:
        if warm_up:
            side.run(arm, warm_up)  # traces, and fills caches
    for block in range(blocks):
        for side, arm in arms if block % 2 == 0 else reversed(arms):
            times[f"{side.name}/{arm}"].append(max(side.run(arm, steps)))
            on_turn()
    return times


def steps_that_take(
    seconds: float, arms: Sequence[tuple[Runner, str]], most: int = 200
) -> int:
    """Warms all arms up, and finds how many steps make a block.

    Args:
        seconds: Float, how long a block of the slowest arm should take.
        arms: Sequence of side and name of an arm.
        most: Int, the largest result. Defaults to `200`.

    Returns:
        Int, steps of every arm: at least one.
    """
    for side, arm in arms:
        side.run(arm, 1)  # traces
    slowest = max(max(side.run(arm, 2)) for side, arm in arms)
    return max(1, min(most, round(seconds / slowest)))
