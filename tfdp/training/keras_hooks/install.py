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

from tfdp.ground._compat import owners, patches, runtime
from tfdp.ground._compat.patches import Replacement
from tfdp.training.data import epochs, position
from tfdp.training.keras_hooks import (
    file_hooks,
    layer_hooks,
    optimizer_hooks,
    runtime_hooks,
    step_functions,
    trainer_hooks,
    worker_callbacks,
)

_KERAS_ISSUE = "https://github.com/keras-team/keras/issues"
_TENSORFLOW_ISSUE = "https://github.com/tensorflow/tensorflow/issues"


REPLACEMENTS = (
    # `compile`, `fit`, `evaluate`, `predict` and `save` are replaced, because Keras
    # does not coordinate the workers.
    Replacement(
        owners.BaseTrainer,
        "compile",
        trainer_hooks.compile_model,
        "An optimizer or metric that was created outside the scope has variables that "
        "are not mirrored; for float16 Keras wraps a DistributedOptimizer in a loss "
        "scaler.",
    ),
    *(
        Replacement(
            owners.TensorFlowTrainer,
            name,
            functools.partial(trainer_hooks.run_loop, name),
            "Every worker runs every callback; invalid data, or a callback that only "
            "one worker has, causes an error of TensorFlow or a hang.",
            f"{_KERAS_ISSUE}/20585",
        )
        for name in ("fit", "evaluate", "predict")
    ),
    *(
        Replacement(
            owners.TensorFlowTrainer,
            name,
            trainer_hooks.run_on_batch,
            "Keras does not divide the global batch: every replica receives all of it.",
        )
        for name in ("train_on_batch", "test_on_batch", "predict_on_batch")
    ),
    *(
        Replacement(
            owners.TensorFlowTrainer,
            f"make_{name}",
            functools.partial(step_functions.make_function, name),
            "XLA cannot compile collectives, only the other parts of a step, see "
            "`tfdp.training.strategy.compiled_step`; the watchdog has to know when a "
            "step computes.",
            f"{_KERAS_ISSUE}/19005",
        )
        for name in ("train_function", "test_function", "predict_function")
    ),
    Replacement(
        owners.BaseTrainer,
        "_resolve_auto_jit_compile",
        step_functions.auto_compiles_with_xla,
        "With `jit_compile='auto'` Keras does not compile under a strategy.",
    ),
    Replacement(
        owners.TensorFlowTrainer,
        "_maybe_symbolic_build",
        step_functions.build_symbolically,
        "Keras builds a model from a batch, which a generator loses, and averages it "
        "over the replicas, which fails on two workers, for strings, and for an odd "
        "number of rows.",
        f"{_KERAS_ISSUE}/20585",
    ),
    Replacement(
        owners.StatelessScope,
        "get_current_value",
        step_functions.value_in_symbolic_build,
        "A state that a metric assigns in a `tf.function` or a loop, while a model is "
        "built symbolically, is a tensor that nothing else can read.",
    ),
    Replacement(
        owners.keras_trainer,
        "reduce_per_replica",
        step_functions.reduce_per_replica,
        "Keras returns the logs of one replica, cannot reduce a scalar on two workers, "
        "and orders the rows of `predict` by stock sharding.",
        f"{_TENSORFLOW_ISSUE}/72388",
    ),
    Replacement(
        owners.BaseTrainer,
        "_get_metrics_result_or_logs",
        trainer_hooks.epoch_logs,
        "A resumed epoch without remaining batches has no logs.",
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
            "Keras's optimizer has no variables with sharded averages.",
        )
        for name, method in (
            ("_swap_variables", "swap_averages"),
            ("_finalize_ema_values", "restart_averages"),
        )
    ),
    # The iteration over batches is replaced, because all workers need the same number
    # of batches in the same order, and a resumed run continues at its old position.
    Replacement(
        owners.EpochIterator,
        "__init__",
        epochs.make_iterator,
        "Workers with different numbers of batches wait for each other indefinitely, "
        "and each worker shuffles arrays in a different order.",
    ),
    Replacement(
        owners.EpochIterator,
        "__iter__",
        epochs.begin_epoch,
        "The watchdog has to know that a loop reads its data.",
    ),
    Replacement(
        owners.EpochIterator,
        "__next__",
        epochs.next_step,
        "The watchdog has to know the current step of a loop.",
    ),
    Replacement(
        owners.EpochIterator,
        "_enumerate_iterator",
        position.enumerate_batches,
        "A resumed run has to continue with the batch after the last completed one.",
        "https://github.com/keras-team/keras-hub/issues/204",
    ),
    # Functions of losses and gradients are replaced, because Keras averages over the
    # rows of each replica, and a single device over those of the global batch.
    Replacement(
        owners.keras_loss,
        "reduce_values",
        layer_hooks.reduce_values,
        "Keras does not divide a scalar loss by the number of replicas.",
        f"{_KERAS_ISSUE}/19891",
    ),
    Replacement(
        owners.keras_loss,
        "scale_loss_for_distribution",
        layer_hooks.scale_loss,
        "Keras divides by the number of replicas, which is wrong if replicas have "
        "different numbers of rows.",
        f"{_KERAS_ISSUE}/19891",
    ),
    Replacement(
        owners.keras_loss,
        "unscale_loss_for_distribution",
        layer_hooks.unscale_loss,
        "Keras would multiply unscaled losses by the number of replicas for the logs.",
        f"{_KERAS_ISSUE}/19891",
    ),
    Replacement(
        tf.GradientTape,
        "gradient",
        runtime_hooks.gradient,
        "Sharded parameters have to be gathered again in a backward pass.",
    ),
    Replacement(
        tf.compat.v1,
        "reset_default_graph",
        runtime_hooks.reset_default_graph,
        "`keras.utils.clear_session` would end the scope of a strategy.",
    ),
    Replacement(
        tf.distribute.ReplicaContext,
        "all_reduce",
        runtime_hooks.all_reduce,
        "A step is traced as the program of one device, without reductions.",
    ),
    Replacement(
        tf.distribute.ReplicaContext,
        "replica_id_in_sync_group",
        runtime_hooks.replica_id,
        "A step is traced as the program of one device, the same on every worker.",
    ),
    # Functions of layers are replaced, because a replica has only a part of the rows or
    # none, which changes batch statistics, and must draw other random numbers than the
    # other replicas.
    Replacement(
        owners.keras_nn,
        "_compute_moments_sync",
        layer_hooks.moments,
        "Synchronized BatchNormalization issues three all-reduces a layer, one after "
        "the other.",
    ),
    Replacement(
        keras.layers.BatchNormalization,
        "call",
        layer_hooks.normalize,
        "An eager step runs on the rows of all replicas at once, and Keras would "
        "compute common moments.",
    ),
    Replacement(
        keras.layers.BatchNormalization,
        "_moments",
        layer_hooks.masked_moments,
        "With a mask Keras computes moments over the replica's samples, even if the "
        "layer is synchronized.",
    ),
    *(
        Replacement(
            owners.keras_nn,
            name,
            layer_hooks.pad_empty_batch,
            "Without rows oneDNN convolutions return a wrong shape, and the gradients "
            "of pooling end the process.",
        )
        for name in (
            "conv",
            "conv_transpose",
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
        for module in (owners.keras_random, owners.keras_image)
    ),
    Replacement(
        owners.keras_core,
        "remat",
        layer_hooks.rematerialize,
        "When Keras builds a model under a strategy, it calls the layers of a "
        "`RematScope` with keyword arguments, which `tf.recompute_grad` rejects in a "
        "graph.",
    ),
    # Updates by a Keras optimizer without `DistributedOptimizer` are replaced, because
    # Keras clips and checks each replica's gradients, and a single device their sum.
    Replacement(
        owners.BaseOptimizer,
        "build",
        optimizer_hooks.build,
        "An optimizer or a model that was created outside the scope causes an error of "
        "TensorFlow about mixed strategies.",
    ),
    Replacement(
        owners.BaseOptimizer,
        "apply",
        optimizer_hooks.apply,
        "Each replica clips, accumulates and checks its local gradients before they "
        "are reduced.",
        f"{_KERAS_ISSUE}/20582",
    ),
    Replacement(
        keras.optimizers.LossScaleOptimizer,
        "apply",
        optimizer_hooks.apply_or_defer,
        "An update has to wait for the end of the compiled part of a step.",
    ),
    Replacement(
        keras.optimizers.LossScaleOptimizer,
        "check_finite",
        optimizer_hooks.check_finite,
        "If only one replica overflows, it would skip an update, whose collectives the "
        "other replicas run.",
        f"{_KERAS_ISSUE}/18666",
    ),
    # Saving and loading are replaced, so that files hold the user's own optimizer and
    # plain Keras can open them.
    *(
        Replacement(
            module,
            name,
            file_hooks.save_file,
            "Plain Keras cannot open a file with a DistributedOptimizer; sharded state "
            "is spread over all workers; `keras.saving.save_model` is not atomic.",
        )
        for module, name in (
            (owners.saving_lib, "save_model"),
            (owners.saving_lib, "save_weights_only"),
            (owners.legacy_h5_format, "save_model_to_hdf5"),
        )
    ),
    Replacement(
        owners.saving_lib,
        "load_weights_only",
        file_hooks.load_with_plain_optimizer,
        "A file holds the user's own optimizer, without the DistributedOptimizer.",
    ),
    Replacement(
        owners.BaseOptimizer,
        "save_own_variables",
        file_hooks.save_own_variables,
        "Keras saves only the accumulators of the first replica, and replicas differ.",
    ),
    Replacement(
        owners.BaseOptimizer,
        "load_own_variables",
        file_hooks.load_own_variables,
        "Each replica would load the whole sum, which would count once per replica.",
    ),
    Replacement(
        owners.MultiDeviceSaver,
        "save",
        file_hooks.save_tensors,
        "Workers that save a `tf.train.Checkpoint` or a SavedModel to one path remove "
        "each other's temporary files.",
        f"{_TENSORFLOW_ISSUE}/38635",
    ),
    # Functions of TensorFlow's runtime are replaced, because its traced functions,
    # caches and seeds do not allow for other workers that run the same step.
    Replacement(
        owners.FunctionType,
        "__hash__",
        runtime_hooks.hash_once,
        "Every call of a traced function hashes the types of all captures, once or "
        "twice for each variable.",
    ),
    Replacement(
        owners.AtomicFunction,
        "call_flat",
        runtime_hooks.call_flat,
        "Collectives that a failed call has begun would pair with those of the next "
        "call; TensorFlow does not know why a collective has failed.",
    ),
    Replacement(
        owners.mirrored_run,
        "_call_for_each_replica",
        runtime_hooks.call_for_each_replica,
        "Keras keeps settings and the generator for draws without a seed by thread, "
        "tfdp keeps the running loop, and each replica has a new thread.",
    ),
    Replacement(
        owners.cross_device_ops,
        "check_destinations",
        runtime_hooks.check_destinations,
        "TensorFlow asks for the truth of a variable that a value is reduced to, which "
        "is that of its value for tfdp's variables; the only replica of a worker could "
        "not gather an argument of a `tf.function`.",
    ),
    Replacement(
        tf.data.Dataset,
        "cache",
        runtime_hooks.cache,
        "The first worker that writes a cache file locks it, and the other workers "
        "fail.",
    ),
    Replacement(
        owners.PolymorphicFunction,
        "__call__",
        runtime_hooks.call_function,
        "TensorFlow traces a function once for all its callers, so that the program of "
        "a step would miss the updates inside.",
    ),
    Replacement(
        tf.random.Generator,
        "_preprocess_key",
        runtime_hooks.key_of_generator,
        "A generator from a strategy's scope draws different numbers on each replica, "
        "and not those of one device.",
    ),
    Replacement(
        owners.random_seed,
        "get_seed",
        runtime_hooks.seeds_of_operation,
        "A global seed that tfdp sets, so that workers draw alike, would change the "
        "numbers of operations that have a seed.",
    ),
)


@functools.cache
def install() -> None:
    """Replace the functions of Keras and TensorFlow that `REPLACEMENTS` lists.

    tfdp's own functions are excluded from AutoGraph, and its frames are hidden from
    tracebacks. Later calls have no effect.
    """
    # AutoGraph would take longer to convert tfdp's functions than TensorFlow takes to
    # trace the step of a custom loop.
    runtime.exclude_from_autograph(__name__.partition(".")[0])
    for entry in REPLACEMENTS:
        patches.replace(entry)
    # Tracebacks have to show the user's lines, so tfdp's frames are hidden as Keras
    # hides its own. A frame has the path of the import, with links unresolved.
    patches.hide_from_tracebacks(str(Path(__file__).parents[2]) + os.sep)
