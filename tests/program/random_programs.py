"""Random programs: composed from a seed, computed, and made smaller."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.program.operations import BOOL, FLOAT, INT, OPERATIONS, Known, State

# Rows with which a program is tried while it is composed. Sizes that differ between
# the first two depend on the rows. With even numbers, axes of rows can be halved.
ODD, EVEN = (13, 11, 1), (12, 10, 2)
LENGTHS = (6, 12, 25, 50)
_MAX_ELEMENTS = 1500
_LARGEST = 60.0
_KINDS = {"float64": FLOAT, "int32": INT, "bool": BOOL}
INPUTS = ("x", "y", "v", "k", "m", "n")
WEIGHTS: dict[str, tuple[int, ...]] = {
    "kernel": (4, 4),
    "bias": (4,),
    "table": (3, 4),
    "scale": (1, 3, 1),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation of a program.

    Args:
        name: String, its key in `OPERATIONS`.
        inputs: Tuple of ints, the values that it reads.
        arguments: Dict, its arguments.
    """

    name: str
    inputs: tuple[int, ...]
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program: inputs, weights, a value for each step, and a loss.

    Args:
        steps: Tuple of `Step`. Step number i gives the value `FIRST + i`.
        losses: Tuple of pairs of a value and `"mean"`, `"sum"` or `"squares"`.
        logs: Tuple of values that are logged.
        by_inputs: Bool, whether the gradient by an input is logged.
    """

    steps: tuple[Step, ...]
    losses: tuple[tuple[int, str], ...]
    logs: tuple[int, ...] = ()
    by_inputs: bool = False


FIRST = len(INPUTS) + len(WEIGHTS)
Noise = Callable[[tf.Tensor], tf.Tensor]


def batch(rows: int, seed: int = 0) -> list[np.ndarray]:
    """Return the inputs of a program."""
    r = np.random.default_rng(1000 * seed + rows)
    return [
        r.normal(size=(rows, 3, 4)),
        r.normal(size=(rows, 4)),
        r.normal(size=rows),
        r.integers(0, 4, rows).astype("int32"),
        r.random((rows, 3)) > 0.4,
    ]


def initial_weights() -> list[np.ndarray]:
    """Return the weights that programs begin with."""
    r = np.random.default_rng(7)
    return [r.normal(size=shape) * 0.6 for shape in WEIGHTS.values()]


def values_of(inputs: Sequence[Any], weights: Sequence[Any], state: State) -> list[Any]:
    """Return the values that a program begins with."""
    found = [tf.convert_to_tensor(value) for value in inputs]
    return [*found, tf.shape(found[0])[0], *map(tf.convert_to_tensor, weights)]


def apply(step: Step, values: Sequence[Any], state: State) -> Any:
    """Compute one step."""
    operation = OPERATIONS[step.name]
    given = [values[index] for index in step.inputs]
    first = [state] if operation.needs_state else []
    return operation.apply(*first, *given, **step.arguments)


def loss_and_logs(
    program: Program,
    inputs: Sequence[Any],
    weights: Sequence[Any],
    state: State,
    noise: Noise | None = None,
) -> tuple[list[Any], Any, dict[str, Any]]:
    """Compute a program.

    Args:
        program: `Program`.
        inputs: Sequence of tensors.
        weights: Sequence of Keras variables.
        state: `State`.
        noise: Callable that changes each result, or `None`.

    Returns:
        Tuple of gradients by the weights, the loss and the logs.
    """
    inputs = [tf.convert_to_tensor(value) for value in inputs]
    watched = [v.value for v in weights]
    with tf.GradientTape() as tape:
        tape.watch(inputs[0])
        values = values_of(inputs, watched, state)
        for step in program.steps:
            found = apply(step, values, state)
            if noise is not None and found.dtype.is_floating:
                found = noise(found)
            values.append(found)
        loss = _loss(program, values)
    sources = [*watched, inputs[0]]
    gradients = tape.gradient(loss, sources)
    gradients = [
        tf.zeros_like(source) if gradient is None else tf.convert_to_tensor(gradient)
        for source, gradient in zip(sources, gradients, strict=True)
    ]
    logs = {f"value {index}": values[index] for index in program.logs}
    if program.by_inputs:
        logs["gradient by x"] = gradients[-1]
    return gradients[:-1], loss, logs


def _loss(program: Program, values: Sequence[Any]) -> Any:
    total = tf.zeros([], tf.float64)
    for index, kind in program.losses:
        value = values[index]
        if kind == "squares":
            total += tf.reduce_mean(tf.square(value))
        else:
            total += tf.reduce_mean(value) if kind == "mean" else tf.reduce_sum(value)
    return total


# Composition.


class _Trial:
    """One batch on which a program is computed while it is composed."""

    def __init__(self, rows: int, state: State, weights: Sequence[Any]) -> None:
        self.rows = rows
        self.state = state
        self.values = values_of(batch(rows), weights, state)

    def result(self, step: Step) -> Any:
        """Compute a step, or return `None` if its result is of no use."""
        found = apply(step, self.values, self.state)
        if found.shape.num_elements() > _MAX_ELEMENTS or len(found.shape) > 4:
            return None
        if found.dtype.is_floating and found.shape.num_elements():
            largest = float(tf.reduce_max(tf.abs(found)))
            return found if largest < _LARGEST else None
        return found


def compose(seed: int, state: State, rows: tuple[int, int, int] = ODD) -> Program:
    """Compose a program.

    Args:
        seed: Int.
        state: `State`, which is assigned to.
        rows: Tuple of three ints, the rows with which it is tried.
    """
    r = random.Random(seed)
    length = r.choice(LENGTHS)
    weights = initial_weights()
    trials = [_Trial(count, state, weights) for count in rows]
    pool = [_known(trials, index) for index in range(FIRST)]
    names = [name for name, entry in OPERATIONS.items() for _ in range(entry.weight)]
    steps: list[Step] = []
    for _ in range(20 * length):
        if len(steps) == length:
            break
        name = r.choice(names)
        chosen = OPERATIONS[name].choose(r, pool)
        if chosen is None:
            continue
        step = Step(name, tuple(chosen[0]), chosen[1])
        results = _results(trials, step)
        if results is None:
            continue
        for trial, result in zip(trials, results, strict=True):
            trial.values.append(result)
        steps.append(step)
        pool.append(_known(trials, len(pool)))
    return _with_loss(r, steps, pool)


def _results(trials: Sequence[_Trial], step: Step) -> list[Any] | None:
    found = []
    for trial in trials:
        try:
            result = trial.result(step)
        except (tf.errors.OpError, ValueError, TypeError, IndexError):
            return None
        if result is None or str(result.dtype.name) not in _KINDS:
            return None
        found.append(result)
    if len({len(result.shape) for result in found}) > 1:
        return None
    return found


def _known(trials: Sequence[_Trial], index: int) -> Known:
    first, second = (trial.values[index] for trial in trials[:2])
    rows = trials[0].rows, trials[1].rows
    shape = tuple(
        _size(sizes, rows) for sizes in zip(first.shape, second.shape, strict=True)
    )
    return Known(_KINDS[first.dtype.name], shape)


def _size(sizes: tuple[int, int], rows: tuple[int, int]) -> Any:
    if sizes[0] == sizes[1]:
        return sizes[0]
    if sizes[0] * rows[1] == sizes[1] * rows[0]:
        return f"{sizes[0] / rows[0]} rows"
    return f"{sizes[0]} or {sizes[1]}"


def _with_loss(r: random.Random, steps: list[Step], pool: list[Known]) -> Program:
    used = {index for step in steps for index in step.inputs}
    floats = [i for i in range(FIRST, len(pool)) if pool[i].dtype == FLOAT]
    last = [i for i in floats if i not in used]
    chosen = last if len(last) < 8 else r.sample(last, 8)
    chosen += r.sample(floats, min(1, len(floats)))
    losses = tuple((i, r.choice(("mean", "sum", "squares"))) for i in chosen)
    others = list(range(FIRST, len(pool)))
    logs = tuple(sorted(r.sample(others, min(len(others), r.randrange(3)))))
    return Program(tuple(steps), losses, logs, r.random() < 0.3)


# Minimisation.


def minimise(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Leave out what a program fails without.

    Args:
        program: `Program` that fails.
        fails: Callable of a program.
    """
    found = True
    while found:
        found = False
        for smaller in _smaller(program):
            if fails(smaller):
                program, found = smaller, True
                break
    return program


def _smaller(program: Program) -> list[Program]:
    options = []
    if len(program.logs):
        options.append(dataclasses.replace(program, logs=()))
    if program.by_inputs:
        options.append(dataclasses.replace(program, by_inputs=False))
    if len(program.losses) > 1:
        options += [
            dataclasses.replace(program, losses=(loss,)) for loss in program.losses
        ]
    if program.losses and (program.logs or program.by_inputs):
        options.append(dataclasses.replace(program, losses=()))
    options = [_without_unused(option) for option in options]
    unused = _without_unused(program)
    if len(unused.steps) < len(program.steps):
        options.insert(0, unused)
    for number in range(len(program.steps)):
        options += _with_input_for(program, number)
    return options


def _without_unused(program: Program) -> Program:
    needed = {index for index, _ in program.losses} | set(program.logs)
    kept = []
    for number in reversed(range(len(program.steps))):
        step = program.steps[number]
        if FIRST + number in needed or OPERATIONS[step.name].needs_state:
            needed |= set(step.inputs)
            kept.append(number)
    return _renumbered(program, kept[::-1], {})


def _with_input_for(program: Program, number: int) -> list[Program]:
    """Return programs without a step, with one of its inputs in its place."""
    kept = [i for i in range(len(program.steps)) if i != number]
    inputs = dict.fromkeys(program.steps[number].inputs)
    return [_renumbered(program, kept, {FIRST + number: own}) for own in inputs]


def _renumbered(
    program: Program, kept: Sequence[int], instead: dict[int, int]
) -> Program:
    places = {index: index for index in range(FIRST)}
    places.update({FIRST + number: FIRST + i for i, number in enumerate(kept)})

    def place(index: int) -> int:
        return places[instead.get(index, index)]

    steps = tuple(
        dataclasses.replace(
            program.steps[number],
            inputs=tuple(place(index) for index in program.steps[number].inputs),
        )
        for number in kept
    )
    return dataclasses.replace(
        program,
        steps=steps,
        losses=tuple((place(index), kind) for index, kind in program.losses),
        logs=tuple(sorted({place(index) for index in program.logs})),
    )


def written(program: Program) -> str:
    """Return the expression that makes a program."""
    steps = ", ".join(
        f"Step({s.name!r}, {s.inputs}, {s.arguments})" for s in program.steps
    )
    comma = "," if len(program.steps) == 1 else ""
    return (
        f"Program(({steps}{comma}), {program.losses}, {program.logs}, "
        f"{program.by_inputs})"
    )
