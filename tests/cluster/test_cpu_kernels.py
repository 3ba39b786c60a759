"""oneDNN's kernels: asked for where TensorFlow would go without, unless a user has."""

from __future__ import annotations

import platform
import warnings

import pytest

import tfdp
from tests.harness.commands import run_python
from tfdp.communication.cluster import cpu_kernels
from tfdp.ground import user_code
from tfdp.ground._compat import runtime
from tfdp.ground.onednn import VARIABLE

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="kernels of another processor"
)


@pytest.fixture
def kernels(monkeypatch):
    """A process in which TensorFlow goes without oneDNN, ten times slower."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(runtime, "uses_onednn", lambda: False)
    monkeypatch.setattr(cpu_kernels, "gradient_factor", lambda: 10.2)
    monkeypatch.setattr(cpu_kernels, "is_disabled_by_default", lambda: True)
    user_code.forget_topics()
    yield monkeypatch
    user_code.forget_topics()


@pytest.mark.parametrize(
    ("flags", "before", "expected"),
    [
        ("fpu avx avx2", "", "1"),
        ("fpu avx avx2 avx512f avx512_vnni", "", "None"),
        ("", "", "None"),
        ("fpu avx avx2", f"os.environ['{VARIABLE}'] = '0'", "0"),
        ("fpu avx avx2", "sys.modules['tensorflow'] = sys", "None"),
    ],
)
def test_an_import_asks_for_onednn_before_tensorflow_unless_the_user_has(
    flags, before, expected, tmp_path
):
    cpuinfo = tmp_path / "cpuinfo"
    if flags:
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\n")
    code = f"""
import os, pathlib, sys
own = pathlib.Path({str(cpuinfo)!r})
read = pathlib.Path.open
pathlib.Path.open = lambda path: read(own if str(path) == "/proc/cpuinfo" else path)
os.environ.pop({VARIABLE!r}, None)
{before}
import tfdp
print(os.environ.get({VARIABLE!r}))
"""
    done = run_python("-c", code, deadline_seconds=30)
    assert done.output.split() == [expected]


def test_a_strategy_of_slow_kernels_says_once_what_to_set(kernels):
    with pytest.warns(UserWarning, match="takes 10 times as long") as caught:
        assert [tfdp.MirroredStrategy(["CPU:0"]) for _ in range(2)]
    (said,) = [str(one.message) for one in caught if "oneDNN" in str(one.message)]
    assert f"set {VARIABLE}=1, or import tfdp before" in said
    assert f"takes 10.2 forward passes; set {VARIABLE}=1" in cpu_kernels.describe()


@pytest.mark.parametrize("why", ["decided", "used", "fast", "other"])
def test_nobody_is_told_where_the_user_has_decided_or_nothing_is_slow(kernels, why):
    if why == "decided":
        kernels.setenv(VARIABLE, "0")
    elif why == "used":
        kernels.setattr(runtime, "uses_onednn", lambda: True)
    elif why == "fast":
        kernels.setattr(cpu_kernels, "gradient_factor", lambda: 1.4)
    else:
        kernels.setattr(cpu_kernels, "is_disabled_by_default", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu_kernels.warn_of_slow_kernels()


def test_a_run_that_goes_on_with_other_kernels_is_told_of_its_last_digits(kernels):
    saved = cpu_kernels.versions()
    assert saved == {"oneDNN": "off"}
    assert cpu_kernels.change_since(saved) == cpu_kernels.change_since({}) == ""
    kernels.setattr(runtime, "uses_onednn", lambda: True)
    said = cpu_kernels.change_since(saved)
    assert "saved with oneDNN's kernels off, and continues with them on" in said


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx avx2", "AVX2; TensorFlow's own, oneDNN is off"),
        ("avx avx2 avx512f avx512_vnni avx_vnni amx_tile", "AVX-512, VNNI, AMX; "),
        ("", "TensorFlow's own, oneDNN is off"),
    ],
)
def test_kernels_are_named_with_the_vectors_of_the_processor(kernels, flags, expected):
    kernels.setattr(cpu_kernels, "cpu_flags", lambda: frozenset(flags.split()))
    for said in (cpu_kernels.describe_kernels(), cpu_kernels.describe()):
        assert said.startswith(expected)


def test_a_gradient_is_measured_in_forward_passes():
    assert 0.1 < cpu_kernels.gradient_factor() < 1000
