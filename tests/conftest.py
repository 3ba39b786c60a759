"""Options, markers and the clusters that all tests of a session share."""

from __future__ import annotations

import collections.abc
import gc
import os
import pathlib
import tempfile

import pytest

# Before TensorFlow, so that tests have the same kernels on all processors.
import tfdp  # noqa: F401  # isort: skip
from tests.harness import costs, groups, iterators, tiers
from tests.harness.pool import CaseFailed, ClusterPool
from tests.harness.registry import Case, load_cases

# Modules and tests that are collected stay, so that looking for garbage among them, up
# to `pytest_collection_finish`, takes seconds and finds next to nothing.
gc.disable()
iterators.delete_in_background()

# What was measured on this machine must not decide what the tests see, nor the
# other way round.
_cache = tempfile.TemporaryDirectory(prefix="tfdp-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tfdp")
    tiers.add_options(group)
    group.addoption(
        "--stock",
        action="store_true",
        help="run the cases under TensorFlow's own strategies: many must fail",
    )
    group.addoption(
        "--costs",
        type=pathlib.Path,
        metavar="FILE",
        help="write what each test costs, the dearest first",
    )


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("costs"):
        own = None if hasattr(config, "workerinput") else path
        config.pluginmanager.register(costs.Costs(own))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Chooses the tests of a tier, and puts them in order."""
    tiers.select(config, items)
    groups.order(items)


def pytest_collection_finish() -> None:
    """Leaves what was collected out of all later searches for garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    return groups.make_scheduler(config, log)


@pytest.fixture(scope="session")
def clusters(
    request: pytest.FixtureRequest,
) -> collections.abc.Iterator[ClusterPool]:
    """The clusters on which cases run, one per set-up, started when needed."""
    planned = [
        (params["case"], params["setup_name"])
        for params in map(groups.params_of, request.session.items)
        if {"case", "setup_name"} <= set(params)
    ]
    flavor = "stock" if request.config.getoption("stock") else "tfdp"
    pool = ClusterPool(flavor, planned)
    request.config.stash[costs.POOL] = pool
    yield pool
    pool.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes one test of each case of `CASE_MODULES` on each of its set-ups."""
    modules = getattr(metafunc.module, "CASE_MODULES", None)
    if modules is None or not {"case", "setup_name"} <= set(metafunc.fixturenames):
        return
    stock = metafunc.config.getoption("stock")
    parameters = [
        pytest.param(
            case,
            setup_name,
            id=f"{case.name}-{setup_name}",
            marks=[
                *([] if setup_name == case.quick_setup else [pytest.mark.full]),
                *_expected_failure(case, setup_name, stock),
            ],
        )
        for case in load_cases(tuple(modules)).values()
        for setup_name in case.setups
    ]
    metafunc.parametrize("case, setup_name", parameters)


def _expected_failure(
    case: Case, setup_name: str, stock: bool
) -> list[pytest.MarkDecorator]:
    if stock or case.xfail is None or not case.expected_to_fail(setup_name):
        return []
    return [
        pytest.mark.xfail(
            strict=True,
            run=case.xfail_run,
            raises=(AssertionError, CaseFailed),
            reason=case.xfail,
        )
    ]
