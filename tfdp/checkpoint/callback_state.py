"""State of callbacks, saved in backups and restored from them.

Callbacks with the methods `get_state()`, which returns a value that JSON can hold,
and `set_state(state)` are saved through these. The callbacks of Keras have neither,
so `keras_model.CALLBACK_STATE` lists the attributes that are their state.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tfdp.checkpoint.index import DTYPES, Index
from tfdp.checkpoint.schema import (
    COUNT,
    check,
    list_of,
    mapping,
    optional,
    raise_malformed,
)
from tfdp.ground._compat import keras_model

# These attributes of Keras's callbacks are lists of arrays. A backup stores the arrays
# as tensors, since they may be as large as the model, too large for its JSON index.
_ARRAY_LISTS = {"best_weights"}
_VALUE_NAMES = {
    name for names in keras_model.CALLBACK_STATE.values() for name in names
} - _ARRAY_LISTS
# JSON has neither NumPy arrays, nor dicts with keys other than strings, nor tuples, so
# each of these is encoded as an object with one of these keys.
_ARRAY, _PAIRS, _TUPLE = "__array__", "__pairs__", "__tuple__"
# Only dtype strings of this form are decoded, since `np.dtype` accepts any description
# from a damaged file, such as that of a structured dtype.
_DTYPE = re.compile(r"[<>=|][?a-zA-Z][0-9]{1,9}(\[[a-zA-Z0-9]+\])?")


def callback_states(callbacks: Iterable[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Collect the state of callbacks.

    These are the callbacks with the methods `get_state` and `set_state`, and those of
    Keras in `CALLBACK_STATE`; others are left out.

    Args:
        callbacks: Iterable of Keras callbacks.

    Returns:
        Tuple of a dict of the callbacks' states, which JSON supports, by a key of class
        and number such as `"EarlyStopping-1"`; and a dict from names to the arrays of
        the states.
    """
    states: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for key, callback in _with_keys(callbacks):
        if _has_state_methods(callback):
            states[key] = {"own": to_json(callback.get_state())}
            continue
        names = _state_attributes(callback)
        if not names:
            continue
        values: dict[str, Any] = {}
        specs: dict[str, Any] = {}
        for name in names:
            found = getattr(callback, name, None)
            if name in _ARRAY_LISTS:
                specs[name] = None if found is None else _array_specs(found)
                for number, array in enumerate(found or ()):
                    arrays[f"{key}/{name}/{number}"] = np.asarray(array)
            elif hasattr(callback, name):
                values[name] = to_json(found)
        states[key] = {"values": values, "arrays": specs}
    return states, arrays


def check_value(value: Any, where: str) -> Any:
    """Check that `to_json` can have encoded a value; return the decoded value.

    Args:
        value: Value from a file, as JSON has it.
        where: String, the place of the value in the file.

    Raises:
        Malformed: If `to_json` cannot have encoded the value.
    """
    try:
        return from_json(value)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError):
        raise_malformed(value, where, "a value as a callback keeps it")


def check_callback_states(states: Any, where: str) -> None:
    """Raise `Malformed` unless a value is a dict of states from `callback_states`.

    Args:
        states: Value from a file, as JSON has it.
        where: String, the place of the value in the file.
    """
    mapping(_check_state)(states, where)


def _check_state(state: Any, where: str) -> None:
    """Raise `Malformed` unless a value is the saved state of one callback.

    Args:
        state: Value from a file, as JSON has it.
        where: String, the place of the value in the file.
    """
    if isinstance(state, dict) and "own" in state:
        check(state, {"own": check_value}, where)
        return
    check(state, {"values": mapping(check_value), "arrays": mapping(_SPECS)}, where)
    for name, value in state["values"].items():
        if not _is_allowed_value(name, from_json(value)):
            raise_malformed(value, f"{where}.{name}", "a value of such a callback")
    for name in state["arrays"]:
        check(name, _ARRAY_LISTS, where)


def _is_allowed_value(name: str, value: Any) -> bool:
    """Return whether a state attribute of a Keras callback may have a value.

    `"history"` may be a dict of lists, `"epoch"` a list, and other saved attributes a
    number. `"best"` and `"_last_batch_seen"`, unset at first, may also be `None`.

    Args:
        name: String, name of the attribute.
        value: Value from a backup, decoded.
    """
    if value is None:
        return name in keras_model.STATE_NONE_AT_FIRST
    if name == "history":
        return isinstance(value, dict) and all(
            isinstance(item, list) for item in value.values()
        )
    kinds = (list,) if name == "epoch" else (int, float, np.number)
    return name in _VALUE_NAMES and isinstance(value, kinds)


# The shapes and dtypes of an attribute that is a list of arrays are checked by this
# schema, since `empty_arrays` allocates arrays by them.
_SPECS = optional([(list_of(COUNT, most=64), set(DTYPES))])


def check_arrays(states: dict[str, Any], index: Index, prefix: str) -> None:
    """Raise unless a backup has all arrays that the states of its callbacks list.

    Args:
        states: Dict of states, the first result of `callback_states`.
        index: `Index` of the backup.
        prefix: String, the prefix of the names of the arrays' tensors.

    Raises:
        Malformed: If an array is missing, or has another shape or dtype; the message
            names the first one.
    """
    saved = {entry.name: (entry.shape, entry.dtype) for entry in index.tensors}
    for name, shape, dtype in _array_entries(states):
        if saved.get(f"{prefix}{name}") != (tuple(shape), dtype):
            raise_malformed(name, "run.callbacks", "of arrays that it holds")


def empty_arrays(states: dict[str, Any]) -> dict[str, np.ndarray]:
    """Create zero arrays with the names, shapes and dtypes that the states list.

    Args:
        states: Dict of states, the first result of `callback_states`.

    Returns:
        Dict from names to arrays, into which the saved ones can be loaded.
    """
    return {
        name: np.zeros(shape, dtype) for name, shape, dtype in _array_entries(states)
    }


def _array_entries(states: dict[str, Any]) -> Iterator[tuple[str, list, str]]:
    """Yield name, shape and dtype of each array that the callbacks' states list."""
    for key, state in states.items():
        for name, specs in state.get("arrays", {}).items():
            for number, (shape, dtype) in enumerate(specs or ()):
                yield f"{key}/{name}/{number}", shape, dtype


def set_callback_states(
    callbacks: Iterable[Any], states: dict[str, Any], arrays: dict[str, Any]
) -> None:
    """Restore the state of callbacks.

    Args:
        callbacks: Iterable of Keras callbacks. Those without a saved state are
            skipped.
        states: Dict of states, the first result of `callback_states`.
        arrays: Dict from names to arrays, its second result.
    """
    for key, callback in _with_keys(callbacks):
        state = states.get(key)
        if state is None:
            continue
        if "own" in state:
            if _has_state_methods(callback):
                _call_set_state(callback, key, state["own"])
            continue
        for name in _state_attributes(callback):
            if name in _ARRAY_LISTS:
                specs = state["arrays"].get(name)
                items = [f"{key}/{name}/{number}" for number in range(len(specs or ()))]
                found = [arrays[item] for item in items]
                setattr(callback, name, None if specs is None else found)
            elif name in state["values"]:
                setattr(callback, name, from_json(state["values"][name]))


def _call_set_state(callback: Any, key: str, state: Any) -> None:
    """Call the `set_state` of a callback; raise `ValueError` with its key on an error.

    Args:
        callback: Keras callback.
        key: String, the key of the callback in the backup.
        state: Encoded state, the result of `to_json`.
    """
    try:
        callback.set_state(from_json(state))
    except Exception as error:
        raise ValueError(
            f"The callback {key} cannot restore its state from the backup: "
            f"{type(error).__name__}: {error}"
        ) from error


def to_json(value: Any) -> Any:
    """Encode a value for JSON, also arrays, tuples and dict keys other than strings.

    Returns:
        `None`, bool, number or string, or a nest of these in lists and dicts whose keys
        are strings.

    Raises:
        TypeError: If the value, or a value inside it, has another type.

    Example:

    >>> from_json(to_json({1: np.float32(0.5), "a": [None, True]}))
    {1: np.float32(0.5), 'a': [None, True]}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        # `np.float64` is a subclass of `float`. It is encoded as an array, since a JSON
        # number would be decoded as Python's `float`.
        return _encode_array(value) if isinstance(value, np.generic) else value
    if isinstance(value, (list, tuple)):
        items = [to_json(item) for item in value]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, dict):
        return {_PAIRS: [[to_json(k), to_json(v)] for k, v in value.items()]}
    if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "numpy"):
        return _encode_array(value)
    raise TypeError(
        "The state of a callback must be numbers, strings, arrays, lists and dicts. "
        f"Received: {type(value).__name__}"
    )


def from_json(value: Any) -> Any:
    """Return the value that `to_json` encoded as `value`."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(from_json(item) for item in value[_TUPLE])
    if _PAIRS in value:
        return {from_json(k): from_json(v) for k, v in value[_PAIRS]}
    dtype, shape, text = value[_ARRAY]
    if not _DTYPE.fullmatch(dtype) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError
    flat = np.frombuffer(base64.b64decode(text, validate=True), np.dtype(dtype))
    array = flat.reshape(shape).copy()
    return array if shape else array[()]


def _encode_array(value: Any) -> dict[str, list]:
    """Encode an array or NumPy number as dtype, shape and Base64 text."""
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype.hasobject:
        raise TypeError(
            "The state of a callback must be numbers, strings, arrays, lists and "
            f"dicts. Received: an array of {array.dtype}"
        )
    text = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {_ARRAY: [array.dtype.str, list(array.shape), text]}


def _array_specs(arrays: Iterable[Any]) -> list:
    """Return a list of pairs: the shape of each array, a list, and its dtype's name."""
    return [[list(a.shape), np.dtype(a.dtype).name] for a in map(np.asarray, arrays)]


def _with_keys(callbacks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each callback with a key: its class and a number, as `"EarlyStopping-1"`.

    The key is not the position in the list, which differs between workers: callbacks
    that write files are on some workers only.
    """
    counts: dict[str, int] = {}
    for callback in callbacks:
        name = type(callback).__qualname__
        counts[name] = counts.get(name, 0) + 1
        yield f"{name}-{counts[name]}", callback


def _has_state_methods(callback: Any) -> bool:
    """Return whether a callback has `get_state` and `set_state`."""
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _state_attributes(callback: Any) -> tuple[str, ...]:
    """Return a tuple of the names of a Keras callback's state attributes.

    It is empty for a callback that is not of a class in `CALLBACK_STATE`.
    """
    kinds = keras_model.CALLBACK_STATE.items()
    return next((names for kind, names in kinds if isinstance(callback, kind)), ())
