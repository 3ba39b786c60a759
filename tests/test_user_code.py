"""Which line of the user's code calls tfdp, and which one started TensorFlow."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading
import types
import warnings
import weakref

import pytest

from tfdp.ground import user_code
from tfdp.ground.forks import Owner

LIBRARY = sysconfig.get_path("purelib") + "/some_library/module.py"


def context_module(*, has_started: bool) -> types.ModuleType:
    """A stand-in for TensorFlow's module, whose context is started or not."""
    module = types.ModuleType(user_code._CONTEXT)

    class Context:
        _initialized = False

        def ensure_initialized(self):
            self._initialized = True

    module.Context = Context
    module._context = Context()
    module._context._initialized = has_started
    return module


def library_function(text: str, **names):
    """A function of an installed package."""
    exec(compile(text, LIBRARY, "exec"), names)
    return names["function"]


@pytest.fixture(autouse=True)
def nothing_started(monkeypatch):
    monkeypatch.setattr(user_code, "_started_at", [])
    monkeypatch.setattr(user_code, "_started_by", [])


def test_the_line_that_starts_tensorflow_is_that_of_the_user_and_not_of_a_library():
    module = context_module(has_started=False)
    user_code._watch(module)
    start = library_function(
        "def function(context): context.ensure_initialized()",
    )
    original = module.Context.ensure_initialized.__wrapped__
    start(module._context)
    assert module._context._initialized
    assert user_code.start_of_tensorflow().endswith(": `start(module._context)`")
    assert __file__ in user_code.start_of_tensorflow()
    # Every operation comes through it: nothing is left in its way.
    assert module.Context.ensure_initialized is original


def test_a_start_before_tfdp_was_imported_is_above_that_line():
    module = context_module(has_started=True)
    original = module.Context.ensure_initialized
    user_code._watch(module)
    assert module.Context.ensure_initialized is original
    text = user_code.start_of_tensorflow()
    assert text.startswith(f"before tfdp was imported at {__file__}:")


def test_a_warning_is_at_the_users_line_under_a_library():
    function = library_function(
        "def function(warn): warn('Mind the gap.')",
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(user_code.warn)
    assert [(w.filename, f"{w.message}") for w in caught] == [
        (__file__, "Mind the gap.")
    ]


def test_a_warning_comes_once_for_each_object_and_topic():
    first, second = Owner(), Owner()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for about in (first, second, first):
            user_code.warn("Mind the gap.", once_for=about)
            user_code.warn(f"Gap {about}.", once_for=about, topic="gap")
        user_code.forget_topics()
        user_code.warn("Mind the gap.", once_for=first)
    texts = [str(w.message) for w in caught]
    assert texts.count("Mind the gap.") == 3
    assert len(texts) == 5
    reference = weakref.ref(second)
    del second, about
    assert reference() is None


def test_a_warning_of_a_thread_is_at_the_line_that_warns():
    function = library_function("def function(warn): warn('Mind the gap.')")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=function, args=(user_code.warn,))
        thread.start()
        thread.join()
    assert [w.filename for w in caught] == [LIBRARY]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/tmp/ipykernel_7/123.py", "line 1 of a cell"),
        ("<ipython-input-3-abc>", "line 1 of a cell"),
        ("<string>", "line 1 of <string>"),
    ],
)
def test_code_in_no_file_is_named_as_what_it_is(name, expected):
    names = {"user_code": user_code, "sys": sys}
    text = "place = user_code.describe_user_line(sys._getframe())"
    exec(compile(text, name, "exec"), names)
    assert names["place"] == expected


def test_importing_tfdp_does_not_import_tensorflow():
    code = "import sys, tfdp; print('tensorflow' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
