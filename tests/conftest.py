"""Options, markers and the clusters that all tests of a session share."""

from __future__ import annotations

import collections.abc
import os
import tempfile

import pytest

from tests.harness.pool import CaseFailed, ClusterPool
from tests.harness.registry import Case, load_cases

# What was measured on this machine must not decide what the tests see, nor the
# other way round.
_cache = tempfile.TemporaryDirectory(prefix="tfdp-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tfdp")
    group.addoption(
        "--full",
        action="store_true",
        help="run every case on every set-up, not on the covering subset",
    )
    group.addoption(
        "--stock",
        action="store_true",
        help="run the cases under TensorFlow's own strategies: many must fail",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "core: what must hold on every supported version of TensorFlow"
    )


@pytest.fixture
def full(request: pytest.FixtureRequest) -> None:
    """Leaves a test to `--full`: what it shows is not worth its seconds each time."""
    if not request.config.getoption("full"):
        pytest.skip("runs with --full")


@pytest.fixture(scope="session")
def clusters(
    request: pytest.FixtureRequest,
) -> collections.abc.Iterator[ClusterPool]:
    """The clusters on which cases run, one per set-up, started when needed."""
    pool = ClusterPool("stock" if request.config.getoption("stock") else "tfdp")
    request.config.stash[POOL] = pool
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if {"case", "setup_name"} <= set(params):
            names = pool.planned.setdefault(params["case"].name, [])
            names.append(params["setup_name"])
    yield pool
    pool.close()


POOL = pytest.StashKey[ClusterPool]()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """With `-v`, prints the time that the workers spent on each set-up."""
    pool = config.stash.get(POOL, None)
    if pool is None or config.option.verbose < 1:
        return
    totals: dict[str, list[float]] = {}
    for (_, setup_name), seconds in pool.seconds.items():
        totals.setdefault(setup_name, []).append(seconds)
    for setup_name, times in totals.items():
        terminalreporter.write_line(
            f"{setup_name}: {len(times)} cases in {sum(times):.1f} s of a worker"
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes one test of each case of `CASE_MODULES` on each of its set-ups."""
    if not {"case", "setup_name"} <= set(metafunc.fixturenames):
        return
    full = metafunc.config.getoption("full")
    stock = metafunc.config.getoption("stock")
    parameters = []
    for case in load_cases(tuple(metafunc.module.CASE_MODULES)).values():
        for setup_name in case.setups + (case.full_setups if full else ()):
            parameters.append(
                pytest.param(
                    case,
                    setup_name,
                    id=f"{case.name}-{setup_name}",
                    marks=_marks(case, setup_name, stock),
                )
            )
    metafunc.parametrize("case, setup_name", parameters)


def _marks(case: Case, setup_name: str, stock: bool) -> list[pytest.MarkDecorator]:
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
