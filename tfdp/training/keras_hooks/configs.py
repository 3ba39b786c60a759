"""Configs of a model, its optimizer and callbacks, in a form that workers can compare.

Settings that may differ between workers that train alike are left out: names, the
counters in Keras's names, seeds and initializers (all workers receive worker 0's
values), learning rates that are variables, batch sizes, memory addresses, and objects
without a config.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import warnings
from typing import Any

import keras
import numpy as np

from tfdp.ground._compat import keras_model

# Keras counts the objects of a class in each process. So the counter in a name, such as
# "_1" in "dense_1/kernel", may differ between workers, and is not compared.
_NAME_COUNTER = re.compile(r"_\d+(?=/|:|$)")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
# Keys of configs, and endings of such keys, that are not compared between workers:
# their values may differ without an effect on training.
_IGNORED_KEYS = (
    "module",
    "registered_name",
    "shared_object_id",
    "build_config",
    "build_input_shape",
    "batch_shape",
    "batch_input_shape",
    "shape",
)
_IGNORED_ENDINGS = ("seed", "initializer")
# Callbacks of Keras that set the learning rate or the weights on each worker. So their
# settings must be the same on all workers, and are compared.
_TRAINING_CALLBACKS = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)
# Configs are compared at the beginning of each loop, which must not take long. So only
# this many items of a list are compared, and the config of a layer with a larger
# constant array is left out.
_MAX_ITEMS = 1000


def configs_of(
    name: str, model: Any, callbacks: list, *, has_trained: bool = False
) -> dict[str, Any]:
    """Collect the configs of the model, losses, metrics, optimizer and callbacks.

    Workers compare them before a loop, to train or evaluate the same model. `predict`
    has only configs of the model, and only `fit` and `train_on_batch` have those of the
    optimizer and of callbacks.

    Args:
        name: String, name of the loop, such as `"fit"` or `"train_on_batch"`.
        model: The Keras model.
        callbacks: List of callbacks. Only tfdp's, and those of Keras that set the
            learning rate or weights, are included.
        has_trained: Bool, whether learning rates are left out, because workers that
            have trained may have changed them, and workers that join now have not.
            Defaults to `False`.

    Returns:
        Dict from the kind of config, such as `"model"`, to a nest of dicts, lists and
        plain values.
    """
    with warnings.catch_warnings():
        # Keras warns of configs that cannot be deserialized, which does not matter for
        # a comparison.
        warnings.simplefilter("ignore")
        collected: dict[str, Any] = {
            "model": by_name(
                [(x.name, _layer_config(x)) for x in keras_model.layers_of(model)]
            ),
            "inputs": _connections(model),
        }
        if name.startswith("predict"):
            return collected
        for key, value in keras_model.compile_arguments(model).items():
            collected[key] = _argument_config(value)
        if name in ("fit", "train_on_batch"):
            collected["optimizer"] = _config(getattr(model, "optimizer", None))
            collected["callbacks"] = _callback_configs(callbacks)
    if has_trained:
        collected = _without_rates(collected)
    return json.loads(json.dumps(collected))


def _without_rates(value: Any) -> Any:
    """Return a nest of dicts and lists without entries named `learning_rate`."""
    if isinstance(value, dict):
        kept = {n: v for n, v in value.items() if n != "learning_rate"}
        return {name: _without_rates(each) for name, each in kept.items()}
    if isinstance(value, list):
        return [_without_rates(each) for each in value]
    return value


def comparable(value: Any) -> Any:
    """Return a value without settings that may differ between workers that train alike.

    The result consists of dicts, lists and plain values, for JSON. An object of another
    class becomes the name of the class.

    Example:

    >>> comparable({"name": "sgd_1", "clipnorm": 1.0, "seed": 7, "loss": "mse"})
    {'clipnorm': 1.0, 'loss': 'mse'}
    """
    if isinstance(value, dict):
        return _comparable_dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return comparable(dataclasses.asdict(value))
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value[:_MAX_ITEMS]]
    if isinstance(value, str):
        return _ADDRESS.sub("0x", _NAME_COUNTER.sub("", value))
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return type(value).__name__


def _comparable_dict(value: dict) -> dict[str, Any]:
    """Return a config with `comparable` entries, without those that may differ."""
    if value.get("class_name") == "__lambda__" or set(value) == {"value"}:
        # The code of a lambda is not compared: it includes line numbers of the file.
        return {}
    # A dict with only a name is the config of a dtype policy. The name is compared,
    # unlike the names of other objects.
    if set(value) == {"name"}:
        return dict(value)
    return {
        str(key): comparable(item)
        for key, item in value.items()
        if not _is_ignored(str(key), item)
    }


def _is_ignored(key: str, value: Any) -> bool:
    """Return whether an entry of a config is not compared: it may differ by worker."""
    if key == "learning_rate":
        # A learning rate that is a schedule has a dict as its config, and is compared.
        # A learning rate that is a number is not: in a new optimizer worker 0's number
        # replaces it, and one that a script has assigned is compared as a variable.
        return not isinstance(value, dict)
    return key == "name" or key in _IGNORED_KEYS or key.endswith(_IGNORED_ENDINGS)


def _connections(model: Any) -> dict[str, Any]:
    """Return the names of the layers that feed each layer of a functional model.

    Returns:
        Dict from the name of a layer to a list with, for each of its calls, the names
        of the layers that the inputs come from.
    """
    calls = keras_model.calls_of(model)
    called = dict.fromkeys(name for name, _ in calls)
    unique = {name: new for new, name in by_name([(n, n) for n in called]).items()}
    feeding_calls: dict[str, Any] = {name: [] for name in unique.values()}
    for name, sources in calls:
        feeding_calls[unique[name]].append(
            [unique.get(other, other) for other in sources]
        )
    return feeding_calls


def by_name(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of pairs, with names renumbered independently of the process.

    Keras counts layers of one class in each process, so the counters differ.

    Example:

    >>> by_name([("dense_7", 1), ("dense_8", 2)])
    {'dense': 1, 'dense#2': 2}
    """
    renamed: dict[str, Any] = {}
    for original_name, value in pairs:
        name = unique = _NAME_COUNTER.sub("", original_name)
        number = 1
        while unique in renamed:
            number += 1
            unique = f"{name}#{number}"
        renamed[unique] = value
    return renamed


def _argument_config(value: Any) -> Any:
    """Return configs, as `_config` does, of losses or metrics passed to `compile`."""
    value = keras.tree.map_structure(_config, value)
    if isinstance(value, dict):
        return by_name([(str(key), item) for key, item in value.items()])
    return value


def _layer_config(layer: Any) -> dict[str, Any]:
    """Return a dict with the class name, the dtype and the settings of a layer."""
    entry = {"class_name": type(layer).__name__, "dtype": layer.dtype_policy.name}
    # The config of a nested model is left out, because its layers are listed
    # separately. A default config is left out, because it consists of constructor
    # arguments, which may differ between workers.
    is_left_out = isinstance(layer, (keras.Model, keras.layers.Lambda))
    if not (is_left_out or keras_model.has_default_config(layer) or _is_large(layer)):
        entry |= _config(layer)
    return entry


def _config(thing: Any) -> Any:
    """Return a description of an object that workers can compare.

    It is the name of a function or class; a dict of the class name and the config of an
    object with `get_config`, without the config if `get_config` raises; otherwise the
    result of `comparable`.
    """
    if callable(thing) and hasattr(thing, "__name__"):
        return comparable(thing.__name__)
    if not hasattr(thing, "get_config"):
        return comparable(thing)
    entry = {"class_name": type(thing).__name__}
    try:
        config = {**keras_model.function_arguments(thing), **thing.get_config()}
        return {**entry, "config": comparable(config)}
    except Exception:  # noqa: BLE001 `get_config` is arbitrary user code
        return entry


def _is_large(layer: Any) -> bool:
    """Return whether a layer has a constant initializer of over `_MAX_ITEMS` elements.

    The layer's config would contain all of them.
    """
    values = [
        value.value
        for value in vars(layer).values()
        if isinstance(value, keras.initializers.Constant)
    ]
    return any(np.size(value) > _MAX_ITEMS for value in values)


def _callback_configs(callbacks: list) -> list[dict[str, Any]]:
    """Return the settings of callbacks, which must be the same on all workers.

    Callbacks for which `_compared_settings` returns `None` are left out.

    Returns:
        List with a dict for each other callback: `"class_name"`, and settings by name.
    """
    return [
        {
            "class_name": type(callback).__name__,
            **{name: _setting(callback, name) for name in names},
        }
        for callback in callbacks
        for names in [_compared_settings(callback)]
        if names is not None
    ]


def _setting(callback: Any, name: str) -> Any:
    """Return a setting of a callback in a form for JSON that workers can compare.

    An object with `get_config` becomes a dict of its class name and config, a function
    its name, and any other value what `comparable` returns. `min_delta` loses its sign.

    Args:
        callback: Keras callback.
        name: String, name of an attribute of the callback.
    """
    value = _config(getattr(callback, name))
    # Keras changes the sign of `min_delta` at the end of the first epoch. Without the
    # absolute value, a callback that was used before would differ from a new one.
    return abs(value) if name == "min_delta" else value


def _compared_settings(callback: Any) -> tuple[str, ...] | None:
    """Return the names of a callback's settings to compare, or `None` to ignore it."""
    if hasattr(callback, "compared"):
        return callback.compared
    if not getattr(callback, "restore_best_weights", True):
        # Without `restore_best_weights`, `EarlyStopping` only requests a stop, on which
        # workers agree anyway. So its settings may differ.
        return None
    for kind in _TRAINING_CALLBACKS:
        if isinstance(callback, kind):
            names = inspect.signature(kind.__init__).parameters
            return tuple(n for n in names if n != "verbose" and hasattr(callback, n))
    return None
