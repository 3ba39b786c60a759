"""A case: one function, run identically on every set-up."""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import pathlib
import typing

from tests.harness.setups import DISTRIBUTED

Function = collections.abc.Callable[[typing.Any], dict]

ROOT = pathlib.Path(__file__).resolve().parents[2]
# `step.cases_accumulation` is tests/step/cases_accumulation.py.
MODULES: tuple[str, ...] = tuple(
    f"{path.parent.name}.{path.stem}"
    for path in sorted((ROOT / "tests").glob("*/cases_*.py"))
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A named pure function and how its results are to be compared.

    Args:
        name: The name in test ids.
        function: Takes an `Env`, returns a nest of dicts, arrays and numbers.
        covers: One line: which row of the table of behaviours it covers.
        module: The module that holds it, as in `MODULES`.
        setups: Names of the set-ups that it runs on in the full tier.
        quick_setup: Name of the one set-up of the quick tier, or `""`.
        same_as: Name of a case of the same feature in the quick tier, which leaves this
            one out, or `""`.
        compare: Whether results are compared with those of one device.
        reference_last: Run the reference after each set-up, in its directory,
            so that it can open the files that the set-up wrote.
        fresh: Whether it has processes of its own and no seed is set in them.
        side_by_side: Whether it may run while other cases do.
        tol: Largest error of a tensor.
        skip: Names (`fnmatch` patterns) left out, each with the reason.
        xfail: Why it is expected to fail, or `None`.
        xfail_setups: Names of the set-ups of which `xfail` speaks; all if empty.
        xfail_run: Whether it is run in spite of being expected to fail.
        deadline_seconds: After this time the whole cluster is killed.
    """

    name: str
    function: Function
    covers: str
    module: str
    setups: tuple[str, ...]
    quick_setup: str = ""
    same_as: str = ""
    compare: bool = True
    reference_last: bool = False
    fresh: bool = False
    side_by_side: bool = True
    tol: float = 1e-5
    skip: dict[str, str] = dataclasses.field(default_factory=dict)
    xfail: str | None = None
    xfail_setups: tuple[str, ...] = ()
    xfail_run: bool = True
    deadline_seconds: float = 120.0

    def expected_to_fail(self, setup_name: str) -> bool:
        """Whether the case is expected to fail on this set-up."""
        in_scope = not self.xfail_setups or setup_name in self.xfail_setups
        return self.xfail is not None and in_scope


_CASES: dict[str, Case] = {}

ALL = tuple(setup.name for setup in DISTRIBUTED)


def register(
    name: str,
    function: Function,
    covers: str,
    *,
    setups: tuple[str, ...] = ALL,
    quick_setup: str = "",
    same_as: str = "",
    **options: typing.Any,
) -> None:
    """Adds a case.

    The quick tier runs it on the first of its set-ups (of `ALL` that costs least),
    unless `quick_setup` names another one or `same_as` another case.
    """
    if name in _CASES:
        raise ValueError(f"Two cases of one name. Received: name={name!r}")
    module = function.__module__.removeprefix("tests.")
    quick_setup = "" if same_as or not setups else quick_setup or setups[0]
    _CASES[name] = Case(
        name, function, covers, module, setups, quick_setup, same_as, **options
    )


def case(covers: str, **options: typing.Any) -> collections.abc.Callable:
    """Registers the decorated function as a case of the same name."""

    def decorate(function: Function) -> Function:
        left_out = vars(function).get("left_out", {})
        register(function.__name__, function, covers, **options | left_out)
        return function

    return decorate


def same_as(other: str) -> collections.abc.Callable:
    """Leaves the case to the full tier, for a quick one of the same feature.

    It stands below `@case`.

    Args:
        other: The name of that case.
    """

    def decorate(function: Function) -> Function:
        vars(function)["left_out"] = {"same_as": other}
        return function

    return decorate


def load_cases(modules: tuple[str, ...] = MODULES) -> dict[str, Case]:
    """Imports modules of cases and returns their cases by name."""
    for module in modules:
        importlib.import_module(f"tests.{module}")
    return {c.name: c for c in _CASES.values() if c.module in modules}
