"""The table of what tfdp replaces in Keras and TensorFlow, and that nothing else is.

Where a new release fails here, the sentence names the function, how it has changed and
what takes its place.
"""

from __future__ import annotations

import ast
import configparser
import functools
import inspect
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.ground._compat import owners, patches
from tfdp.training.keras_hooks.install import REPLACEMENTS, install

pytestmark = pytest.mark.core

SOURCE = pathlib.Path(tfdp.__file__).parent
TABLE = SOURCE / "training" / "keras_hooks" / "install.py"
ISSUE = re.compile(r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+")
# The versions on which the signatures of the table were read.
CHECKED_ON = {"keras": "Keras 3.12 to 3.15", "tensorflow": "TensorFlow 2.19 to 2.21"}
VERSIONS = re.compile(r"(Keras|TensorFlow) (\d+\.\d+) to \d+\.\d+")


# Each function of the table with its parameters; a line for each form that it has.
SIGNATURES = pathlib.Path(__file__).with_name("signatures.txt").read_text("utf-8")


def test_each_signature_is_of_the_table():
    paths = [path_of(entry) for entry in REPLACEMENTS]
    calls = {f"{p.rpartition('.')[0]}.{call}" for p in paths for call in calls_of(p)}
    assert set(SIGNATURES.splitlines()) == calls


def calls_of(path: str) -> list[str]:
    """Forms of a function of the table, such as `"fit(self, x, *args, **kwargs)"`."""
    owner, _, name = path.rpartition(".")
    lines = [line.removeprefix(f"{owner}.") for line in SIGNATURES.splitlines()]
    return [line for line in lines if line.startswith(f"{name}(")]


def path_of(entry: patches.Replacement) -> str:
    """The function's name with those of its module and class."""
    module = getattr(entry.owner, "__module__", None)
    names = (module, entry.owner.__name__, entry.name)
    return ".".join(name for name in names if name)


def entry_of(path: str) -> patches.Replacement:
    return next(entry for entry in REPLACEMENTS if path_of(entry).endswith(path))


def change_of(entry: patches.Replacement, calls: list[str]) -> str:
    """Describe how a function differs from the one that a replacement is written for.

    Args:
        entry: `Replacement`.
        calls: List of the function's name and parameters on the supported versions.

    Returns:
        String, one sentence; empty where the function's parameters are as recorded.
    """
    found, path = call_of(entry.owner, entry.name), path_of(entry)
    if found in calls:
        return ""
    library = path.partition(".")[0]
    version = {"keras": f"Keras {keras.__version__}"}.get(
        library, f"TensorFlow {tf.__version__}"
    )
    now = f"is now `{found}`" if found else "is gone"
    function = getattr(entry.function, "func", entry.function)
    return (
        f"`{path}` {now} in {version}, and was `{' | '.join(calls)}` in "
        f"{CHECKED_ON[library]}: adapt `{function.__module__}.{function.__name__}`, "
        "which takes its place, then its line in tests/keras_hooks/signatures.txt."
    )


def call_of(owner: Any, name: str) -> str:
    """A function's name and the names of its parameters, or nothing."""
    function = patches._function_of(owner, name)
    if function is None:
        return ""
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    # Follows `__wrapped__`, past what tfdp has put in its place.
    parameters = inspect.signature(function).parameters.values()
    names = [stars.get(p.kind.name, "") + p.name for p in parameters]
    return f"{name}({', '.join(names)})"


@pytest.mark.parametrize("entry", REPLACEMENTS, ids=path_of)
def test_each_replaced_function_has_the_parameters_it_was_written_for(entry):
    change = change_of(entry, calls_of(path_of(entry)))
    assert not change, change


def test_a_changed_signature_is_told_in_one_sentence(monkeypatch):
    def apply(self: Any, grads: Any, scale: Any = None, **kwargs: Any) -> Any:
        return grads

    monkeypatch.setattr(owners.BaseOptimizer, "apply", apply)
    entry = entry_of("BaseOptimizer.apply")
    change = change_of(entry, calls_of(path_of(entry)))
    assert change == (
        "`keras.src.optimizers.base_optimizer.BaseOptimizer.apply` is now "
        f"`apply(self, grads, scale, **kwargs)` in Keras {keras.__version__}, and was "
        "`apply(self, grads, trainable_variables)` in Keras 3.12 to 3.15: adapt "
        "`tfdp.training.keras_hooks.optimizer_hooks.apply`, which takes its place, "
        "then its line in tests/keras_hooks/signatures.txt."
    )


def test_a_function_that_is_gone_is_told_in_one_sentence(monkeypatch):
    monkeypatch.delattr(owners.keras_trainer, "reduce_per_replica")
    change = change_of(entry_of("trainer.reduce_per_replica"), [])
    assert "reduce_per_replica` is gone in Keras" in change
    assert (
        "adapt `tfdp.training.keras_hooks.step_functions.reduce_per_replica`" in change
    )


def test_each_of_several_signatures_is_right():
    owner = types.SimpleNamespace(__name__="keras.owner", call=lambda x, y: None)
    entry = patches.Replacement(owner, "call", path_of, "")
    assert not change_of(entry, ["call(x)", "call(x, y)"])
    assert change_of(entry, ["call(x)"])


@pytest.mark.parametrize("entry", REPLACEMENTS, ids=path_of)
def test_each_entry_says_why_and_which_issue_reports_it(entry):
    assert len(entry.why) > 5
    assert entry.why.endswith(".")
    assert entry.upstream is None or ISSUE.fullmatch(entry.upstream)
    assert path_of(entry).partition(".")[0] in CHECKED_ON


@pytest.mark.parametrize("library", CHECKED_ON)
def test_signatures_were_read_from_the_oldest_supported_version_on(library):
    name, first = VERSIONS.fullmatch(CHECKED_ON[library]).groups()
    assert name.lower() == library
    assert f"{library}>={first}" in supported()


def supported() -> list[str]:
    """What setup.cfg asks for, each without its upper bound."""
    config = configparser.ConfigParser()
    config.read(SOURCE.parent / "setup.cfg")
    lines = config["options"]["install_requires"].split()
    return [line.partition(",")[0] for line in lines]


def test_no_function_is_replaced_twice():
    paths = [path_of(entry) for entry in REPLACEMENTS]
    assert len(set(paths)) == len(paths)
    install()
    install.__wrapped__()  # a second time, past its cache
    for entry in REPLACEMENTS:
        original = patches._function_of(entry.owner, entry.name).__wrapped__
        assert not hasattr(original, "_tfdp_entry"), path_of(entry)


def test_only_the_table_calls_replace():
    callers = [path for path in SOURCE.rglob("*.py") if calls_replace(path)]
    assert callers == [TABLE]


# `replace(` that is no method of a string: most files need not be parsed.
CALL = re.compile(r"(\bpatches\.|(?<![.\w]))replace\(")


def calls_replace(path: pathlib.Path) -> bool:
    source = path.read_text("utf-8")
    if not CALL.search(source):
        return False
    tree = ast.parse(source)
    names = {
        ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)
    }
    return bool(names & {"patches.replace", "replace"})


# By `tfdp.ground.user_code`, until TensorFlow starts.
WATCHED = "tensorflow.python.eager.context.Context.ensure_initialized"


def test_nothing_of_tfdp_is_in_keras_or_tensorflow_but_what_the_table_has():
    install()
    strays = {path for path, value in ours_in_libraries() if not is_in_table(value)}
    assert strays <= {WATCHED}, (
        "give each an entry in tfdp/training/keras_hooks/install.py"
    )
    found = {id(value) for _, value in ours_in_libraries()}
    for entry in REPLACEMENTS:
        function = patches._function_of(entry.owner, entry.name)
        assert id(unfiltered(function)) in found, path_of(entry)


def test_a_function_that_is_replaced_past_the_table_is_found(monkeypatch):
    def stray(original: Any, *args: Any) -> Any:
        return original(*args)

    code = stray.__code__.replace(co_filename=str(SOURCE / "training" / "stray.py"))
    planted = types.FunctionType(code, {})
    monkeypatch.setattr(keras.layers.Dense, "call", functools.partial(planted, None))
    monkeypatch.setattr(keras.src.ops.numpy, "add", planted)
    strays = {path for path, value in ours_in_libraries() if not is_in_table(value)}
    assert strays - {WATCHED} == {
        "keras.src.layers.core.dense.Dense.call",
        "keras.src.ops.numpy.add",
    }


def is_in_table(value: Any) -> bool:
    return any(getattr(value, "_tfdp_entry", None) is entry for entry in REPLACEMENTS)


def ours_in_libraries() -> Iterator[tuple[str, Any]]:
    """Functions of tfdp among those of Keras's and TensorFlow's modules and classes."""
    for name, module in list(sys.modules.items()):
        if not is_of_libraries(name):
            continue
        for key, value in list(vars(module).items()):
            if is_tfdp(unfiltered(value)):
                yield f"{name}.{key}", unfiltered(value)
            if isinstance(value, type) and is_of_libraries(value.__module__):
                owner = f"{value.__module__}.{value.__qualname__}"
                for attribute, function in list(vars(value).items()):
                    if is_tfdp(unfiltered(function)):
                        yield f"{owner}.{attribute}", unfiltered(function)


def unfiltered(value: Any) -> Any:
    """What Keras's filter of tracebacks calls, or a property, or the value itself."""
    if isinstance(value, property):
        value = value.fget
    is_function = isinstance(value, types.FunctionType)
    cell = patches._cell_in_traceback_filter(value) if is_function else None
    return value if cell is None else cell.cell_contents


def is_of_libraries(module: str) -> bool:
    return module.partition(".")[0] in ("keras", "tensorflow")


def is_tfdp(value: Any) -> bool:
    if isinstance(value, functools.partial):
        value = value.func
    elif isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if not isinstance(value, types.FunctionType):
        return False
    return value.__code__.co_filename.startswith(f"{SOURCE}/")


def test_a_traceback_has_no_lines_of_tfdp():
    with tfdp.MirroredStrategy(["/cpu:0"]).scope():
        model = keras.Sequential([keras.layers.Dense(10)])
        model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 3), "float32")
    with pytest.raises(ValueError, match="must have rank") as raised:
        model.fit(x, y, verbose=0)
    files = [frame.filename for frame in traceback.extract_tb(raised.tb)]
    assert files[0] == __file__
    assert not any(file.startswith(str(SOURCE)) for file in files), files


def test_autograph_converts_the_functions_of_users_alone():
    strategy = tfdp.MirroredStrategy(["CPU:0"])

    def step(x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(x) > 0:
            x = 2 * x
        return tfdp.all_gather(x)

    @tf.function
    def run() -> tf.Tensor:
        gathered = strategy.run(step, (tf.ones([1, 1]),))
        return strategy.reduce("sum", gathered, axis=None)

    before = converted()
    assert run().numpy().tolist() == [[2.0]]
    assert len(converted() - before) == 2


def converted() -> set[str]:
    """The modules into which AutoGraph has written functions."""
    return {name for name in sys.modules if name.startswith("__autograph_generated")}
