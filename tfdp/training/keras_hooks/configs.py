"""Configs of a model and of what trains it, in a form that workers can compare.

Left out is what may differ between workers that train alike: names, numbers that Keras
counts up, seeds and initializers (all workers get the first one's values), learning
rates that are variables, sizes of batches, addresses, and what has no config.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import re
import warnings
from typing import Any

import keras
import numpy as np

from tfdp.ground import _compat

_COUNTED = re.compile(r"_\d+(?=/|:|$)")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_FREE = (
    "module",
    "registered_name",
    "shared_object_id",
    "build_config",
    "build_input_shape",
    "batch_shape",
    "batch_input_shape",
    "shape",
)
_FREE_ENDS = ("seed", "initializer")
# Callbacks of Keras that set the learning rate or weights, each worker its own.
_ACTING = (
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)
# Of longer lists, and of larger arrays, the rest is not looked at.
_MOST_ITEMS = 1000


def configs_of(name: str, model: Any, callbacks: list) -> dict[str, Any]:
    """Collect the configs of all that has part in a loop.

    Args:
        name: String, `"fit"`, `"evaluate"`, `"predict"` or the like for a batch.
        model: The Keras model.
        callbacks: List of callbacks, of which those that act on training are looked
            at: tfdp's, and those of Keras that set the learning rate or weights.

    Returns:
        Dict of nests of dicts, lists and plain values.
    """
    with warnings.catch_warnings():
        # Keras warns of what cannot be loaded again; nothing is loaded here.
        warnings.simplefilter("ignore")
        found: dict[str, Any] = {
            "model": _layer_configs(model),
            "inputs": _connections(model),
        }
        if name.startswith("predict"):
            return found
        for key, value in _compat.compile_arguments(model).items():
            found[key] = _argument_config(value)
        if name in ("fit", "train_on_batch"):
            found["optimizer"] = _config(getattr(model, "optimizer", None))
            found["callbacks"] = _callback_configs(callbacks)
    return json.loads(json.dumps(found))


def fingerprint(configs: dict[str, Any]) -> str:
    """Return a short text that tells equal configs from others."""
    return hashlib.sha256(json.dumps(configs, sort_keys=True).encode()).hexdigest()


def comparable(value: Any) -> Any:
    """Return a value without what may differ between workers that train alike.

    Example:

    >>> comparable({"name": "sgd_1", "clipnorm": 1.0, "seed": 7, "loss": "mse"})
    {'clipnorm': 1.0, 'loss': 'mse'}
    """
    if isinstance(value, dict):
        return _comparable_dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return comparable(dataclasses.asdict(value))
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value[:_MOST_ITEMS]]
    if isinstance(value, str):
        return _ADDRESS.sub("0x", _COUNTED.sub("", value))
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return type(value).__name__


def _comparable_dict(value: dict) -> dict[str, Any]:
    if value.get("class_name") == "__lambda__" or set(value) == {"value"}:
        return {}  # a lambda, whose code tells the lines of a file, too
    if set(value) == {"name"}:  # a dtype policy
        return dict(value)
    return {
        str(key): comparable(item)
        for key, item in value.items()
        if not _is_free(str(key), item)
    }


def _is_free(key: str, value: Any) -> bool:
    if key == "learning_rate":
        return not isinstance(value, dict)  # a schedule is no variable
    return key == "name" or key in _FREE or key.endswith(_FREE_ENDS)


def _layer_configs(model: Any) -> dict[str, Any]:
    """Configs of all layers by name."""
    return _by_name([(x.name, _layer_config(x)) for x in _compat.layers_of(model)])


def _connections(model: Any) -> dict[str, Any]:
    """Names of the layers that feed each layer of a functional model, call by call."""
    calls = _compat.calls_of(model)
    given = dict.fromkeys(name for name, _ in calls)
    unique = {name: new for new, name in _by_name([(n, n) for n in given]).items()}
    found: dict[str, Any] = {name: [] for name in unique.values()}
    for name, feeding in calls:
        found[unique[name]].append([unique.get(other, other) for other in feeding])
    return found


def _by_name(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict by names that count anew what Keras counts up in each process.

    Example:

    >>> _by_name([("dense_7", 1), ("dense_8", 2)])
    {'dense': 1, 'dense#2': 2}
    """
    found: dict[str, Any] = {}
    for given, value in pairs:
        name = unique = _COUNTED.sub("", given)
        number = 1
        while unique in found:
            number += 1
            unique = f"{name}#{number}"
        found[unique] = value
    return found


def _argument_config(value: Any) -> Any:
    """Config of an argument of `compile`, which may be a dict by outputs."""
    value = keras.tree.map_structure(_config, value)
    if isinstance(value, dict):
        return _by_name([(str(key), item) for key, item in value.items()])
    return value


def _layer_config(layer: Any) -> dict[str, Any]:
    entry = {"class_name": type(layer).__name__, "dtype": layer.dtype_policy.name}
    # The layers of a model are listed themselves. Keras makes a config of arguments
    # that may be the worker's own, where a class does not define one.
    is_left_out = isinstance(layer, (keras.Model, keras.layers.Lambda))
    if not (is_left_out or _compat.has_default_config(layer) or _is_large(layer)):
        entry |= _config(layer)
    return entry


def _config(thing: Any) -> Any:
    """Config of an object, or a plain value; what has neither is named."""
    if callable(thing) and hasattr(thing, "__name__"):
        return comparable(thing.__name__)
    if not hasattr(thing, "get_config"):
        return comparable(thing)
    entry = {"class_name": type(thing).__name__}
    try:
        config = {**_compat.function_arguments(thing), **thing.get_config()}
        return {**entry, "config": comparable(config)}
    except Exception:  # noqa: BLE001 a config is any code of a user's
        return entry


def _is_large(layer: Any) -> bool:
    """Whether the config would hold the numbers of a large array."""
    given = [
        value.value
        for value in vars(layer).values()
        if isinstance(value, keras.initializers.Constant)
    ]
    return any(np.size(value) > _MOST_ITEMS for value in given)


def _callback_configs(callbacks: list) -> list[dict[str, Any]]:
    """Settings of callbacks that have to be alike on all workers."""
    return [
        {
            "class_name": type(callback).__name__,
            **{name: _config(getattr(callback, name)) for name in names},
        }
        for callback in callbacks
        for names in [_compared_settings(callback)]
        if names is not None
    ]


def _compared_settings(callback: Any) -> tuple[str, ...] | None:
    """Names of a callback's settings to compare, or `None` to ignore the callback."""
    if hasattr(callback, "compared"):
        return callback.compared
    for kind in _ACTING:
        if isinstance(callback, kind):
            names = inspect.signature(kind.__init__).parameters
            return tuple(n for n in names if n != "verbose" and hasattr(callback, n))
    return None
