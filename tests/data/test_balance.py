"""Rows by weight, weights by speed, and training with both."""

from __future__ import annotations

import json
import random
from fractions import Fraction

import pytest
import tensorflow as tf

from tests.harness import forks
from tests.harness.forks import Start
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tests.harness.tf_config import cluster_configs
from tfdp.training.data.load_balancer import (
    EQUAL,
    LoadBalancer,
    WeightSearch,
    next_weights,
    rows_by_weight,
    rows_of_ranks_by_weight,
)
from tfdp.training.data.rows import rows_of_rank

CASE_MODULES = ("data.cases_balance",)
DEADLINE_SECONDS = 90.0


def test_rebalance(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


def rows(num_rows: int, weights: list[int]) -> list[int]:
    return rows_by_weight(num_rows, weights).numpy().tolist()


def drawn(seed: int) -> tuple[int, list[int]]:
    rng = random.Random(seed)
    count = rng.randint(2, 12)
    weights = [rng.choice([1, rng.randint(1, 3000)]) for _ in range(count)]
    return rng.randint(0, rng.choice([20, 5000])), weights


@pytest.mark.parametrize("seed", range(60))
def test_rows_by_weight_are_all_rows_and_one_for_each_at_least(seed: int):
    num_rows, weights = drawn(seed)
    found = rows(num_rows, weights)
    assert sum(found) == num_rows
    if num_rows >= len(weights):
        assert min(found) >= 1
    else:
        assert found == [1] * num_rows + [0] * (len(weights) - num_rows)


@pytest.mark.parametrize("seed", range(60))
def test_a_larger_weight_never_has_fewer_rows(seed: int):
    num_rows, weights = drawn(seed)
    if num_rows >= len(weights):
        pairs = sorted(zip(weights, rows(num_rows, weights), strict=True))
        by_weight = [count for _, count in pairs]
        assert by_weight == sorted(by_weight)


@pytest.mark.parametrize("seed", range(60))
def test_rows_are_within_one_of_their_quota_where_each_quota_is_a_row(seed: int):
    num_rows, weights = drawn(seed)
    quotas = [Fraction(num_rows * weight, sum(weights)) for weight in weights]
    if min(quotas) >= 1:
        for count, quota in zip(rows(num_rows, weights), quotas, strict=True):
            assert abs(count - quota) < 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("weight", [1, EQUAL])
def test_equal_weights_make_exactly_the_parts_that_there_are_without(count, weight):
    ranks = list(range(count))
    for num_rows in range(25):
        batch = tf.range(num_rows)
        for rank, part in zip(
            ranks, rows_of_ranks_by_weight(batch, ranks, [weight] * count), strict=True
        ):
            plain = rows_of_rank(batch, rank, count)
            assert part.numpy().tolist() == plain.numpy().tolist()


def test_many_rows_and_replicas_do_not_overflow():
    weights = [EQUAL] * 1023 + [2 * EQUAL]
    found = rows(2_000_000, weights)
    assert sum(found) == 2_000_000
    assert abs(found[-1] - 2 * found[0]) <= 2


def test_ragged_and_sparse_tensors_scalars_and_none_are_divided_too():
    dense = tf.reshape(tf.range(16), [8, 2])
    ragged = tf.ragged.constant([[i] * (i % 3) for i in range(8)])
    batch = (dense, ragged, tf.sparse.from_dense(dense), tf.constant(3), None)
    first, second = rows_of_ranks_by_weight(batch, [0, 1], [EQUAL, 3 * EQUAL])
    for part, chosen in ((first, slice(0, 2)), (second, slice(2, 8))):
        assert part[0].numpy().tolist() == dense[chosen].numpy().tolist()
        assert part[1].to_list() == ragged[chosen].to_list()
        back = tf.sparse.to_dense(part[2])
        assert back.numpy().tolist() == dense[chosen].numpy().tolist()
        assert part[3] == 3
        assert part[4] is None


def settled(cost: list[float], fixed: list[float], num_rows: int = 256) -> list[float]:
    """What a step takes each worker after some rounds, with such a cost of a row."""
    weights, search = (EQUAL,) * len(cost), WeightSearch()
    for _ in range(16):
        count = rows(num_rows, list(weights))
        seconds = [f + c * n for f, c, n in zip(fixed, cost, count, strict=True)]
        weights = search.next(weights, count, [round(1e6 * s) for s in seconds])
    return seconds


@pytest.mark.parametrize("cost", [[1e-3, 2e-3], [1e-3, 1e-3, 8e-3], [4e-3] * 4])
@pytest.mark.parametrize("fixed", [0.0, 0.02])
def test_weights_settle_where_all_workers_take_equally_long(cost, fixed):
    seconds = settled(cost, [fixed] * len(cost))
    assert max(seconds) <= 1.1 * min(seconds)


def test_a_worker_that_is_slow_whatever_it_gets_keeps_a_row_and_harms_nobody():
    seconds = settled([1e-3, 1e-3], [0.0, 2.0])
    assert max(seconds) <= 2.0 + 1e-3 * 128


def test_weights_go_half_of_the_way_at_most():
    assert next_weights([EQUAL] * 2, [100, 100], [10, 10_000]) == (1499, 501)
    assert min(next_weights([1, 1999], [1, 255], [10_000, 1])) == 1


def test_a_move_that_made_the_step_longer_is_taken_back_and_tried_later():
    search, equal = WeightSearch(), (EQUAL, EQUAL)

    def told(weights: tuple[int, ...], *milliseconds: int) -> tuple[int, ...]:
        return search.next(weights, rows(100, list(weights)), milliseconds)

    # Worker 1 seems slow, but with fewer rows nothing is won.
    moved = told(equal, 100, 150)
    assert moved[0] > EQUAL > moved[1]
    assert told(moved, 170, 140) == equal
    assert told(equal, 100, 150) == equal  # waits once
    moved = told(equal, 100, 150)
    assert told(moved, 170, 140) == equal
    for _ in range(2):
        assert told(equal, 100, 150) == equal  # waits twice
    # Now it helps, and so it goes on.
    moved = told(equal, 100, 150)
    further = told(moved, 110, 135)
    assert further[1] < moved[1]
    # What is a little longer may be noise.
    assert told(further, 139, 110)[1] > further[1]


def test_hosts_that_all_became_slower_are_measured_anew():
    search, equal = WeightSearch(), (EQUAL, EQUAL)
    moved = search.next(equal, [50, 50], [100, 150])
    assert search.next(equal, [50, 50], [300, 450]) == moved
    assert search.next(moved, [60, 40], [330, 400])[1] < moved[1]


def test_small_differences_move_nothing():
    assert next_weights([700, 1300], [7, 13], [100, 105]) == (700, 1300)
    assert next_weights([700, 1300], [7, 13], [100, 106]) != (700, 1300)
    assert next_weights([700, 1300], [7, 13], [0, 0]) == (700, 1300)


def test_local_replicas_share_the_rows_of_their_worker():
    balance = LoadBalancer(2, 2)
    assert balance.rows(10) == [6, 4]  # 3, 3, 2, 2: as without weights
    balance.set([1500, 500])
    assert balance.rows(16) == [12, 4]
    assert balance.weights.numpy().tolist() == [1500, 1500, 500, 500]


# The setting travels from the launcher to the strategy.


def asked(texts: list[str], *ranks: int) -> list[str]:
    """Lets the workers of some ranks be asked to rebalance."""
    configs = [json.loads(text) for text in texts]
    for rank in ranks:
        configs[rank].setdefault("tfdp", {})["rebalance"] = True
    return [json.dumps(config) for config in configs]


def train_with_a_slow_second_worker() -> dict:
    """What the workers of a job do that was started with `--rebalance`."""
    import time

    import keras

    import tfdp
    from tests.data.cases_balance import BATCH, SLOW_SECONDS, told_of_rows
    from tests.harness import common

    keras.utils.set_random_seed(1)
    strategy = tfdp.auto_strategy()
    rank = strategy.extended.worker_group.rank
    with strategy.scope():
        inputs = keras.Input((common.NUM_FEATURES,))
        model = keras.Sequential([inputs, keras.layers.Dense(1)])
        common.compiled(model)
    data = common.regression_data(8 * BATCH)
    with told_of_rows(lambda rows: time.sleep(SLOW_SECONDS * rows * rank)):
        history = common.fit(model, *data, batch_size=BATCH, epochs=4)
    return {"rows": strategy.extended.balance.rows(BATCH), "loss": history["loss"]}


@pytest.mark.full
@pytest.mark.processes
def test_a_job_that_was_asked_to_rebalances():
    starts = [
        Start(train_with_a_slow_second_worker, text)
        for text in asked(cluster_configs(2), 0, 1)
    ]
    first, second = forks.run(starts, DEADLINE_SECONDS)
    assert not first.error, first
    assert first.value == second.value
    assert first.value["rows"][1] < 8 < first.value["rows"][0]


def number_replica_weights() -> int:
    import tfdp

    return tfdp.auto_strategy().num_replicas_in_sync


@pytest.mark.processes
def test_workers_of_which_one_was_not_asked_to_rebalance_are_refused():
    texts = asked(cluster_configs(2), 1)
    starts = [Start(number_replica_weights, text) for text in texts]
    for answer in forks.run(starts, DEADLINE_SECONDS):
        assert answer.error == "ValueError"
        assert "settings of `rebalance`: worker 0 has false" in answer.text
