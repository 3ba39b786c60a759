"""The table of all functions of Keras and TensorFlow that tfdp replaces.

Keras has no hooks for what is done here. Each entry says why, and `install` puts it in
its place, once for a process, when the first strategy, callback or optimizer of tfdp is
made. Nothing else replaces a function of Keras or TensorFlow, but for
`tfdp.ground.user_code`, which sees TensorFlow start, and `tfdp doctor --input`, which
measures `fit` in a process of its own. The test of the table fails where a release
changes the signature of one of them.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import keras
import tensorflow as tf

from tfdp.ground import _compat
from tfdp.ground._compat import Replacement
from tfdp.training.data import epochs, position
from tfdp.training.keras_hooks import (
    file_hooks,
    layer_hooks,
    loss_hooks,
    optimizer_hooks,
    runtime_hooks,
    trainer_hooks,
    worker_callbacks,
)

TENSORFLOW = "TensorFlow 2.19 to 2.21"

_KERAS_ISSUE = "https://github.com/keras-team/keras/issues"
_TENSORFLOW_ISSUE = "https://github.com/tensorflow/tensorflow/issues"


@functools.cache
def install() -> None:
    """Put every replacement of the table in its place; again has no effect."""
    for entry in REPLACEMENTS:
        _compat.replace(entry)
    # A mistake in a user's model is found in the user's lines, not in these. Frames
    # have the path by which a file was imported, also where that leads through a link.
    _compat.hide_from_tracebacks(str(Path(__file__).parents[2]) + os.sep)


# Compile, fit, evaluate, predict.
_TRAINER = (
    Replacement(
        _compat.BaseTrainer,
        "compile(self, optimizer, loss, loss_weights, metrics, weighted_metrics, "
        "run_eagerly, steps_per_execution, jit_compile, auto_scale_loss)",
        trainer_hooks.compile_model,
        "An optimizer or metric that was made outside the scope has variables that no "
        "strategy mirrors; float16 gets a loss scaler around a DistributedOptimizer.",
    ),
    Replacement(
        _compat.TensorFlowTrainer,
        "fit(self, x, y, batch_size, epochs, verbose, callbacks, validation_split, "
        "validation_data, shuffle, class_weight, sample_weight, initial_epoch, "
        "steps_per_epoch, validation_steps, validation_batch_size, validation_freq)",
        trainer_hooks.fit,
        "Every worker runs every callback; wrong data, or a callback that only one "
        "worker has, is an error of TensorFlow's or a hang.",
        f"{_KERAS_ISSUE}/20585",
    ),
    Replacement(
        _compat.TensorFlowTrainer,
        "evaluate(self, x, y, batch_size, verbose, sample_weight, steps, callbacks, "
        "return_dict, **kwargs)",
        trainer_hooks.evaluate,
        "As `fit`.",
        f"{_KERAS_ISSUE}/20585",
    ),
    Replacement(
        _compat.TensorFlowTrainer,
        "predict(self, x, batch_size, verbose, steps, callbacks)",
        trainer_hooks.predict,
        "As `fit`.",
        f"{_KERAS_ISSUE}/20585",
    ),
    *(
        Replacement(
            _compat.TensorFlowTrainer,
            call,
            trainer_hooks.run_on_batch,
            "The global batch is not divided: it goes to every replica whole.",
        )
        for call in (
            "train_on_batch(self, x, y, sample_weight, class_weight, return_dict)",
            "test_on_batch(self, x, y, sample_weight, return_dict)",
            "predict_on_batch(self, x)",
        )
    ),
    *(
        Replacement(
            _compat.TensorFlowTrainer,
            call,
            function,
            "XLA cannot compile collectives, but all else of a step, see "
            "`tfdp.training.strategy.compiled_step`; the watchdog has to know when it "
            "computes.",
            f"{_KERAS_ISSUE}/19005",
        )
        for call, function in (
            ("make_train_function(self, force)", trainer_hooks.make_train_function),
            ("make_test_function(self, force)", trainer_hooks.make_test_function),
            ("make_predict_function(self, force)", trainer_hooks.make_predict_function),
        )
    ),
    Replacement(
        _compat.BaseTrainer,
        "_resolve_auto_jit_compile(self)",
        trainer_hooks.chosen_xla,
        "Keras compiles nothing under a strategy unless it is told to.",
    ),
    Replacement(
        _compat.TensorFlowTrainer,
        "_maybe_symbolic_build(self, iterator, data_batch)",
        trainer_hooks.build_symbolically,
        "Keras takes a batch to build from, which a generator loses, and a mean of it "
        "over the replicas, which fails on two workers, for strings, and for odd rows.",
        f"{_KERAS_ISSUE}/20585",
    ),
    Replacement(
        _compat.keras_trainer,
        "reduce_per_replica(values, strategy, reduction)",
        trainer_hooks.reduce_per_replica,
        "Logs are those of one replica; a scalar has no axis to reduce on two workers; "
        "the rows of `predict` come in the order of stock sharding.",
        f"{_TENSORFLOW_ISSUE}/72388",
    ),
    Replacement(
        _compat.BaseTrainer,
        "_get_metrics_result_or_logs(self, logs)",
        trainer_hooks.epoch_logs,
        "An epoch whose batches a run before had all done has no logs.",
    ),
    *(
        Replacement(
            keras.Model,
            call,
            trainer_hooks.save,
            "Workers that save to one path write into each other's file.",
            f"{_TENSORFLOW_ISSUE}/38635",
        )
        for call in (
            "save(self, filepath, overwrite, zipped, **kwargs)",
            "save_weights(self, filepath, overwrite, max_shard_size)",
            "export(self, filepath, format, verbose, input_signature, **kwargs)",
        )
    ),
    Replacement(
        keras.callbacks.SwapEMAWeights,
        "_swap_variables(self)",
        worker_callbacks.swap_averages,
        "Averages that are sharded are in no variable of Keras's optimizer.",
    ),
    Replacement(
        keras.callbacks.SwapEMAWeights,
        "_finalize_ema_values(self)",
        worker_callbacks.restart_averages,
        "The same, where averages start again from the weights.",
    ),
)

# Batches and their order.
_DATA = (
    Replacement(
        _compat.EpochIterator,
        "__init__(self, distribute_strategy, *args, **kwargs)",
        epochs.make_iterator,
        "Workers count the batches of their own data, and wait for ever where one "
        "has more; each shuffles arrays in an order of its own.",
    ),
    Replacement(
        _compat.EpochIterator,
        "__iter__(self)",
        epochs.begin_epoch,
        "The watchdog has to know that a loop reads its data.",
    ),
    Replacement(
        _compat.EpochIterator,
        "__next__(self)",
        epochs.next_step,
        "The watchdog has to know the step that a loop has come to.",
    ),
    Replacement(
        _compat.EpochIterator,
        "_enumerate_iterator(self)",
        position.enumerate_batches,
        "A run that resumes has to go on with the batch after the last it has done.",
        "https://github.com/keras-team/keras-hub/issues/204",
    ),
)

# Losses, metrics and gradients: a mean is over the rows of all replicas.
_LOSSES = (
    Replacement(
        _compat.keras_loss,
        "reduce_values(values, sample_weight, reduction)",
        loss_hooks.reduce_values,
        "A loss that is a scalar already is not divided by the number of replicas.",
        f"{_KERAS_ISSUE}/19891",
    ),
    Replacement(
        _compat.keras_loss,
        "scale_loss_for_distribution(value)",
        loss_hooks.scale_loss,
        "Keras divides by the number of replicas, which is wrong where they hold "
        "different numbers of rows.",
        f"{_KERAS_ISSUE}/19891",
    ),
    Replacement(
        _compat.keras_loss,
        "unscale_loss_for_distribution(value)",
        loss_hooks.unscale_loss,
        "The logs would multiply by the number of replicas what was not divided by it.",
        f"{_KERAS_ISSUE}/19891",
    ),
    Replacement(
        tf.GradientTape,
        "gradient(self, target, sources, output_gradients, unconnected_gradients)",
        loss_hooks.gradient,
        "Sharded parameters are gathered again in a backward pass.",
        checked_on=TENSORFLOW,
    ),
    Replacement(
        tf.distribute.ReplicaContext,
        "all_reduce(self, reduce_op, value, options)",
        loss_hooks.all_reduce,
        "A step is traced as one device's.",
        checked_on=TENSORFLOW,
    ),
    Replacement(
        tf.distribute.ReplicaContext,
        "replica_id_in_sync_group(self)",
        loss_hooks.replica_id,
        "A step is traced as one device's, on every worker.",
        checked_on=TENSORFLOW,
    ),
)

# Layers: what is computed over a batch, and what is drawn.
_LAYERS = (
    Replacement(
        _compat.keras_nn,
        "_compute_moments_sync(x, axes, keepdims)",
        layer_hooks.moments,
        "Synchronized BatchNormalization issues three all-reduces a layer, one after "
        "the other.",
    ),
    Replacement(
        keras.layers.BatchNormalization,
        "call(self, inputs, training, mask)",
        layer_hooks.normalize,
        "An eager step runs on the rows of all replicas, whose moments Keras takes for "
        "each replica.",
    ),
    Replacement(
        keras.layers.BatchNormalization,
        "_moments(self, inputs, mask)",
        layer_hooks.moments_of_masked,
        "With a mask the moments are those of the replica's samples, also where the "
        "layer is synchronized.",
    ),
    *(
        Replacement(
            _compat.keras_nn,
            call,
            layer_hooks.give_a_row,
            "Convolutions by oneDNN return a wrong shape where there are no rows, and "
            "the gradients of pooling end the process.",
        )
        for call in (
            "conv(inputs, kernel, strides, padding, data_format, dilation_rate)",
            "depthwise_conv(inputs, kernel, strides, padding, data_format, "
            "dilation_rate)",
            "separable_conv(inputs, depthwise_kernel, pointwise_kernel, strides, "
            "padding, data_format, dilation_rate)",
            "max_pool(inputs, pool_size, strides, padding, data_format)",
            "average_pool(inputs, pool_size, strides, padding, data_format)",
        )
    ),
    *(
        Replacement(
            module,
            "draw_seed(seed)",
            layer_hooks.draw_seed,
            "All replicas draw the same Dropout mask.",
        )
        for module in (_compat.keras_random, _compat.keras_image)
    ),
    Replacement(
        _compat.keras_core,
        "remat(f)",
        layer_hooks.rematerialize,
        "Layers of a `RematScope` are called with keyword arguments where Keras builds "
        "a model under a strategy, which `tf.recompute_grad` refuses in a graph.",
    ),
)

# Updates by a plain Keras optimizer.
_OPTIMIZERS = (
    Replacement(
        _compat.BaseOptimizer,
        "build(self, variables)",
        optimizer_hooks.build,
        "An optimizer or a model that was made outside the scope is an error of "
        "TensorFlow's about mixed strategies.",
    ),
    Replacement(
        _compat.BaseOptimizer,
        "apply(self, grads, trainable_variables)",
        optimizer_hooks.apply,
        "Each replica clips, accumulates and checks its own gradients before they are "
        "added up.",
        f"{_KERAS_ISSUE}/20582",
    ),
    Replacement(
        keras.optimizers.LossScaleOptimizer,
        "apply(self, grads, trainable_variables)",
        optimizer_hooks.apply_or_defer,
        "An update waits for the end of the part of a step that XLA compiles.",
    ),
    Replacement(
        keras.optimizers.LossScaleOptimizer,
        "check_finite(self, grads)",
        optimizer_hooks.check_finite,
        "A replica that overflows alone would skip an update, and its collectives, "
        "that the others make.",
        f"{_KERAS_ISSUE}/18666",
    ),
)

# Files, which hold the user's own optimizer.
_FILES = (
    *(
        Replacement(
            module,
            call,
            file_hooks.save_file,
            "Plain Keras could not open a file with a DistributedOptimizer; sharded "
            "state is on all workers; `keras.saving.save_model` is not atomic.",
        )
        for module, call in (
            (
                _compat.saving_lib,
                "save_model(model, filepath, weights_format, zipped)",
            ),
            (
                _compat.saving_lib,
                "save_weights_only(model, filepath, max_shard_size, objects_to_skip)",
            ),
            (
                _compat.legacy_h5_format,
                "save_model_to_hdf5(model, filepath, overwrite, include_optimizer)",
            ),
        )
    ),
    Replacement(
        _compat.saving_lib,
        "load_weights_only(model, filepath, skip_mismatch, objects_to_skip)",
        file_hooks.load_with_plain_optimizer,
        "A file holds the user's own optimizer, without the DistributedOptimizer.",
    ),
    Replacement(
        _compat.BaseOptimizer,
        "save_own_variables(self, store)",
        file_hooks.save_own_variables,
        "Of Keras's accumulators, which differ, the first replica's are written.",
    ),
    Replacement(
        _compat.BaseOptimizer,
        "load_own_variables(self, store)",
        file_hooks.load_own_variables,
        "Each replica would add all that one device had accumulated.",
    ),
    Replacement(
        _compat.MultiDeviceSaver,
        "save(self, file_prefix, options)",
        file_hooks.save_tensors,
        "Workers that save a `tf.train.Checkpoint` or a SavedModel to one path remove "
        "each other's temporary files.",
        f"{_TENSORFLOW_ISSUE}/38635",
        checked_on=TENSORFLOW,
    ),
)

# TensorFlow's runtime.
_RUNTIME = (
    Replacement(
        _compat.FunctionType,
        "__hash__(self)",
        runtime_hooks.hash_once,
        "Every call of a traced function hashes the types of all that it captures, "
        "once or twice for each variable.",
        checked_on=TENSORFLOW,
    ),
    Replacement(
        _compat.AtomicFunction,
        "call_flat(self, *args)",
        runtime_hooks.call_flat,
        "Collectives between processes that a failed call has begun would meet those "
        "of the next call; why one of them has failed, TensorFlow does not know.",
        checked_on=TENSORFLOW,
    ),
    Replacement(
        tf.data.Dataset,
        "cache(self, filename, name)",
        runtime_hooks.cache,
        "The file of a cache is locked by the first worker that writes it; the others "
        "fail.",
        checked_on=TENSORFLOW,
    ),
    Replacement(
        _compat.PolymorphicFunction,
        "__call__(self, *args, **kwds)",
        runtime_hooks.call_function,
        "A function that a step calls is traced once for all its callers, and an "
        "update inside of it would have no place in the step.",
        checked_on=TENSORFLOW,
    ),
    Replacement(
        tf.random.Generator,
        "_preprocess_key(self, key)",
        runtime_hooks.key_of_generator,
        "A generator that is made in a scope draws other numbers on each replica, and "
        "other ones than on one device.",
        checked_on=TENSORFLOW,
    ),
    Replacement(
        _compat.random_seed,
        "get_seed(op_seed)",
        runtime_hooks.seeds_of_operation,
        "A global seed that tfdp sets, so that workers draw alike, would change the "
        "numbers of operations with a seed of their own.",
        checked_on=TENSORFLOW,
    ),
)

REPLACEMENTS = (
    *_TRAINER,
    *_DATA,
    *_LOSSES,
    *_LAYERS,
    *_OPTIMIZERS,
    *_FILES,
    *_RUNTIME,
)
