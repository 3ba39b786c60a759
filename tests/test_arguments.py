"""Every boolean and number of the public API takes what it says, and nothing else.

What a parameter takes is read from its annotation, so that a new one is tested too.
"""

from __future__ import annotations

import inspect
import re
import tempfile
import typing

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import public_api

NAN, INF = float("nan"), float("inf")
COMPILED = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
COMPILED.compile("sgd", "mse")
# What is given for parameters without a default, by the public name.
REQUIRED: dict[str, dict[str, typing.Any]] = {
    "tfdp.DistributedOptimizer": {"optimizer": keras.optimizers.SGD},
    "tfdp.ElasticState": {"model": COMPILED, "directory": tempfile.mkdtemp()},
    "tfdp.options.Link": {"alpha_seconds": 1.0, "seconds_per_byte": 1.0},
    "tfdp.options.Links": {
        "inside": tfdp.options.Link(1.0, 1.0),
        "across": tfdp.options.Link(1.0, 1.0),
    },
    "tfdp.callbacks.BackupAndRestore": {"directory": "backups"},
    "tfdp.callbacks.CommunicationMonitor": {"log_dir": "logs"},
    "tfdp.callbacks.CommunicationMonitor.recent": {
        "self": tfdp.callbacks.CommunicationMonitor("logs")
    },
    "tfdp.callbacks.Timeline": {"path": "timeline.json"},
    "tfdp.compression.GradientBucket": {
        "size": 8,
        "dtype": "float32",
        "num_replicas": 2,
    },
    "tfdp.checkpoint.save": {
        "model": keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]),
        "directory": tempfile.mkdtemp(),
    },
    "tfdp.data.from_source": {"source": [1.0, 2.0]},
    "tfdp.data.shard_files": {"pattern": __file__},
    "tfdp.scale_learning_rate": {"learning_rate": 0.5, "scale": 2.0},
    "tfdp.testing.logical_cpus": {"count": 2},
}
# What is given beside a parameter, so that it has an effect.
BESIDE = {
    "min_participants": {"delay": 1},
    "patience_seconds": {"delay": 1, "min_participants": 1},
    "mixing": {"delay": 1},
    "scale_by_staleness": {"delay": 1},
    "prefetch": {"sharding": "parameters", "stage": 3},
    "reshard_after_forward": {"sharding": "parameters", "stage": 3},
}
# A right value where the default is none, or has another type.
RIGHT: dict[str, typing.Any] = {
    "memory_every": 20,
    "replay": 0.5,
    "epochs": 2.5,
    "initial_factor": 0.5,
    "loss_scale": 8.0,
    "min_participants": 2,
    "node_size": 2,
    "save_freq": 5,
    "seed": 3,
    "steps": 7,
    "timeout_seconds": 5.0,
}
# Parameters whose annotation is any type, and what they take of those that count here.
ANNOTATED_BY_HAND = {("tfdp.optimizers.LARS", "learning_rate"): {"float"}}
# What tfdp makes itself: a group of processes that no user has, and an error.
INTERNAL = {"tfdp.compression.ReplicaGroup", "tfdp.WorkerLost"}
# Parameters that are a pair of what is tested.
PAIRS = {("tfdp.callbacks.Timeline", "steps")}


class Parameter(typing.NamedTuple):
    """A parameter of the public API that takes booleans or numbers."""

    owner: str
    call: typing.Callable[..., typing.Any]
    name: str
    kinds: frozenset[str]
    default: typing.Any

    def give(self, value: typing.Any) -> typing.Any:
        """Calls the owner with a value for this parameter, and right ones beside."""
        required = {
            name: right() if isinstance(right, type) else right
            for name, right in REQUIRED.get(self.owner, {}).items()
        }
        takes = inspect.signature(self.call).parameters
        beside = BESIDE.get(self.name, {}).items()
        others = {name: right for name, right in beside if name in takes}
        if (self.owner, self.name) in PAIRS:
            value = (value, 15)
        return self.call(**{**required, **others, self.name: value})

    @property
    def right(self) -> typing.Any:
        """A value that it takes."""
        if self.owner == "tfdp.testing.logical_cpus":
            return len(tf.config.list_logical_devices("CPU"))
        required = REQUIRED.get(self.owner, {}).get(self.name, self.default)
        is_number = isinstance(required, (bool, int, float))
        return required if is_number else RIGHT[self.name]

    @property
    def wrong(self) -> list[typing.Any]:
        """Values that it does not take."""
        values = ["no", "", "4", [1], np.ones(2), object(), 1j, NAN, INF, -INF]
        if "None" not in self.kinds:
            values.append(None)
        if "bool" in self.kinds:
            values += [0, 1, 1.0, np.int64(1)]
        else:
            values += [True, False, np.True_, np.float32("nan")]
        if "float" not in self.kinds:
            values += [1.5, 2.0, np.float64(2.0)]
        return values


def found() -> typing.Iterator[Parameter]:
    """The parameters, by the annotations of constructors, methods and functions."""
    for name, value in public_api.values():
        is_class = isinstance(value, type)
        if name.endswith(".__init__") or name in INTERNAL:
            continue
        annotated = value.__init__ if is_class else value
        for parameter in inspect.signature(annotated).parameters.values():
            words = set(re.findall(r"\w+", str(parameter.annotation)))
            words |= ANNOTATED_BY_HAND.get((name, parameter.name), set())
            kinds = frozenset(words & {"bool", "int", "float", "None"})
            if kinds & {"bool", "int", "float"}:
                yield Parameter(name, value, parameter.name, kinds, parameter.default)


PARAMETERS = list(found())


def id_of(parameter: Parameter) -> str:
    return f"{parameter.owner.removeprefix('tfdp.')}-{parameter.name}"


def test_the_parameters_of_all_kinds_are_found():
    names = {id_of(parameter) for parameter in PARAMETERS}
    assert len(names) >= 65
    assert {
        "CommunicationOptions-timeout_seconds",
        "DistributedOptimizer-prefetch",
        "options.Links-is_inside_shared",
        "callbacks.CommunicationMonitor.recent-num_steps",
        "callbacks.DiLoCo-dynamic_steps",
        "compression.TopK-ratio",
        "data.from_source-seed",
        "optimizers.LARS-learning_rate",
        "scale_learning_rate-scale",
    } <= names


@pytest.mark.parametrize("parameter", PARAMETERS, ids=id_of)
def test_what_is_no_such_value_is_refused_by_name(parameter: Parameter):
    for value in parameter.wrong:
        # "should" is Keras's own word for a learning rate.
        with pytest.raises(ValueError, match=r"must be|should be") as caught:
            parameter.give(value)
        received = (value, 15) if (parameter.owner, parameter.name) in PAIRS else value
        text = str(caught.value)
        assert parameter.name in text or parameter.name == "count"
        assert repr(received) in text or f"{parameter.name}={received}" in text


# `recent` has nothing to tell before a `fit`.
@pytest.mark.parametrize(
    "parameter", [p for p in PARAMETERS if p.name != "num_steps"], ids=id_of
)
def test_numpys_scalars_are_as_good_as_pythons(parameter: Parameter):
    right = parameter.right
    kinds = {bool: [np.bool_], int: [np.int64, np.uint8], float: [np.float64]}
    if isinstance(right, int) and right > 255:
        kinds[int] = [np.int64]
    for kind in kinds[type(right)]:
        result = parameter.give(kind(right))
        kept = getattr(result, parameter.name, right)
        if isinstance(kept, (np.generic, bool, int, float)):
            assert kept == right
            assert type(kept) in (bool, int, float)
