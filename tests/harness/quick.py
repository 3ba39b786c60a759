"""The cases that the quick tier leaves to the standard one, and what it runs instead.

All others run in the quick tier, each on one set-up: see `registry.register`.
"""

from __future__ import annotations

import fnmatch
import functools

# By pattern of names (`fnmatch`): the cases that show the same in the quick tier.
LEFT_OUT = {
    # Exactness: each column stays, on ten of the optimizers; so does each kind of
    # sharding, also with an optimizer that looks at whole tensors.
    "adadelta_with_ema_in_float64": "adamax_with_ema_in_float32",
    "adafactor_with_weight_decay_in_float32": "lion_with_weight_decay_in_float64",
    "ftrl_with_clipnorm_in_float32": "rmsprop_with_clipnorm_in_float32",
    "lamb_with_global_clipnorm_in_float32": "odd_variables_with_lamb_in_stage_2",
    "lars_with_a_partial_batch_in_float32": "sgd_with_a_partial_batch_in_float64",
    "nadam_with_accumulation_in_float32": "sgd_momentum_with_accumulation_in_*",
    "muon_with_an_overflow_on_one_replica_in_float64": "muon, sharded",
    "schedule_free_adamw_with_clipvalue_in_float32": "adagrad_with_clipvalue_*",
    "multi_optimizer_with_everything_in_float32": "sharded_multi_optimizer",
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
        "the ten optimizers of the matrix",
    ),
    "mlp_with_adamw": "cnn_with_adamw",
    "cnn_with_sgd": "mlp_with_sgd",
    "embedding_lstm_with_adamw": "masked_lstm",
    "multi_output_with_adamw": "losses_of_several_outputs_with_sample_weights",
    # Data.
    "bool_input": "uint8_input",
    "int64_input": "uint8_input",
    "odd_batch_size": "partial_last_batch_of_unequal_shares",
    "shuffled_arrays_of_other_seeds_*": "shuffling_without_seeds_*",
    "sharding_off_with_the_same_data_everywhere": "sharding_off_with_own_data_*",
    "dataset_already_distributed": "dataset_distributed_from_a_function",
    "rows_of_shuffled_arrays": "rows_are_those_of_the_weights",
    "rebalanced_steps_per_execution": "rebalanced_run_goes_on",
    "rebalanced_accumulation": "rebalanced_run_goes_on",
    "tuple_inputs_and_outputs": "dict_inputs",
    "generator_of_unknown_length": "generator_loses_no_batch",
    "odd_and_tiny_batches_run": "partial_last_batch_of_unequal_shares",
    "join_of_known_and_unknown_lengths": "stop_at_the_shortest_of_known_lengths",
    "stop_at_the_shortest_of_unknown_lengths": "... of_known_lengths",
    "uneven_data_that_is_not_sharded": "files_of_different_sizes",
    "backup_within_an_epoch_that_stops": "checkpoints_at_one_path",
    # Losses.
    "loss_that_returns_a_number_with_sample_weights": (
        "losses_of_several_outputs_with_sample_weights"
    ),
    "activity_regularizer": "regularizers_of_kernel_and_bias",
    "reduction_sum": "unequal_shares_with_sum_at_once",
    "class_weight": "sample_weight",
    "loss_that_returns_a_scalar": "losses_that_return_a_number_and_that_do_not",
    "mask_in_a_loss_over_the_batch_size": "mask_that_reaches_the_loss",
    "loss_function_that_returns_a_number": "losses_that_return_a_number_*",
    "loss_class_that_returns_a_number": "losses_that_return_a_number_and_that_do_not",
    "losses_of_several_outputs": "losses_of_several_outputs_with_sample_weights",
    "losses_of_several_outputs_with_reductions": "unequal_shares_with_sum_at_once",
    "unequal_shares_with_mean_over_the_batch_and_penalties_accumulated": "... at_once",
    "unequal_shares_with_sum_accumulated": "... at_once",
    "unequal_shares_with_mean_with_sample_weight_at_once": "... accumulated",
    "unequal_shares_with_sample_weight_*": "unequal_shares_with_mean_with_sample_*",
    "unequal_shares_with_masked_mean_accumulated": "... at_once",
    # Keras's own features.
    "adversaries_with_a_gradient_penalty": "gan_with_two_optimizers",
    "files_open_in_a_process_without_tfdp": "saved_files_open_in_plain_keras",
    "classifier_on_a_frozen_encoder": "layers_frozen_between_fits_without_recompiling",
    "backup_restores_what_was_accumulated": "backup_restores_sharded_state",
    "files_of_the_chief_alone_hold_*": "saving_on_the_chief_alone",
    "two_steps_per_execution": "three_steps_per_execution_and_a_partial_batch",
    "backup_and_restore_at_one_path": "checkpoints_at_one_path",
    "evaluate": "validation_data",
    "metric_held_by_a_layer": "metric_that_merges_by_max",
    "step_with_weights_of_samples_and_classes": "sample_weight",
    "loop_with_an_embedding": "low_level_step",
    "spectral_normalization": "synchronized_batch_normalization",
    "learning_rate_scheduler": "plateau_and_early_stopping",
    "csv_logger_at_one_path": "checkpoints_at_one_path",
    "tensorboard_with_histograms": "tensorboard_writes_one_set_of_files",
    "step_with_a_mean_over_no_rows": "step_with_a_mean",
    "step_with_a_mean_and_a_penalty": "step_with_a_mean",
    "step_with_a_sum": "step_with_a_mean",
    "step_with_a_loss_of_each_row": "step_with_a_mean",
    "step_with_a_loss_object_that_sums": "step_with_a_mean",
    "step_with_two_ways_to_scale": "average_loss_of_the_global_batch",
    "step_with_two_updates_and_checks": "gan_with_two_optimizers",
    "variational_autoencoder": "compute_loss_overridden",
    "endpoint_layer": "add_loss",
    "knowledge_distillation": "gan_with_two_optimizers",
    "masked_mean_by_hand": "loss_that_is_a_function_of_sums",
    "plain_files_with_accumulators_*": "plain_files_go_on_sharded",
    "two_models_accumulate_by_turns": "two_strategies_train_by_turns",
    "optimizer_switched_on_after_fit_*": "accumulation_steps_change_by_epoch_*",
    "learning_rate_and_averages_obey_*": "other_callbacks_act_on_the_rate_*",
    "custom_train_step_with_its_own_loss": "custom_train_step",
    "iterations_as_int": "iterations_on_unknown_cardinality",
    "generators_are_read_as_far_*": "generator_loses_no_batch",
    "second_fit_with_a_frozen_layer": "layers_frozen_between_fits_*",
    "convolutions_on_replicas_without_samples": "batch_normalization_survives_*",
    "synchronized_batch_normalization_with_a_mask": "synchronized_batch_normalization",
    "step_with_compute_loss_in_float64": "compute_loss_overridden",
    "gradients_applied_twice": "gan_with_two_optimizers",
    "average_loss": "average_loss_of_the_global_batch",
    "scaled_regularization_loss": "loss_divided_by_the_replicas",
    "adversaries_with_two_optimizers": "gan_with_two_optimizers",
    "add_loss_of_a_*": "add_loss",
    "contrastive_loss_of_own_rows": "contrastive_loss_of_gathered_rows",
    "loop_with_an_optimizer_built_lazily": "loop_with_an_optimizer_built_beforehand",
    "loop_inside_a_function": "loop_with_an_optimizer_built_beforehand",
    "binary_metrics": "regression_metrics",
    "label_metrics": "regression_metrics",
    "synchronized_batch_normalization_with_a_mask_in_float64": "... without a mask",
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
    "accumulation_given_to_the_wrapped_optimizer": "gradient_accumulation_steps",
    "accumulation_of_a_multi_optimizer": "sharded_multi_optimizer",
    "accumulation_and_loss_scaling_run_eagerly": "run_eagerly_with_embedding",
    "embedding_with_loss_scaling": "embedding_with_accumulation_and_*_global_clipnorm",
    "loss_scale_of_the_constructor_changes_no_result": "loss_scale_grows_as_in_keras",
    "warmup_to_the_base_rate_itself": "warmup_raises_the_rate_in_a_straight_line",
    "warmup_resumed_at_its_last_update": "warmup_goes_on_where_it_was_saved",
    # Reduction and sharding.
    "more_replicas_than_variables": "hardly_anything_is_trained",
    "state_that_is_there_is_shared_out_within_a_window": (
        "waiting_slices_survive_the_scope"
    ),
    "sharded_files_open_in_a_process_without_tfdp": (
        "sharded_files_go_on_in_plain_keras"
    ),
    "odd_variables_with_adam_in_stage_1": "odd_variables_with_lamb_in_stage_2",
    "averages_of_whole_variables_overwrite": "averages_of_slices_overwrite",
    "lamb_in_stage_2_shared_by_node": "adamw_in_stage_1_shared_by_node",
    "waiting_slices_survive_what_is_shared": "waiting_slices_survive_the_scope",
    "waiting_slices_take_the_scale_that_is_restored": (
        "waiting_slices_survive_the_scope"
    ),
    "uneven_nodes_share_one_state": "adamw_in_stage_1_shared_by_node",
    "owner_without_a_gradient_counts_on": "hardly_anything_is_trained",
    "replicas_without_rows": "few_rows_are_gathered",
    "sparse_dtypes": "rows_that_one_device_has_once",
    "embedding_with_sgd": "embedding_with_adam",
    "rows_that_one_device_has_once_in_float64": "... in float32",
    "stage_1_by_callback_*": "stage_1_by_constructor_*",
    "stage_2_by_constructor_*": "stage_2_by_callback_*",
    "policy_bfloat16_of_sharded_variables": "policy_float16_of_sharded_variables",
    "sharded_layers_frozen_between_fits_with_recompiling": "... without_recompiling",
    "sparse_gradients_of_sharded_sgd*": "sparse_gradients_of_sharded_adam",
    "sparse_gradients_of_sharded_lamb": "... of_sharded_adam",
    "sparse_gradients_of_sharded_adam_*": "sparse_gradients_of_sharded_adam",
    "loop_of_ones_own_with_sharded_state": "loop_of_ones_own_builds_sharded_state",
    "sharded_file_goes_on_whole": "sharded_files_go_on_in_plain_keras",
    "own_class_with_DictOfSlots": "own_class_with_ListOfSlots",
    "averages_of_slices": "averages_of_slices_overwrite",
    "averages_of_whole_variables": "averages_of_slices_overwrite",
    "adamw_in_stage_1_shared_by_all": "adamw_in_stage_1_shared_by_node",
    "lamb_in_stage_2_shared_by_all": "adamw_in_stage_1_shared_by_node",
    "sharded_with_fp16_on_the_wire": "sharded_with_bf16_on_the_wire",
    "checkpoint_moves_with_*": "plain_files_go_on_sharded",
    "sharded_layers_frozen_between_fits_without_recompiling": "layers_frozen_between_*",
    "sharded_state_run_eagerly": "run_eagerly_with_embedding",
    "sharded_state_with_steps_per_execution": "sharded_state_alone_trains_*",
    "sparse_gradients_of_sharded_lamb_global_clipnorm": "... of_sharded_adam",
    "tensorboard_saves_embeddings_of_sharded_state": "sharded_files_go_on_in_plain_*",
    "own_class_without_slots_is_sharded": "own_class_with_ListOfSlots",
    "averages_are_swapped_in_for_validation": "swap_ema_weights",
    "training_by_tree": "algorithms_add_every_dtype_and_length",
    "training_by_halving_doubling": "algorithms_add_every_dtype_and_length",
    "training_by_levels": "training_by_hierarchical",
    "monitor_names_a_slow_worker_once_an_epoch": "monitor_names_a_slow_worker",
    "no_weights_without_rebalance": "rows_are_those_of_the_weights",
    "own_shards_are_left_alone": "sharding_off_with_own_data_on_each_worker",
    "replicas_that_are_alike_raise_no_alarm": (
        "replicas_with_sharded_state_raise_no_alarm"
    ),
    "monitor_leaves_evaluation_alone": "monitor_follows_sharding_and_accumulation",
    "ema_without_overwrite": "ema_overwrite_frequency",
    "gradient_noise_scale_with_accumulation_and_loss_scaling": (
        "gradient_noise_scale_is_that_of_the_replicas_gradients"
    ),
    "padded_lengths_hold_the_length_and_waste_little": "collectives_in_inner_functions",
}


@functools.cache
def is_left_out(name: str) -> bool:
    """Whether the case of this name is left to the standard tier."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in LEFT_OUT)
