"""Exchanges that are compressed, or used some updates after they were sent."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfdp
from tests.compression.cases_training import states_of
from tests.compression.numpy_definitions import Quantized
from tests.exactness.cases_exactness import precision
from tests.harness import common, registry
from tests.harness.env import Env
from tests.local_steps.cases_diloco import EVERYTHING, SYNC_EVERY, Nodes, check_resumed
from tests.local_steps.cases_local_sgd import (
    EPOCHS,
    Make,
    adam,
    batches,
    check_weights,
    momentum,
    trained_alone,
)
from tests.reduction.cases_selection import SLOW, routed
from tfdp.communication.collectives import timing
from tfdp.compression import BlockQuantized

case = registry.case
UNITS = 40


def wide_model(make: Make) -> keras.Model:
    return common.compiled(common.mlp(UNITS), make())


def outer_sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


class DelayedNodes(Nodes):
    """Nodes that use what they have sent some updates later: streaming DiLoCo."""

    def __init__(
        self,
        count: int,
        weights: list[np.ndarray],
        mixing: float,
        scales: bool,
        make: Make = adam,
    ) -> None:
        super().__init__(count, weights, outer_sgd(), make=make)
        self._mixing, self._scales = mixing, scales
        self._sent: dict[int, np.ndarray] = {}

    def send(self, positions: list[int]) -> None:
        """What all have learned of some variables leaves, by samples."""
        for position in positions:
            values = [m.trainable_variables[position].numpy() for m in self.models]
            mean = np.average(values, axis=0, weights=self.since[position])
            self._sent[position] = self._anchors[position].numpy() - mean
            self.since[position] = 0

    def use(self, positions: list[int], late: int) -> None:
        """The outer step of what was sent, mixed with what was done since."""
        factor = SYNC_EVERY / (SYNC_EVERY + late) if self._scales else 1.0
        for position in positions:
            if position not in self._sent:
                continue
            anchor = self._anchors[position]
            gradient = factor * self._sent.pop(position)
            self._outer.update_step(gradient, anchor, self._outer.learning_rate)
            for model in self.models:
                variable = model.trainable_variables[position]
                own = self._mixing * variable.numpy()
                variable.assign(own + (1 - self._mixing) * anchor.numpy())

    def end_epoch(self, late: dict[int, int]) -> None:
        """All is used, and what was done since is exchanged at once."""
        for position, anchor in enumerate(self._anchors):
            self.use([position], late[position])
            if self.since[position].any():
                self.meet([position])
            for model in self.models:
                model.trainable_variables[position].assign(anchor)
        self.average_slots()


def delayed_model(
    nodes: DelayedNodes, fragments: list[tuple[int, list[int]]], delay: int
) -> keras.Model:
    """Trains nodes; a fragment is sent `offset` updates into each `SYNC_EVERY`."""
    for _ in range(EPOCHS):
        late: dict[int, int] = dict.fromkeys(range(4), 0)
        sent_at: dict[int, int] = {}
        for number, batch in enumerate(batches(), start=1):
            nodes.step(*batch)
            for offset, positions in fragments:
                if number % SYNC_EVERY == offset:
                    nodes.send(positions)
                    sent_at |= dict.fromkeys(positions, number)
                if number % SYNC_EVERY == (offset + delay) % SYNC_EVERY:
                    nodes.use(positions, delay)
        late |= {position: number - sent for position, sent in sent_at.items()}
        nodes.end_epoch(late)
    return nodes.models[0]


def check_delayed(
    env: Env,
    callback: keras.callbacks.Callback,
    fragments: list,
    make: Make = adam,
    **options: object,
) -> list[int]:
    """Compares a model trained with delays; returns the logged staleness."""
    model, first = trained_alone(env, make, callback)
    nodes = DelayedNodes(env.num_replicas, first, make=make, **options)
    delay = callback.options.delay
    check_weights(env, model, delayed_model(nodes, fragments, delay))
    env.read(model.optimizer.variables)  # one state of all replicas
    return model.history.history["staleness"]


@case("Exchanges travel meanwhile", compare=False)
@registry.same_as("exchanges_go_on_without_a_late_worker")
def diloco_uses_exchanges_later(env: Env) -> dict:
    callback = tfdp.callbacks.DiLoCo(SYNC_EVERY, scope="replica", delay=2)
    staleness = check_delayed(env, callback, EVERYTHING, mixing=0.5, scales=False)
    assert staleness == [2, 2]
    return {}


@case(
    "Rounds that all come to are exchanges that travel meanwhile",
    compare=False,
    setups=("two_workers", "two_by_two"),
)
@registry.same_as("exchanges_go_on_without_a_late_worker")
def rounds_of_all_are_late_exchanges(env: Env) -> dict:
    callback = tfdp.callbacks.DiLoCo(
        SYNC_EVERY, scope="replica", delay=2, min_participants=2, patience_seconds=60.0
    )
    check_delayed(env, callback, EVERYTHING, mixing=0.5, scales=False)
    return {}


@case("Rounds are for workers", compare=False, setups=("mirrored",))
def rounds_of_one_worker_say_so(env: Env) -> dict:
    callback = tfdp.callbacks.DiLoCo(8, scope="replica", delay=2, min_participants=1)
    with pytest.raises(ValueError, match="needs several workers that"):
        trained_alone(env, adam, callback)
    return {}


@case("Late exchanges of fragments count less", compare=False)
@registry.same_as("exchanges_go_on_without_a_late_worker")
def diloco_scales_late_exchanges_of_fragments(env: Env) -> dict:
    callback = tfdp.callbacks.DiLoCo(
        SYNC_EVERY,
        scope="replica",
        fragments=2,
        delay=1,
        mixing=0.25,
        scale_by_staleness=True,
    )
    fragments = [(2, [0]), (0, [1, 2, 3])]
    staleness = check_delayed(
        env, callback, fragments, momentum, mixing=0.25, scales=True
    )
    assert staleness == [1, 1]
    return {}


class QuantizedNodes(Nodes):
    """Nodes whose pseudo-gradients travel in 8 bits, with error feedback."""

    def __init__(self, count: int, weights: list[np.ndarray]) -> None:
        super().__init__(count, weights, outer_sgd(), wide_model, momentum)
        self._quantized = QuantizedWide(8, 256)

    def meet(self, positions: list[int]) -> None:
        shares = self.since[positions[0]] / self.since[positions[0]].sum()
        anchors = [anchor.numpy() for anchor in self._anchors]
        vectors = [
            share
            * np.concatenate(
                [
                    (anchor - variable.numpy()).ravel()
                    for anchor, variable in zip(
                        anchors, model.trainable_variables, strict=True
                    )
                ]
            )
            for share, model in zip(shares, self.models, strict=True)
        ]
        total = self._quantized.reduced(np.stack(vectors))
        ends = np.cumsum([anchor.size for anchor in anchors])[:-1]
        parts = np.split(total, ends)
        for position, (anchor, part) in enumerate(
            zip(self._anchors, parts, strict=True)
        ):
            gradient = part.reshape(anchor.shape)
            self._outer.update_step(gradient, anchor, self._outer.learning_rate)
            for model in self.models:
                model.trainable_variables[position].assign(anchor)
            self.since[position] = 0


class QuantizedWide(Quantized):
    """`Quantized` of float64: rounded and added up in float32, as the graph does."""

    def rounded(self, rows: np.ndarray) -> np.ndarray:
        return super().rounded(rows.astype("float32"))

    def scattered(self, vectors: np.ndarray) -> np.ndarray:
        return super().scattered(vectors).astype("float64")


@case("Outer gradients of 8 bits", compare=False)
@registry.same_as("diloco_is_resumed_exactly")
def diloco_rounds_what_was_learned_with_error_feedback(env: Env) -> dict:
    # In float64 hardly a code depends on the order of a sum.
    rows = [
        (x.astype("float64"), y.astype("float64"))
        for x, y in batches()
        if len(x) == common.BATCH_SIZE
    ]

    callback = tfdp.callbacks.DiLoCo(SYNC_EVERY, scope="replica", compression="int8")
    everyone = {"links": SLOW, "node_size": env.num_replicas}
    with precision("float64"), routed(env, **everyone):
        model = common.build_in_scope(env, lambda: wide_model(momentum))
        first = model.get_weights()
        x, y = (np.concatenate(part) for part in zip(*rows, strict=True))
        common.fit(model, x, y, epochs=EPOCHS, callbacks=[callback])
        nodes = QuantizedNodes(env.num_replicas, first)
        for _ in range(EPOCHS):
            for number, batch in enumerate(rows, start=1):
                nodes.step(*batch)
                if number % SYNC_EVERY == 0:
                    nodes.meet([0, 1, 2, 3])
            nodes.meet([0, 1, 2, 3])
            nodes.average_slots()
        wanted = nodes.models[0].get_weights()
        found = list(env.weights(model).values())
        errors = np.concatenate(
            [abs(a - b).ravel() for a, b in zip(found, wanted, strict=True)]
        )
        # A scale that differs in its last bit may turn a code by one.
        assert np.mean(errors > 1e-5) < 0.02
        assert errors.max() < 0.01
        assert any(np.any(value) for value in states_of(env, model).values())
    return {}


def sent_bytes(env: Env, compression: object) -> float:
    """Bytes that the first replica sends of all buckets that a `fit` traces."""
    with routed(env, links=SLOW, node_size=env.num_replicas), timing.Recorder() as seen:
        with env.scope():
            model = common.compiled(common.mlp(1024), keras.optimizers.SGD(0.05))
        callback = tfdp.callbacks.DiLoCo(2, scope="replica", compression=compression)
        common.fit(model, *common.regression_data(16), callbacks=[callback], epochs=1)
    return sum(
        item.wire_bytes
        for item in seen.collectives
        if item.is_of_gradients and item.replica == 0
    )


@case("Bytes of compressed exchanges", compare=False)
@registry.same_as("diloco_is_resumed_exactly")
def compressed_exchanges_send_a_quarter(env: Env) -> dict:
    # A quarter, the scales, and the last block of each slice.
    assert sent_bytes(env, "int8") < 0.3 * sent_bytes(env, None)
    return {}


@case("A run with compressed, late exchanges is resumed exactly", compare=False)
@registry.same_as("diloco_is_resumed_exactly")
def compressed_late_exchanges_are_resumed_exactly(env: Env) -> dict:
    compression = BlockQuantized(block=16)

    def callback() -> keras.callbacks.Callback:
        return tfdp.callbacks.DiLoCo(
            4, scope="replica", compression=compression, delay=2
        )

    with routed(env, links=SLOW):
        return check_resumed(env, callback)


@case("The staleness of a resumed epoch is that of all its batches", compare=False)
@registry.same_as("diloco_is_resumed_exactly")
def staleness_before_a_backup_is_resumed(env: Env) -> dict:
    # The only late outer step of the epoch is made before the backup.
    return check_resumed(
        env, lambda: tfdp.callbacks.DiLoCo(7, scope="replica", delay=1), save_freq=8
    )


@case(
    "Across nodes only is compressed",
    compare=False,
    setups=("two_by_two",),
)
@registry.same_as("diloco_is_resumed_exactly")
def diloco_compresses_across_nodes(env: Env) -> dict:
    with routed(env, links=SLOW, node_size=2):
        with env.scope():
            model = wide_model(adam)
        callback = tfdp.callbacks.DiLoCo(SYNC_EVERY, compression="int8")
        common.fit(model, *common.regression_data(), callbacks=[callback])
        found = states_of(env, model)
        assert {key.split()[1] for key in found} == {"outer"}
        env.weights(model)  # the same on all replicas
    return {}
