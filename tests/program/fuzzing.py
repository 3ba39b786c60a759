"""Random programs on several replicas, each against one device."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.program import random_programs
from tests.program.campaign import EQUAL, ILL, SKIPPED
from tests.program.operations import State
from tests.program.random_programs import EVEN, ODD, Program, batch, initial_weights
from tfdp.ground._compat import graphs, tf_distribute
from tfdp.ground.base.loops import Loop
from tfdp.training.program import step as program_step
from tfdp.training.program.step import DividedStep, rows_of_replica
from tfdp.training.reduction.training_group import training_group

# Rows of each replica, by the number of replicas and the rows of a program.
DIVISIONS: dict[tuple[int, tuple[int, int, int]], tuple[tuple[int, ...], ...]] = {
    (2, ODD): ((7, 6), (13, 0), (1, 0)),
    (2, EVEN): ((7, 5), (12, 0), (1, 1), (2, 0)),
    (4, ODD): ((4, 3, 3, 3), (1, 0, 0, 0), (3, 3, 3, 2)),
    (4, EVEN): ((3, 3, 3, 3), (2, 0, 0, 0), (4, 2, 2, 2)),
}
TOLERANCE, TOLERANCE_FLOAT32 = 1e-9, 1e-5
RATE = 0.125


class _Model:
    """The variables and the optimizer of programs, on one device or on replicas."""

    def __init__(self) -> None:
        self.name = "program"  # As messages name a model.
        self.weights = [
            keras.Variable(value, dtype="float64", name=name)
            for name, value in zip(
                random_programs.WEIGHTS, initial_weights(), strict=True
            )
        ]
        moving = keras.Variable(np.zeros(4), dtype="float64", trainable=False)
        self.state = State(moving, keras.metrics.Sum(dtype="float64"))
        self.optimizer = keras.optimizers.SGD(RATE)
        self.optimizer.build(self.weights)

    def reset(self) -> None:
        """Set all variables to their first values."""
        for variable, value in zip(self.weights, initial_weights(), strict=True):
            variable.assign(value)
        self.state.moving.assign(np.linspace(-0.5, 0.5, 4))
        self.state.total.reset_state()

    def variables(self) -> dict[str, np.ndarray]:
        """Return what all variables hold."""
        found = {
            name: np.array(variable.value)
            for name, variable in zip(
                random_programs.WEIGHTS, self.weights, strict=True
            )
        }
        found["moving"] = np.array(self.state.moving.value)
        found["total"] = np.array(self.state.total.result())
        return found


class OneDevice:
    """Programs as one device computes them."""

    def __init__(self) -> None:
        self.model = _Model()

    def compose(self, seed: int, rows: tuple[int, int, int] = ODD) -> Program:
        """Compose a program from a seed."""
        self.model.reset()
        return random_programs.compose(seed, self.model.state, rows)

    def run(
        self, program: Program, inputs: Sequence[Any], noise: Any = None
    ) -> dict[str, np.ndarray]:
        """Return the loss, the logs and the variables after a step."""
        self.model.reset()
        gradients, loss, logs = random_programs.loss_and_logs(
            program, inputs, self.model.weights, self.model.state, noise
        )
        for variable, gradient in zip(self.model.weights, gradients, strict=True):
            variable.assign_sub(RATE * gradient)
        found = {"loss": np.array(loss)}
        found.update({name: np.array(value) for name, value in logs.items()})
        return found | self.model.variables()

    def is_well_conditioned(self, program: Program, inputs: Sequence[Any]) -> bool:
        """Return whether rounding changes a program's results no more than rounding."""
        exact = self.run(program, inputs)
        r = np.random.default_rng(0)

        def noise(value: Any) -> Any:
            return value * (1 + 1e-13 * r.normal(size=value.shape))

        return all(
            not differences(self.run(program, inputs, noise), exact, 1e-8)
            for _ in range(3)
        )


class Replicas:
    """Programs as a number of replicas of this process computes them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.strategy = tfdp.MirroredStrategy([f"CPU:{i}" for i in range(count)])
        with self.strategy.scope():
            self.model = _Model()
        self.decisions: list[tuple[str, bool]] = []

    def prepare(
        self, program: Program
    ) -> Callable[[Sequence[Any], Sequence[int]], Any]:
        """Return a function of inputs and rows of each replica, traced once."""
        strategy, model = self.strategy, self.model

        def step(*inputs: Any) -> Any:
            gradients, loss, logs = random_programs.loss_and_logs(
                program, inputs, model.weights, model.state
            )
            model.optimizer.apply(gradients, model.weights)
            return {"loss": loss, **logs}

        divided = DividedStep(strategy, Loop(model, "fit"), step)

        def replica(*inputs: Any) -> Any:
            group = training_group(strategy)
            rows = rows_of_replica(group, inputs, None, {}, are_alike=False)
            with graphs.independent_side_effects():  # as in Keras's loops
                return divided(inputs, group, rows)

        kinds = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in batch(1)]

        @tf.function(input_signature=kinds * self.count, autograph=False)
        def run(*flat: Any) -> Any:
            args = [
                tf_distribute.per_replica(list(flat[i :: len(kinds)]))
                for i in range(len(kinds))
            ]
            outputs = strategy.run(replica, args=tuple(args))
            tail = divided.tail
            assert tail is not None
            values = [list(strategy.experimental_local_results(x)) for x in outputs]
            return tail.compute(values, lambda sums: [tf.add_n(own) for own in sums])

        def run_divided(inputs: Sequence[Any], rows: Sequence[int]) -> Any:
            begins = np.cumsum([0, *rows])
            model.reset()
            found = run(
                *(x[a:b] for a, b in itertools.pairwise(begins) for x in inputs)
            )
            logs = {name: np.array(value) for name, value in found.items()}
            return logs | model.variables() | self._drift()

        return run_divided

    def _drift(self) -> dict[str, np.ndarray]:
        """Return the name of a variable that differs between replicas, if any does."""
        names = [*random_programs.WEIGHTS, "moving"]
        for name, variable in zip(
            names, [*self.model.weights, self.model.state.moving], strict=True
        ):
            first, *others = (
                np.array(own)
                for own in self.strategy.experimental_local_results(variable.value)
            )
            if any(not np.array_equal(first, other) for other in others):
                return {f"{name} of replicas": np.array(np.nan)}
        return {}


def differences(
    found: dict[str, np.ndarray], exact: dict[str, np.ndarray], tolerance: float
) -> list[str]:
    """Return the names of results that differ."""
    return [
        name
        for name in found
        if name not in exact or not _is_equal(found[name], exact[name], tolerance)
    ]


def _is_equal(found: np.ndarray, exact: np.ndarray, tolerance: float) -> bool:
    if found.shape != exact.shape:
        return False
    if not exact.size:
        return True
    if exact.dtype.kind != "f":
        return bool(np.array_equal(found, exact))
    error = np.max(np.abs(found - exact)) / max(np.max(np.abs(exact)), 1e-3)
    return bool(error <= tolerance)


@dataclasses.dataclass
class Outcome:
    """What came of a program.

    Args:
        result: String: `EQUAL`, `SKIPPED`, `ILL`, or what is wrong.
        details: String, a traceback or the results that differ.
    """

    result: str
    details: str = ""


class Campaign:
    """Random programs, one after another.

    Args:
        counts: Sequence of ints, numbers of replicas. Programs take turns in them.
    """

    def __init__(self, counts: Sequence[int] = (2, 4, 2, 2)) -> None:
        self.counts = counts
        self.one = OneDevice()
        self.replicas = functools.cache(Replicas)
        # How often each operation of TensorFlow occurred, and ran whole.
        self.occurred: collections.Counter[str] = collections.Counter()
        self.ran_whole: collections.Counter[str] = collections.Counter()

    def compose(self, seed: int) -> tuple[Program, list[tuple[int, int, int]]]:
        """Compose the program of a seed; return the batches that it is for, too."""
        rows = ODD if seed % 3 else EVEN
        return self.one.compose(seed, rows), [rows]

    def count_of(self, seed: int) -> int:
        """Return the number of replicas on which the program of a seed runs."""
        return self.counts[seed % len(self.counts)]

    def run(
        self, program: Program, count: int, tried: Sequence[tuple] = (ODD, EVEN)
    ) -> Outcome:
        """Compare a program on some replicas with one device.

        Args:
            program: `Program`.
            count: Int, number of replicas.
            tried: Sequence of `ODD` and `EVEN`. Batches that the program fails on are
                left out.
        """
        divisions = [rows for kind in tried for rows in DIVISIONS[count, kind]]
        exact, failed = {}, Outcome(SKIPPED)
        for rows in sorted({sum(rows) for rows in divisions}):
            try:
                found = self.one.run(program, batch(rows))
            except (tf.errors.OpError, ValueError, TypeError, IndexError) as error:
                failed = Outcome(SKIPPED, str(error))
                continue
            if all(_is_finite(value) for value in found.values()):
                exact[rows] = found
        divisions = [rows for rows in divisions if sum(rows) in exact]
        return self._compare(program, count, divisions, exact) if divisions else failed

    def _compare(
        self, program: Program, count: int, divisions: list, exact: dict
    ) -> Outcome:
        try:
            with self._counted():
                run = self.replicas(count).prepare(program)
                results = [(rows, run(batch(sum(rows)), rows)) for rows in divisions]
        except Exception as error:  # noqa: BLE001  what a program raises is its result
            details = "".join(traceback.format_exception(error))
            return Outcome(f"{type(error).__name__}", details[-3000:])
        is_float32 = any(step.name == "through_float32" for step in program.steps)
        tolerance = TOLERANCE_FLOAT32 if is_float32 else TOLERANCE
        for rows, found in results:
            names = differences(found, exact[sum(rows)], tolerance)
            if not names:
                continue
            if not self.one.is_well_conditioned(program, batch(sum(rows))):
                return Outcome(ILL)
            text = "\n".join(
                f"{n}: {found[n]!r} for {exact[sum(rows)].get(n)!r}" for n in names
            )
            return Outcome("differs", f"rows {rows}: {text[:2000]}")
        return Outcome(EQUAL)

    def _counted(self) -> Any:
        """Count the decisions of the programs that are planned inside."""
        return _CountedDecisions(self.occurred, self.ran_whole)


class _CountedDecisions:
    def __init__(self, occurred: Any, ran_whole: Any) -> None:
        self._occurred, self._ran_whole = occurred, ran_whole

    def __enter__(self) -> None:
        self._make_plan = program_step.make_plan
        program_step.make_plan = self._counting

    def __exit__(self, *_: Any) -> None:
        program_step.make_plan = self._make_plan

    def _counting(self, *args: Any) -> Any:
        plan = self._make_plan(*args)
        self._count(plan)
        return plan

    def _count(self, plan: Any) -> None:
        for op in plan.live:
            decision = plan.decisions.get(op)
            if decision is None or op.type in ("Const", "Placeholder"):
                continue
            self._occurred[op.type] += 1
            self._ran_whole[op.type] += decision.is_whole
            for inner in decision.plans:
                self._count(inner)


def _is_finite(value: np.ndarray) -> bool:
    return value.dtype.kind != "f" or bool(np.isfinite(value).all())
