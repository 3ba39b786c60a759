"""The cases that the quick tier leaves to the standard one, and what it runs instead.

All others run in the quick tier, each on one set-up: see `registry.register`.
"""

from __future__ import annotations

import fnmatch
import functools

# By pattern of names (`fnmatch`): the cases that show the same in the quick tier.
LEFT_OUT = {
    # Exactness: each row and each column stays; so does each kind of sharding.
    "adafactor_with_no_option_in_float32_and_sharded_gradients": "muon, sharded",
    "schedule_free_adamw_with_accumulation_in_float32_and_sharded_*": "adamax, sharded",
    "rmsprop_with_clipnorm_in_float64_and_sharded_optimizer": "adagrad, sharded",
    "ftrl_with_an_overflow_*_and_sharded_optimizer": (
        "overflow_is_skipped_by_all_owners"
    ),
    "lion_with_weight_decay_in_float32_and_sharded_gradients": "lion, not sharded",
    "sgd_with_a_partial_batch_in_float32_and_sharded_gradients": (
        "partial_batches_of_sharded_state"
    ),
    "multi_optimizer_with_everything_in_float64_and_sharded_*": (
        "sharded_multi_optimizer"
    ),
    **dict.fromkeys(
        [
            "optimizer_sgd_with_momentum",
            "optimizer_ada*",
            "optimizer_ftrl",
            "optimizer_lion",
            "optimizer_muon",
            "optimizer_schedule_free_adamw",
        ],
        "the rows of the matrix",
    ),
    "mlp_with_adamw": "cnn_with_adamw",
    "cnn_with_sgd": "mlp_with_sgd",
    # Data.
    "bool_input": "uint8_input",
    "int64_input": "uint8_input",
    "odd_batch_size": "partial_last_batch_of_unequal_shares",
    "shuffled_arrays_of_other_seeds_*": "shuffling_without_seeds_*",
    "sharding_off_with_the_same_data_everywhere": "sharding_off_with_own_data_*",
    "dataset_already_distributed": "dataset_distributed_from_a_function",
    "rows_of_shuffled_arrays": "rows_are_those_of_the_weights",
    # Losses.
    "activity_regularizer": "regularizers_of_kernel_and_bias",
    "reduction_sum": "unequal_shares_with_sum_at_once",
    "class_weight": "sample_weight",
    "loss_that_returns_a_scalar": "losses_that_return_a_number_and_that_do_not",
    "mask_in_a_loss_over_the_batch_size": "mask_that_reaches_the_loss",
    "loss_function_that_returns_a_number": "losses_that_return_a_number_*",
    "loss_class_that_returns_a_number": "loss_that_returns_a_number_with_*",
    "losses_of_several_outputs": "losses_of_several_outputs_with_sample_weights",
    "losses_of_several_outputs_with_reductions": "unequal_shares_with_sum_at_once",
    "unequal_shares_with_mean_over_the_batch_and_penalties_accumulated": "... at_once",
    "unequal_shares_with_sum_accumulated": "... at_once",
    "unequal_shares_with_mean_with_sample_weight_at_once": "... accumulated",
    "unequal_shares_with_sample_weight_*": "unequal_shares_with_mean_with_sample_*",
    "unequal_shares_with_masked_mean_accumulated": "... at_once",
    # Keras's own features.
    "learning_rate_scheduler": "plateau_and_early_stopping",
    "csv_logger_at_one_path": "checkpoints_at_one_path",
    "tensorboard_with_histograms": "tensorboard_writes_one_set_of_files",
    "step_with_a_mean_over_no_rows": "step_with_a_mean",
    "step_with_a_mean_and_a_penalty": "step_with_a_mean",
    "step_with_a_sum": "step_with_a_loss_of_each_row",
    "step_with_a_loss_object_that_sums": "step_with_a_loss_of_each_row",
    "step_with_compute_loss_in_float64": "compute_loss_overridden",
    "gradients_applied_twice": "step_with_two_updates_and_checks",
    "average_loss": "average_loss_of_the_global_batch",
    "scaled_regularization_loss": "loss_divided_by_the_replicas",
    "adversaries_with_two_optimizers": "gan_with_two_optimizers",
    "add_loss_of_a_sum": "add_loss_of_a_mean_and_of_a_penalty",
    "contrastive_loss_of_own_rows": "contrastive_loss_of_gathered_rows",
    "loop_with_an_optimizer_built_lazily": "loop_with_an_optimizer_built_beforehand",
    "loop_inside_a_function": "loop_with_an_optimizer_built_beforehand",
    "binary_metrics": "regression_metrics",
    "label_metrics": "regression_metrics",
    "synchronized_batch_normalization_with_a_mask_in_float64": "... in float32",
    "gru": "masked_lstm",
    "three_steps_per_execution": "three_steps_per_execution_and_a_partial_batch",
    "two_steps_per_execution_and_a_partial_batch": "three_steps_per_execution_*",
    "run_eagerly": "run_eagerly_with_embedding",
    "validation_split": "validation_data",
    # The optimizer and its stages.
    "clipnorm_of_dense": "clipnorm_of_embedding",
    "clipvalue_of_embedding": "clipvalue_of_dense",
    "global_clipnorm_of_dense": "global_clipnorm_of_embedding",
    "overflow_on_first_replica_*": "overflow_on_last_replica_*",
    "embedding_with_accumulation_and_loss_scaling_and_clip*": "... global_clipnorm",
    "layers_frozen_between_fits_with_recompiling": "... without_recompiling",
    "mixed_bfloat16_policy_needs_no_scale": "mixed_float16_policy_*",
    "warmup_to_the_base_rate_itself": "warmup_raises_the_rate_in_a_straight_line",
    "warmup_resumed_at_its_last_update": "warmup_goes_on_where_it_was_saved",
    # Reduction and sharding.
    "embedding_with_sgd": "embedding_with_adam",
    "rows_that_one_device_has_once_in_float64": "... in float32",
    "stage_1_by_callback_*": "stage_1_by_constructor_*",
    "stage_2_by_constructor_*": "stage_2_by_callback_*",
    "policy_bfloat16_of_sharded_variables": "policy_float16_of_sharded_variables",
    "sharded_layers_frozen_between_fits_with_recompiling": "... without_recompiling",
    "sparse_gradients_of_sharded_sgd*": "sparse_gradients_of_sharded_adam",
    "sparse_gradients_of_sharded_lamb": "... with global_clipnorm",
    "sparse_gradients_of_sharded_adam_*": "sparse_gradients_of_sharded_adam",
    "loop_of_ones_own_with_sharded_state": "loop_of_ones_own_builds_sharded_state",
    "sharded_file_goes_on_whole": "sharded_files_go_on_in_plain_keras",
    "own_class_with_DictOfSlots": "own_class_with_ListOfSlots",
    "averages_of_slices": "averages_of_slices_overwrite",
    "averages_of_whole_variables": "averages_of_whole_variables_overwrite",
    "adamw_in_stage_1_shared_by_all": "adamw_in_stage_1_shared_by_node",
    "lamb_in_stage_2_shared_by_all": "lamb_in_stage_2_shared_by_node",
    "sharded_with_fp16_on_the_wire": "sharded_with_bf16_on_the_wire",
    "checkpoint_moves_with_lamb": "checkpoint_moves_with_adamw",
    "monitor_names_a_slow_worker_once_an_epoch": "monitor_names_a_slow_worker",
}


@functools.cache
def is_left_out(name: str) -> bool:
    """Whether the case of this name is left to the standard tier."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in LEFT_OUT)
