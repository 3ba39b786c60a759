"""The table of all functions of Keras and TensorFlow that tfdp replaces.

Keras has no hooks for these changes. Each entry gives the reason. `install` applies the
table once per process, when the first strategy, callback or optimizer of tfdp is
created. Only two other places replace functions of Keras or TensorFlow:
`tfdp.ground.user_code`, which observes the start of TensorFlow, and `tfdp doctor
--input`, which measures `fit` in a separate process. A test of the table fails if a
release changes the signature of a replaced function.
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
    optimizer_hooks,
    runtime_hooks,
    trainer_hooks,
    worker_callbacks,
)

_KERAS_ISSUE = "https://github.com/keras-team/keras/issues"
_TENSORFLOW_ISSUE = "https://github.com/tensorflow/tensorflow/issues"


REPLACEMENTS = (
    # Compile, fit, evaluate, predict.
    Replacement(
        _compat.BaseTrainer,
        "compile",
        trainer_hooks.compile_model,
        "An optimizer or metric that was made outside the scope has variables that no "
        "strategy mirrors; float16 gets a loss scaler around a DistributedOptimizer.",
    ),
    *(
        Replacement(
            _compat.TensorFlowTrainer,
            name,
            functools.partial(trainer_hooks.run_loop, name),
            "Every worker runs every callback; wrong data, or a callback that only one "
            "worker has, is an error of TensorFlow's or a hang.",
            f"{_KERAS_ISSUE}/20585",
        )
        for name in ("fit", "evaluate", "predict")
    ),
    *(
        Replacement(
            _compat.TensorFlowTrainer,
            name,
            trainer_hooks.run_on_batch,
            "The global batch is not divided: it goes to every replica whole.",
        )
        for name in ("train_on_batch", "test_on_batch", "predict_on_batch")
    ),
    *(
        Replacement(
            _compat.TensorFlowTrainer,
            f"make_{name}",
            functools.partial(trainer_hooks.make_function, name),
            "XLA cannot compile collectives, but all else of a step, see "
            "`tfdp.training.strategy.compiled_step`; the watchdog has to know when it "
            "computes.",
            f"{_KERAS_ISSUE}/19005",
        )
        for name in ("train_function", "test_function", "predict_function")
    ),
    Replacement(
        _compat.BaseTrainer,
        "_resolve_auto_jit_compile",
        trainer_hooks.chosen_xla,
        "Keras compiles nothing under a strategy unless it is told to.",
    ),
    Replacement(
        _compat.TensorFlowTrainer,
        "_maybe_symbolic_build",
        trainer_hooks.build_symbolically,
        "Keras takes a batch to build from, which a generator loses, and a mean of it "
        "over the replicas, which fails on two workers, for strings, and for odd rows.",
        f"{_KERAS_ISSUE}/20585",
    ),
    Replacement(
        _compat.keras_trainer,
        "reduce_per_replica",
        trainer_hooks.reduce_per_replica,
        "Logs are those of one replica; a scalar has no axis to reduce on two workers; "
        "the rows of `predict` come in the order of stock sharding.",
        f"{_TENSORFLOW_ISSUE}/72388",
    ),
    Replacement(
        _compat.BaseTrainer,
        "_get_metrics_result_or_logs",
        trainer_hooks.epoch_logs,
        "An epoch whose batches a run before had all done has no logs.",
    ),
    *(
        Replacement(
            keras.Model,
            name,
            trainer_hooks.save,
            "Workers that save to one path write into each other's file.",
            f"{_TENSORFLOW_ISSUE}/38635",
        )
        for name in ("save", "save_weights", "export")
    ),
    *(
        Replacement(
            keras.callbacks.SwapEMAWeights,
            name,
            functools.partial(worker_callbacks.swap_or_restart_averages, method),
            "Averages that are sharded are in no variable of Keras's optimizer.",
        )
        for name, method in (
            ("_swap_variables", "swap_averages"),
            ("_finalize_ema_values", "restart_averages"),
        )
    ),
    # Batches and their order.
    Replacement(
        _compat.EpochIterator,
        "__init__",
        epochs.make_iterator,
        "Workers count the batches of their own data, and wait for ever where one "
        "has more; each shuffles arrays in an order of its own.",
    ),
    Replacement(
        _compat.EpochIterator,
        "__iter__",
        epochs.begin_epoch,
        "The watchdog has to know that a loop reads its data.",
    ),
    Replacement(
        _compat.EpochIterator,
        "__next__",
        epochs.next_step,
        "The watchdog has to know the step that a loop has come to.",
    ),
    Replacement(
        _compat.EpochIterator,
        "_enumerate_iterator",
        position.enumerate_batches,
        "A run that resumes has to go on with the batch after the last it has done.",
        "https://github.com/keras-team/keras-hub/issues/204",
    ),
    # Losses, metrics and gradients: a mean is over the rows of all replicas.
    Replacement(
        _compat.keras_loss,
        "reduce_values",
        layer_hooks.reduce_values,
        "A loss that is a scalar already is not divided by the number of replicas.",
        f"{_KERAS_ISSUE}/19891",
    ),
    Replacement(
        _compat.keras_loss,
        "scale_loss_for_distribution",
        layer_hooks.scale_loss,
        "Keras divides by the number of replicas, which is wrong where they hold "
        "different numbers of rows.",
        f"{_KERAS_ISSUE}/19891",
    ),
    Replacement(
        _compat.keras_loss,
        "unscale_loss_for_distribution",
        layer_hooks.unscale_loss,
        "The logs would multiply by the number of replicas what was not divided by it.",
        f"{_KERAS_ISSUE}/19891",
    ),
    Replacement(
        tf.GradientTape,
        "gradient",
        runtime_hooks.gradient,
        "Sharded parameters are gathered again in a backward pass.",
    ),
    Replacement(
        tf.distribute.ReplicaContext,
        "all_reduce",
        runtime_hooks.all_reduce,
        "A step is traced as one device's.",
    ),
    Replacement(
        tf.distribute.ReplicaContext,
        "replica_id_in_sync_group",
        runtime_hooks.replica_id,
        "A step is traced as one device's, on every worker.",
    ),
    # Layers: batch statistics, empty batches, and random numbers.
    Replacement(
        _compat.keras_nn,
        "_compute_moments_sync",
        layer_hooks.moments,
        "Synchronized BatchNormalization issues three all-reduces a layer, one after "
        "the other.",
    ),
    Replacement(
        keras.layers.BatchNormalization,
        "call",
        layer_hooks.normalize,
        "An eager step runs on the rows of all replicas, whose moments Keras takes for "
        "each replica.",
    ),
    Replacement(
        keras.layers.BatchNormalization,
        "_moments",
        layer_hooks.masked_moments,
        "With a mask the moments are those of the replica's samples, also where the "
        "layer is synchronized.",
    ),
    *(
        Replacement(
            _compat.keras_nn,
            name,
            layer_hooks.pad_empty_batch,
            "Convolutions by oneDNN return a wrong shape where there are no rows, and "
            "the gradients of pooling end the process.",
        )
        for name in (
            "conv",
            "depthwise_conv",
            "separable_conv",
            "max_pool",
            "average_pool",
        )
    ),
    *(
        Replacement(
            module,
            "draw_seed",
            layer_hooks.draw_seed,
            "All replicas draw the same Dropout mask.",
        )
        for module in (_compat.keras_random, _compat.keras_image)
    ),
    Replacement(
        _compat.keras_core,
        "remat",
        layer_hooks.rematerialize,
        "Layers of a `RematScope` are called with keyword arguments where Keras builds "
        "a model under a strategy, which `tf.recompute_grad` refuses in a graph.",
    ),
    # Updates by a plain Keras optimizer.
    Replacement(
        _compat.BaseOptimizer,
        "build",
        optimizer_hooks.build,
        "An optimizer or a model that was made outside the scope is an error of "
        "TensorFlow's about mixed strategies.",
    ),
    Replacement(
        _compat.BaseOptimizer,
        "apply",
        optimizer_hooks.apply,
        "Each replica clips, accumulates and checks its own gradients before they are "
        "added up.",
        f"{_KERAS_ISSUE}/20582",
    ),
    Replacement(
        keras.optimizers.LossScaleOptimizer,
        "apply",
        optimizer_hooks.apply_or_defer,
        "An update waits for the end of the part of a step that XLA compiles.",
    ),
    Replacement(
        keras.optimizers.LossScaleOptimizer,
        "check_finite",
        optimizer_hooks.check_finite,
        "A replica that overflows alone would skip an update, and its collectives, "
        "that the others make.",
        f"{_KERAS_ISSUE}/18666",
    ),
    # Saving and loading: files hold the user's own optimizer.
    *(
        Replacement(
            module,
            name,
            file_hooks.save_file,
            "Plain Keras could not open a file with a DistributedOptimizer; sharded "
            "state is on all workers; `keras.saving.save_model` is not atomic.",
        )
        for module, name in (
            (_compat.saving_lib, "save_model"),
            (_compat.saving_lib, "save_weights_only"),
            (_compat.legacy_h5_format, "save_model_to_hdf5"),
        )
    ),
    Replacement(
        _compat.saving_lib,
        "load_weights_only",
        file_hooks.load_with_plain_optimizer,
        "A file holds the user's own optimizer, without the DistributedOptimizer.",
    ),
    Replacement(
        _compat.BaseOptimizer,
        "save_own_variables",
        file_hooks.save_own_variables,
        "Of Keras's accumulators, which differ, the first replica's are written.",
    ),
    Replacement(
        _compat.BaseOptimizer,
        "load_own_variables",
        file_hooks.load_own_variables,
        "Each replica would add all that one device had accumulated.",
    ),
    Replacement(
        _compat.MultiDeviceSaver,
        "save",
        file_hooks.save_tensors,
        "Workers that save a `tf.train.Checkpoint` or a SavedModel to one path remove "
        "each other's temporary files.",
        f"{_TENSORFLOW_ISSUE}/38635",
    ),
    # TensorFlow's runtime.
    Replacement(
        _compat.FunctionType,
        "__hash__",
        runtime_hooks.hash_once,
        "Every call of a traced function hashes the types of all that it captures, "
        "once or twice for each variable.",
    ),
    Replacement(
        _compat.AtomicFunction,
        "call_flat",
        runtime_hooks.call_flat,
        "Collectives between processes that a failed call has begun would meet those "
        "of the next call; why one of them has failed, TensorFlow does not know.",
    ),
    Replacement(
        tf.data.Dataset,
        "cache",
        runtime_hooks.cache,
        "The file of a cache is locked by the first worker that writes it; the others "
        "fail.",
    ),
    Replacement(
        _compat.PolymorphicFunction,
        "__call__",
        runtime_hooks.call_function,
        "A function that a step calls is traced once for all its callers, and an "
        "update inside of it would have no place in the step.",
    ),
    Replacement(
        tf.random.Generator,
        "_preprocess_key",
        runtime_hooks.key_of_generator,
        "A generator that is made in a scope draws other numbers on each replica, and "
        "other ones than on one device.",
    ),
    Replacement(
        _compat.random_seed,
        "get_seed",
        runtime_hooks.seeds_of_operation,
        "A global seed that tfdp sets, so that workers draw alike, would change the "
        "numbers of operations with a seed of their own.",
    ),
)


@functools.cache
def install() -> None:
    """Apply every replacement of the table; later calls have no effect."""
    for entry in REPLACEMENTS:
        _compat.replace(entry)
    # Tracebacks shall show the user's lines, so that these frames are hidden as Keras
    # hides its own. A frame has the path of the import, with links unresolved.
    _compat.hide_from_tracebacks(str(Path(__file__).parents[2]) + os.sep)
