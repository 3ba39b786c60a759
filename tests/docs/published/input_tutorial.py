"""Distributed datasets, iterators and values: a function for each part of the page."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.docs.published.bed import SUMMED, Bed


def ones(rows: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(rows)


def num_rows(strategy: Any, value: Any) -> int:
    """Rows of this worker's replicas."""
    parts = strategy.experimental_local_results(value)
    return sum(int(tf.shape(part)[0]) for part in parts)


def datasets(bed: Bed) -> dict:
    """A batch; a dataset that names its sharding; one made by a function."""
    strategy = bed.strategy()
    x, y = next(iter(strategy.experimental_distribute_dataset(ones(100).batch(16))))
    options = tf.data.Options()
    data = tf.data.experimental.AutoShardPolicy.DATA
    options.experimental_distribute.auto_shard_policy = data
    sharded = ones(64).batch(16).with_options(options)

    def from_function(context):
        size = context.get_per_replica_batch_size(16)
        shard = (context.num_input_pipelines, context.input_pipeline_id)
        return ones(64).batch(16).shard(*shard).batch(size).prefetch(2)

    strategy.distribute_datasets_from_function(from_function)
    # Differs: the page does not read the second.
    sharded = strategy.experimental_distribute_dataset(sharded)
    return {
        f"{SUMMED}batch": [num_rows(strategy, part) for part in (x, y)],
        f"{SUMMED}sharded": [num_rows(strategy, x) for x, _ in sharded],
    }


def loops(bed: Bed) -> dict:
    """Over a dataset, and by an iterator."""
    strategy = bed.strategy()
    dataset = strategy.experimental_distribute_dataset(ones(100).batch(16))

    @tf.function
    def train_step(inputs):
        features, labels = inputs
        return labels - 0.3 * features

    counts, sums = [], []
    for x in dataset:
        loss = strategy.run(train_step, args=(x,))
        counts.append(num_rows(strategy, loss))
        sums.append(strategy.reduce("SUM", loss, axis=0).numpy())
    for _ in range(2):
        iterator = iter(dataset)
        for _ in range(5):
            loss = strategy.run(train_step, args=(next(iterator),))
            sums.append(strategy.reduce("SUM", loss, axis=0).numpy())
    return {f"{SUMMED}loop": counts, "losses": sums}


def loop_to_the_end(bed: Bed) -> dict:
    """A loop within a function, which ends with the data."""
    strategy = bed.strategy()
    dataset = tf.data.Dataset.range(9).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    # Differs: the page prints what it reads.
    seen = tf.Variable(tf.zeros([9], tf.int64))

    @tf.function
    def read_all(iterator):
        for _ in tf.range(5):
            optional = iterator.get_next_as_optional()
            if not optional.has_value():
                break
            values = strategy.run(lambda x: x, args=(optional.get_value(),))
            for part in strategy.experimental_local_results(values):
                seen.scatter_add(tf.IndexedSlices(part + 1, part))

    read_all(iterator)
    return {f"{SUMMED}seen": seen.numpy()}


def signature(bed: Bed) -> dict:
    """The type of a distributed element as the signature of a function."""
    strategy = bed.strategy()
    dataset = strategy.experimental_distribute_dataset(ones(100).batch(16))

    @tf.function(input_signature=[dataset.element_spec])
    def doubled(inputs):
        return strategy.run(lambda pair: [2 * x for x in pair], args=(inputs,))

    sums = []
    for _ in range(2):
        iterator = iter(dataset)
        for _ in range(5):
            twice, _ = doubled(next(iterator))
            sums.append(strategy.reduce("SUM", twice, axis=0).numpy())
    return {"doubled": sums}


def preprocessing(bed: Bed) -> dict:
    """A layer of Keras in the dataset of each worker."""
    strategy = bed.strategy()
    with strategy.scope():
        layer = keras.layers.StringLookup(vocabulary=["a", "b", "c", "d", "f"])

    def words(context):
        size = context.get_per_replica_batch_size(4)
        shard = (context.num_input_pipelines, context.input_pipeline_id)
        dataset = tf.data.Dataset.from_tensor_slices(["a", "c", "e"]).repeat()
        return dataset.batch(size).shard(*shard).map(lambda word: layer(word))

    iterator = iter(strategy.distribute_datasets_from_function(words))
    found = set()
    for _ in range(3):
        for part in strategy.experimental_local_results(next(iterator)):
            found |= set(np.asarray(part).tolist())
    return {"words": sorted(found)}


def order_of_rows(bed: Bed) -> dict:
    """Predictions, each put at the index that travels with its row."""
    strategy = bed.strategy()
    dataset = tf.data.Dataset.range(24).enumerate().batch(6)
    predicted = np.zeros(24, np.int64)
    for index, inputs in strategy.experimental_distribute_dataset(dataset):
        pair = strategy.run(lambda i, x: (i, 2 * x), args=(index, inputs))
        parts = map(strategy.experimental_local_results, pair)
        for i, value in zip(*parts, strict=True):
            predicted[i.numpy()] += value.numpy()
    return {f"{SUMMED}predicted": predicted}


def values(bed: Bed) -> dict:
    """Values of a function of the replica, and rows of a generator."""
    strategy = bed.strategy()
    ids = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(context.replica_id_in_sync_group)
    )
    ids = strategy.run(lambda x: x, args=(ids,))
    sum_of_ids = int(strategy.reduce("SUM", ids, axis=None))
    replicas = strategy.num_replicas_in_sync

    def generator():
        random = np.random.default_rng(3)
        while True:
            yield random.random(4)

    dataset = tf.data.Dataset.from_generator(
        generator, output_types=tf.float32, output_shapes=tf.TensorShape([4])
    )
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    rows = {}
    for step in range(4):
        result = strategy.run(lambda x: x, args=(next(iterator),))
        parts = strategy.experimental_local_results(result)
        rows |= bed.rows(f"generated {step}", parts, 4)
    return {"each replica once": sum_of_ids == sum(range(replicas)), **rows}


def main(bed: Bed) -> dict:
    parts = (
        datasets,
        loops,
        loop_to_the_end,
        signature,
        preprocessing,
        order_of_rows,
        values,
    )
    return {name: value for part in parts for name, value in part(bed).items()}
