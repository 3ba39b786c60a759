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
        setups: Names of the set-ups that it is meant for.
        full_setups: Names of further set-ups, for the full tier.
        quick_setup: Name of the one set-up of the quick tier, or `""`.
        same_as: Name of the case that shows the same in the quick tier, which leaves
            this one out, or `""`.
        full_only: Whether the standard tier leaves it out, too.
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
    full_setups: tuple[str, ...] = ()
    quick_setup: str = ""
    same_as: str = ""
    full_only: bool = False
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

    def tier_on(self, setup_name: str) -> str:
        """The lowest tier that runs it on a set-up.

        In the standard tier a case of the quick one runs on one set-up more, unless
        that is another pair of replicas: that of both kinds, if it has not been on
        it. The others run on one.
        """
        if setup_name == self.quick_setup:
            return "quick"
        if self.full_only:
            return "full"
        if self.quick_setup:
            others = [name for name in self.setups if name != self.quick_setup]
            further = [*(name for name in others if name in BOTH), *others][:1]
            is_standard = setup_name in further and self.setups != PAIR
        else:
            is_standard = setup_name in self.setups[:1]
        return "standard" if is_standard else "full"

    def expected_to_fail(self, setup_name: str) -> bool:
        """Whether the case is expected to fail on this set-up."""
        in_scope = not self.xfail_setups or setup_name in self.xfail_setups
        return self.xfail is not None and in_scope


_CASES: dict[str, Case] = {}

ALL = tuple(setup.name for setup in DISTRIBUTED)
# Enough to tell a local from a global fault: the default of a case.
PAIR = ("mirrored", "two_workers")
# Replicas beside each other and replicas on other workers at once: for what depends
# on neither, and fails on one of the others only if it fails here.
BOTH = ("two_by_two",)


def register(
    name: str,
    function: Function,
    covers: str,
    *,
    setups: tuple[str, ...] = PAIR,
    **options: typing.Any,
) -> None:
    """Adds a case.

    Set-ups that are not given are left to the full tier. In the quick tier the first
    cases of a module take turns at the set-ups, unless they name one (the cheap cases
    the dear set-ups), and the others run in one process.
    """
    if name in _CASES:
        raise ValueError(f"Two cases of one name. Received: name={name!r}")
    module = function.__module__.removeprefix("tests.")
    options.setdefault("full_setups", tuple(s for s in ALL if s not in setups))
    if options.get("same_as"):
        options["quick_setup"] = ""
    elif setups and not options.get("quick_setup"):
        full_setups = options["full_setups"]
        options["quick_setup"] = _quick_setup_of(module, setups, full_setups)
    _CASES[name] = Case(name, function, covers, module, setups, **options)


def _quick_setup_of(
    module: str, setups: tuple[str, ...], full_setups: tuple[str, ...]
) -> str:
    """The set-up of the quick tier: one that the module has not been on, if any."""
    taken = {
        case.quick_setup
        for case in _CASES.values()
        if (case.module, case.setups) == (module, setups)
    }
    for setup in setups:
        if setup not in taken:
            return setup
    # One process costs less than two, and other cases have been on all set-ups.
    others = full_setups if setups == BOTH else ()
    return "mirrored" if "mirrored" in setups + others else setups[0]


def case(covers: str, **options: typing.Any) -> collections.abc.Callable:
    """Registers the decorated function as a case of the same name."""

    def decorate(function: Function) -> Function:
        left_out = vars(function).get("left_out", {})
        register(function.__name__, function, covers, **options | left_out)
        return function

    return decorate


def same_as(other: str, *, full_only: bool = False) -> collections.abc.Callable:
    """Leaves the case to higher tiers, for one of the quick tier that shows the same.

    It stands below `@case`.

    Args:
        other: The name of that case.
        full_only: Whether the standard tier leaves it out, too.
    """

    def decorate(function: Function) -> Function:
        vars(function)["left_out"] = {"same_as": other, "full_only": full_only}
        return function

    return decorate


def load_cases(modules: tuple[str, ...] = MODULES) -> dict[str, Case]:
    """Imports modules of cases and returns their cases by name."""
    for module in modules:
        importlib.import_module(f"tests.{module}")
    return {c.name: c for c in _CASES.values() if c.module in modules}
