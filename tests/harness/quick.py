"""The cases that the quick tier leaves out, and what it runs instead.

All others run in the quick tier, each on one set-up: see `registry.register`. Of those
that are left out in favour of one case, the first runs in the standard tier, and the
others in the full one.
"""

from __future__ import annotations

import fnmatch
import functools

# By pattern of names (`fnmatch`): the cases that show the same in the quick tier.
LEFT_OUT = {
    # Exactness: each column stays, on ten of the optimizers; so does each kind of
    # sharding, also with an optimizer that looks at whole tensors.
    "adadelta_with_ema_in_float64": "adamax_with_ema_*_and_sharded_optimizer",
    "adafactor_with_weight_decay_in_float32": "lion_with_weight_decay_in_float64",
    "ftrl_with_clipnorm_in_float32": "rmsprop_with_clipnorm_in_float32",
    "lamb_with_global_clipnorm_in_float32": "odd_variables_with_lamb_in_stage_2",
    "lars_with_a_partial_batch_in_float32": "sgd_with_a_partial_batch_in_float64",
    "nadam_with_accumulation_in_float32": "sgd_momentum_with_accumulation_in_*",
    "muon_with_an_overflow_on_one_replica_in_float64": "muon, sharded",
    "sgd_nesterov_with_an_overflow_*": "overflow_on_last_replica_*",
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
    "*_by_tensorflow": "the same ... by the transport of the strategy",
    # The program of one device.
    "losses_of_columns": "losses_that_are_no_means",
    "losses_of_statistics": "losses_that_are_no_means",
    "losses_along_the_batch": "losses of each kind that are no means",
    "losses_of_unaligned_sequences": "metrics of sequences, and losses of the batch",
    "losses_of_keras_with_weights": "losses of several outputs, and losses by hand",
    "metrics_that_decode": "metric_classes_that_are_no_sums",
    "losses_of_pairs_of_rows": "losses_that_are_no_means",
    "losses_of_keras": "losses of each kind that are no means",
    "augmentation_on_replicas_without_rows": "sequences_on_replicas_without_rows",
    "losses_of_segmentation": "losses_that_are_no_means",
    "metric_functions_of_a_batch": "metric_classes_that_are_no_sums",
    "a_step_that_gathers_nothing_*": "steps_of_common_models_convert_nothing",
    "losses_of_masked_sequences": "mask_that_reaches_the_loss",
    "images_on_replicas_without_rows": "batch_normalization_survives_*",
    "normalizations_on_replicas_*": "synchronized_batch_normalization",
    "metrics_of_keras": "regression_metrics",
    # Scopes.
    "temporary_variables_of_one_worker": "saving_alone_inside_the_scope",
    "garbage_of_one_worker": "models_of_one_worker",
    "an_error_that_one_worker_handles": "models_of_one_worker",
    "loops_inside_the_scope": "fits inside scopes of other cases",
    "consistency_check_names_what_one_worker_assigns": "values_of_one_worker",
    # Data.
    "labels_that_come_to_differ_are_found": "different_calls",
    "structures_of_arrays": "dictionaries as inputs",
    "label_array_is_not_overwritten": "shuffled_data_gives_the_batches_of_one_device",
    "int64_input": "string_input",
    "text_and_sparse_encodings": "ragged_and_sparse_batches",
    "other_numbers_of_rows_*": "other_and_static_numbers_of_rows",
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
    "backup_within_an_epoch_of_own_files": "checkpoints_at_one_path",
    "own_files_in_other_loops": "own_files_train_as_one_device_on_the_same_rows",
    "fewer_files_than_workers": "a_file_per_worker",
    "datasets_with_map": "the grid of pipelines, in one process",
    "a_dataset_shorter_than_a_batch_on_one_worker": "files_of_different_sizes",
    "each_row_of_own_files_once": "own_files_train_as_one_device_on_the_same_rows",
    "arrays_in_files": "the grid of arrays in files, in one process",
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
    # The program of one device: a few programs of each kind stay.
    "layers_of_statistics_of_a_batch": "programs_of_layers",
    "augmentations_draw_as_one_device": "programs_of_layers",
    "layers_draw_as_one_device": "programs_of_layers",
    "normalizations_are_those_of_one_device": "programs_of_layers",
    "recurrent_layers_and_wrappers": "programs_of_layers",
    "functions_of_tensorflow_in_layers": "programs_of_layers",
    "control_flow_in_layers": "programs_of_layers",
    "states_that_layers_write": "programs_of_states",
    "states_that_steps_write": "programs_of_states",
    "gradients_that_steps_change": "programs_of_steps",
    "updates_that_steps_make": "programs_of_steps",
    "logs_that_steps_return": "programs_of_steps",
    "steps_that_speak_of_replicas": "programs_of_steps",
    "steps_with_scaled_losses": "programs_of_steps",
    "steps_in_mixed_precision": "programs_of_steps",
    "steps_with_features_of_training": "programs_of_steps",
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
    "plain_files_with_accumulators_*": "sharded_files_go_on_in_plain_keras",
    "two_models_accumulate_by_turns": "two_strategies_reduce_in_one_function",
    "optimizer_switched_on_after_fit_*": "accumulation_steps_change_by_epoch_*",
    "learning_rate_and_averages_obey_*": "other_callbacks_act_on_the_rate_*",
    "custom_train_step_with_its_own_loss": "custom_train_step",
    "iterations_as_int": "generator_loses_no_batch",
    "generators_are_read_as_far_*": "generator_loses_no_batch",
    "second_fit_with_a_frozen_layer": "layers_frozen_between_fits_*",
    "convolutions_on_replicas_without_samples": "batch_normalization_survives_*",
    "synchronized_batch_normalization_with_a_mask": "synchronized_batch_normalization",
    "step_with_compute_loss_in_float64": "compute_loss_overridden",
    "gradients_applied_twice": "gan_with_two_optimizers",
    "scaled_regularization_loss": "loss_divided_by_the_replicas",
    "adversaries_with_two_optimizers": "gan_with_two_optimizers",
    "add_loss_of_a_*": "add_loss",
    "contrastive_loss_of_own_rows": "loss_that_is_a_function_of_sums",
    "loop_with_an_optimizer_built_lazily": "loop_with_an_optimizer_built_beforehand",
    "loop_whose_first_step_builds_*": "loop_with_an_optimizer_built_beforehand",
    "logs_of_steps_that_xla_compiles": "xla_in_all_loops",
    "loop_inside_a_function": "loop_with_an_optimizer_built_beforehand",
    "loop_inside_run_is_a_loop_around_it": "loop_inside_a_replica_is_refused_or_right",
    "binary_metrics": "regression_metrics",
    "synchronized_batch_normalization_with_a_mask_in_float64": "... without a mask",
    "gru": "masked_lstm",
    "three_steps_per_execution": "three_steps_per_execution_and_a_partial_batch",
    "two_steps_per_execution_and_a_partial_batch": "three_steps_per_execution_*",
    "run_eagerly": "run_eagerly_with_embedding",
    "validation_split": "validation_data",
    # The optimizer and its stages.
    "overflow_on_first_replica_*": "overflow_on_last_replica_*",
    "layers_frozen_between_fits_with_recompiling": "... without_recompiling",
    "mixed_bfloat16_policy_needs_no_scale": "mixed_float16_policy_*",
    "accumulation_given_to_the_wrapped_optimizer": "gradient_accumulation_steps",
    "accumulation_of_a_multi_optimizer": "sharded_multi_optimizer",
    "accumulation_and_loss_scaling_run_eagerly": "run_eagerly_with_embedding",
    "embedding_with_loss_scaling": "embedding_with_adam",
    "loss_scale_of_the_constructor_changes_no_result": "loss_scale_grows_as_in_keras",
    "warmup_to_the_base_rate_itself": "warmup_raises_the_rate_in_a_straight_line",
    "warmup_resumed_at_its_last_update": "warmup_goes_on_where_it_was_saved",
    # Reduction and sharding.
    "orthogonal_gradients_add_up_and_parallel_ones_average": (
        "adasum_is_what_its_definition_says"
    ),
    "adasum_with_a_loss_scale": "adasum_between_nodes_with_both",
    "adasum_with_accumulation": "adasum_between_nodes_with_both",
    "adasum_of_sharded_gradients": "adasum_of_a_sharded_optimizer",
    "adasum_of_sharded_parameters": "adasum_of_a_sharded_optimizer",
    "adasum_in_float16_between_nodes": "adasum_in_bfloat16_on_the_wire",
    "adasum_on_eight_replicas": "adasum_is_what_its_definition_says",
    "adasum_across_nodes_in_any_order_of_positions": "adasum_across_nodes_combines_*",
    "quantized_gathers_send_half_of_the_bytes_of_16_bits": (
        "quantized_gathers_send_a_quarter_of_the_bytes"
    ),
    "quantized_gathers_are_the_same_kept_and_run_eagerly": (
        "quantized_gathers_train_as_rounded_weights_do"
    ),
    "plans_change_between_micro_batches": "plans_that_change_in_fit_train_*",
    "trial_that_is_broken_off_leaves_the_default": "plans_that_change_in_fit_train_*",
    "more_replicas_than_variables": "sharded_step_has_two_collectives_for_each_bucket",
    "state_that_is_there_is_shared_out_within_a_window": (
        "backup_restores_sharded_state"
    ),
    "sharded_files_open_in_a_process_without_tfdp": (
        "sharded_files_go_on_in_plain_keras"
    ),
    "odd_variables_with_adam_in_stage_1": "odd_variables_with_lamb_in_stage_2",
    "averages_of_whole_variables_overwrite": "adamax_with_ema_*_and_sharded_optimizer",
    "lamb_in_stage_2_shared_by_node": "adamw_in_stage_1_shared_by_node",
    "waiting_slices_survive_what_is_shared": "backup_restores_sharded_state",
    "waiting_slices_take_the_scale_that_is_restored": ("backup_restores_sharded_state"),
    "uneven_nodes_share_one_state": "adamw_in_stage_1_shared_by_node",
    "recurrent_models_of_sharded_parameters": "attention_of_sharded_parameters",
    "tied_weights_of_sharded_parameters": ("deferred_parameters_train_like_one_device"),
    "units_are_kept_where_they_are_not_resharded": (
        "a_step_of_sharded_parameters_sends_three_halves_of_an_all_reduce"
    ),
    "units_are_gathered_again_inside_of_nodes": "the bytes of other gathers",
    "uneven_nodes_gather_again_from_all": "nodes of equal size",
    "a_scope_that_defers_on_one_worker_only_is_refused": "the same scope on all",
    "offloaded_parameters_are_gathered_from_the_host": (
        "deferred_parameters_train_like_one_device"
    ),
    "each_named_layer_is_a_unit": "deferred_parameters_train_like_one_device",
    "recomputed_layers_of_sharded_parameters": "layers that are not computed again",
    "adam_with_global_clipnorm_in_float32_and_sharded_parameters": (
        "adam, sharded gradients"
    ),
    "adamax_with_ema_in_float32_and_sharded_parameters": "adamax, sharded gradients",
    "adamw_with_no_option_in_float64_and_sharded_parameters": "adamw, sharded state",
    "lion_with_weight_decay_in_float64_and_sharded_parameters": "lion, sharded state",
    "sgd_momentum_with_accumulation_in_float32_and_sharded_parameters": (
        "multi_optimizer_with_everything_in_float32_and_sharded_parameters"
    ),
    "sgd_with_a_partial_batch_in_float32_and_sharded_parameters": (
        "sgd, sharded gradients"
    ),
    "sharded_models_are_used_as_any_other": (
        "files_of_sharded_parameters_are_those_of_plain_keras"
    ),
    "lopsided_units_are_summed_and_not_padded": "bytes of units that are not lopsided",
    "own_loops_of_sharded_parameters": "own_steps_of_sharded_parameters",
    "keras_loops_of_sharded_parameters": "fit and evaluate",
    "adversaries_with_sharded_parameters": "gan_with_two_optimizers",
    "sharded_parameters_are_assigned_to": "weights that are set",
    "sharded_parameters_are_read_by_callbacks": "sharded models are used as any other",
    "monitor_tells_the_kinds_of_gathers_apart": (
        "monitor_measures_what_one_device_computes"
    ),
    "owner_without_a_gradient_counts_on": "sharded_step_has_two_collectives_*",
    "replicas_without_rows": "few_rows_are_gathered",
    "sparse_dtypes": "embedding_with_adam",
    "embedding_with_sgd": "embedding_with_adam",
    "rows_that_one_device_has_once_in_float64": "... in float32",
    "stage_1_by_callback_*": "stage_1_by_constructor_*",
    "stage_2_by_constructor_*": "stage_2_by_callback_*",
    "*_at_stage_3": "the same cases in the other stages, and those of tests/parameters",
    "policy_bfloat16_of_sharded_variables": "policy_float16_of_sharded_variables",
    "sharded_layers_frozen_between_fits_with_recompiling": "... without_recompiling",
    "sparse_gradients_of_sharded_sgd*": "sparse_gradients_of_sharded_adam",
    "sparse_gradients_of_sharded_lamb": "... of_sharded_adam",
    "sparse_gradients_of_sharded_adam_*": "sparse_gradients_of_sharded_adam",
    "loop_of_ones_own_with_sharded_state": "loop_of_ones_own_builds_sharded_state",
    "sharded_file_goes_on_whole": "sharded_files_go_on_in_plain_keras",
    "own_class_with_DictOfSlots": "own_optimizer_class_sees_whole_tensors",
    "averages_of_slices": "adamax_with_ema_*_and_sharded_optimizer",
    "averages_of_whole_variables": "adamax_with_ema_*_and_sharded_optimizer",
    "adamw_in_stage_1_shared_by_all": "adamw_in_stage_1_shared_by_node",
    "lamb_in_stage_2_shared_by_all": "adamw_in_stage_1_shared_by_node",
    "sharded_with_fp16_on_the_wire": "sharded_with_bf16_on_the_wire",
    "checkpoint_moves_with_*": "sharded_files_go_on_in_plain_keras",
    "sharded_layers_frozen_between_fits_without_recompiling": "layers_frozen_between_*",
    "sharded_state_run_eagerly": "run_eagerly_with_embedding",
    "sharded_state_with_steps_per_execution": "adagrad_with_clipvalue_*_sharded_*",
    "sparse_gradients_of_sharded_lamb_global_clipnorm": "... of_sharded_adam",
    "tensorboard_saves_embeddings_of_sharded_state": "sharded_files_go_on_in_plain_*",
    "own_class_without_slots_is_sharded": "own_optimizer_class_sees_whole_tensors",
    "averages_are_swapped_in_for_validation": "ema_overwrite_frequency",
    "local_sgd_begins_after_synchronous_steps": "local_sgd_averages_what_models_*",
    "local_sgd_accumulates_micro_batches": "local_sgd_averages_what_models_*",
    "local_sgd_is_resumed_exactly": "diloco_is_resumed_exactly",
    "losses_of_nodes_are_of_their_own_rows": "losses_of_replicas_alone_*",
    "micro_batches_of_a_skipped_update_do_not_count": (
        "diloco_skips_an_overflow_in_its_node"
    ),
    "left_over_batches_of_local_steps_are_those_of_one_device": (
        "left_over_batches_have_the_scale_*"
    ),
    "diloco_exchanges_fragments_in_turn": "diloco_makes_outer_steps_of_what_*",
    "diloco_of_single_steps_is_synchronous": "local_sgd_of_single_steps_*",
    "diloco_scales_late_exchanges_of_fragments": "diloco_uses_exchanges_later",
    "rounds_of_all_are_late_exchanges": "exchanges_go_on_without_a_late_worker",
    "compressed_late_exchanges_are_resumed_exactly": "diloco_is_resumed_exactly",
    "diloco_compresses_across_nodes": "diloco_rounds_what_was_learned_*",
    "all_stop_at_the_next_exchange": "a_late_worker_stops_nobody_before_an_exchange",
    "logs_are_averaged_at_the_end_of_an_epoch": "inner_steps_launch_nothing",
    "compressed_sums_of_4_bits": "compressed_sums_of_4_bits_in_levels",
    "compressed_sums_of_8_bits_across_nodes": "compressed_sums_of_4_bits_in_levels",
    "compressed_sums_of_low_rank_across_nodes": "compressed_sums_of_low_rank",
    "compressed_sums_of_largest_elements_across_nodes": "... with momentum",
    "compressed_sums_of_halves": "the compressor of docs/compression.md",
    "skipped_step_leaves_alone_the_residuals_of_[!i]*": "... of int8",
    "checkpoint_has_the_residuals_of_[!i]*": "... of int8",
    "training_with_int8": "training_with_int8_and_sharded_gradients",
    "training_with_int8_and_accumulation": "training_with_int8_and_sharded_gradients",
    "training_with_int8_and_sharded_[op]*": "training_with_int8_and_sharded_gradients",
    "training_with_low_rank*": "compressed_sums_of_low_rank",
    "residuals_of_other_replicas_*": "checkpoint_has_the_residuals_of_int8",
    "sparse_gradients_are_left_alone": "training_with_int8_and_sharded_gradients",
    "compressor_is_off_where_it_would_not_gain": "the algorithm of a compressor",
    "random_rounding_is_right_on_average": "checkpoint has its state",
    "training_by_tree": "algorithms_add_every_dtype_and_length",
    "training_by_halving_doubling": "algorithms_add_every_dtype_and_length",
    "training_by_levels": "training_by_hierarchical",
    "monitor_names_a_slow_worker_once_an_epoch": "monitor_names_a_slow_worker",
    "no_weights_without_rebalance": "rows_are_those_of_the_weights",
    "own_shards_are_left_alone": "sharding_off_with_own_data_on_each_worker",
    "replicas_that_are_alike_raise_no_alarm": ("a_check_costs_no_collective_*"),
    "monitor_leaves_evaluation_alone": "monitor_names_statistics",
    "ema_without_overwrite": "ema_overwrite_frequency",
    "gradient_noise_scale_with_accumulation_and_loss_scaling": (
        "gradient_noise_scale_is_that_of_the_replicas_gradients"
    ),
    "a_wrong_gradient_on_one_replica_is_counted_on_all": "the rest of `models`",
    # What costs most, and shows what cheaper cases show.
    "compressed_gradients_send_as_many_bytes_as_planned": (
        "compressed_sums_of_4_bits_in_levels"
    ),
    "quantized_gathers_go_on_inside_of_nodes": "quantized_gathers_train_as_*",
    "replicas_read_the_same_rounded_weights": "quantized_gathers_train_as_*",
    "what_cannot_be_tuned_says_so_once": "the doctest of `tuning.callback`",
    "compressed_exchanges_send_a_quarter": "diloco_rounds_what_was_learned_*",
    "files_have_the_weights_that_are_kept": "files_of_sharded_parameters_are_those_*",
    "slices_that_nodes_share_travel_in_two_levels": "adamw_in_stage_1_shared_by_node",
    "adam_with_global_clipnorm_in_float32": "muon_with_global_clipnorm_in_float32_*",
    "adasum_keeps_what_is_not_finite": "adasum_is_what_its_definition_says",
    "adagrad_with_clipvalue_in_float64": "adagrad_with_clipvalue_in_float32_*",
    "muon_with_clipnorm_in_float32_and_sharded_parameters": "muon, sharded gradients",
    "adamax_with_ema_in_float32": "adamax_with_ema_*_and_sharded_optimizer",
    "transformer_with_adamw": "cnn_with_adamw",
    "rows_follow_speed": "rebalanced_run_goes_on",
    "structures_of_batches": "dictionaries as inputs",
    "structures_of_elements": "dictionaries as inputs",
    "one_file_for_all_workers": "a_file_per_worker",
    "partial_last_batch_that_divides_evenly": "partial_last_batch_of_unequal_shares",
    "uint8_input": "string_input",
    "last_batch_missing_on_one_worker": "stop_at_the_shortest_of_known_lengths",
    "monitor_follows_sharding_and_accumulation": "monitor_names_statistics",
    "learning_rate_schedules": "warmup_multiplies_a_schedule",
    "clip*_of_*": "the clipping of the matrix",
    "loss_scale_optimizer_without_overflow": "loss_scale_optimizer_with_everything_*",
    "predicted_plan_is_the_one_traced": "step_has_one_all_reduce_for_each_bucket",
    "rows_that_one_device_has_once": "embedding_with_adam",
    "replicas_with_sharded_state_raise_no_alarm": "a_check_costs_no_collective_*",
    "hardly_anything_is_trained": "sharded_step_has_two_collectives_for_each_bucket",
    "plain_files_go_on_sharded": "sharded_files_go_on_in_plain_keras",
    "gradients_that_wait_on_each_worker_are_summed": (
        "stage_2_by_callback_with_accumulation_and_loss_scaling"
    ),
    "waiting_slices_survive_the_scope": "backup_restores_sharded_state",
    "flush_of_sharded_sums_applies_leftovers": (
        "flush_applies_leftovers_with_their_true_number"
    ),
    "averages_of_slices_overwrite": "adamax_with_ema_*_and_sharded_optimizer",
    "micro_batches_of_sharded_state_*": "micro_batches_before_the_last_launch_*",
    "warmup_scales_sharded_momentum": "momentum_follows_the_rate_in_warmup",
    "sharded_state_alone_trains_like_one_device": "adagrad_with_clipvalue_*_sharded_*",
    "own_class_with_ListOfSlots": "own_optimizer_class_sees_whole_tensors",
    "slots_that_keras_had_built_are_freed": "each_replica_holds_its_share_of_the_slots",
    "sums_that_were_taken_over_are_freed": "each_replica_holds_its_share_of_the_slots",
    "window_with_an_empty_replica_*": "partial_last_batch_of_unequal_shares",
    "accumulation_with_steps_per_execution": "three_steps_per_execution_*",
    "accumulation_of_several_dtypes": "float16_gradients_are_accumulated_in_float32",
    "accumulation_leaves_variables_without_gradients_alone": (
        "layers_frozen_between_fits_without_recompiling"
    ),
    "embedding_with_accumulation_and_loss_scaling_*": "embedding_with_adam",
    "warmup_that_is_over_is_not_repeated_*": "warmup_goes_on_where_it_was_saved",
    "contrastive_loss_of_gathered_rows": "loss_that_is_a_function_of_sums",
    "second_fit": "checkpoints_at_one_path",
    "plain_files_open_under_the_strategy": "saved_files_open_in_plain_keras",
    "local_sgd_skips_an_overflow_where_it_is": "diloco_skips_an_overflow_in_its_node",
    "swap_ema_weights": "ema_overwrite_frequency",
    "predict_with_several_steps_per_execution": "predict_returns_101_rows_in_order",
    "set_weights_under_the_strategy": "saved_files_open_in_plain_keras",
    "stop_training_within_an_epoch_on_one_worker": "stop_training_on_one_worker",
    "stateful_rnn": "masked_lstm",
    "the_end_of_data_is_found_in_any_loop": "the_end_of_data_counts_as_in_keras",
    "the_end_of_data_of_other_optimizers": "the_end_of_data_counts_as_in_keras",
    "the_end_of_data_of_sharded_state": "the_end_of_data_counts_as_in_keras",
    "xla_with_a_sharded_optimizer_*": "xla_for_the_update",
    "xla_with_accumulation_*": "xla_for_the_update",
    "xla_with_rows_and_a_mask": "xla_in_all_loops",
    "xla_of_a_model_that_is_not_built": "xla_in_all_loops",
    "xla_with_state_and_uneven_workers": "xla_in_all_loops",
    "xla_with_mixed_*": "xla_in_all_loops",
    "xla_with_dropout": "xla_in_all_loops",
    "xla_not_with_strings_*": "xla_not_where_it_lacks_an_operation",
    "xla_for_images_of_unknown_size": "xla_in_all_loops",
    "xla_in_fit_where_predict_*": "xla_not_where_it_lacks_an_operation",
    "xla_not_with_collectives_*": "xla_not_where_it_lacks_an_operation",
    "xla_not_where_a_step_uses_*": "xla_not_where_it_lacks_an_operation",
    "shuffled_py_dataset_of_rows": "py_dataset_of_rows",
    "py_dataset_of_rows_by_threads": "py_dataset_of_rows",
    "a_late_filter_is_told_once": "py_dataset_of_rows",
    "own_rows_with_rebalance": "py_dataset_of_rows",
    "a_dataset_without_an_end": "datasets_of_different_elements",
    "files_of_one_process": "own_files_train_as_one_device_on_the_same_rows",
    "two_strategies_train_by_turns": "two_strategies_reduce_in_one_function",
    "padded_lengths_hold_the_length_and_waste_little": "collectives_in_inner_functions",
}


@functools.cache
def is_left_out(name: str) -> bool:
    """Whether the case of this name is left to another tier."""
    return bool(_patterns_of(name))


@functools.cache
def is_left_to_full(name: str) -> bool:
    """Whether the standard tier, too, leaves it out, for one that shows the same."""
    chosen = {instead: pattern for pattern, instead in reversed(LEFT_OUT.items())}
    return all(chosen[LEFT_OUT[pattern]] != pattern for pattern in _patterns_of(name))


def _patterns_of(name: str) -> list[str]:
    return [pattern for pattern in LEFT_OUT if fnmatch.fnmatchcase(name, pattern)]
