"""Cases for each wire: one of each feature that has a way of its own over it."""

from __future__ import annotations

import keras

# On two workers. Keras before 3.13 has no optimizer of optimizers.
_MULTI = "multi_optimizer_with_everything_in_float64_and_sharded_gradients"
OF_TWO = (
    *([_MULTI] if hasattr(keras.optimizers, "MultiOptimizer") else []),
    "sgd_nesterov_with_an_overflow_on_one_replica_in_float32",
    "training_with_bfloat16_on_the_wire",
    "embedding_with_adam",
    "stop_at_the_shortest_of_known_lengths",
)
# What does not depend on the wire, and could: the monitor that counts its bytes, a join
# of workers whose data ends at other times, a run that goes on from a backup.
MORE_OF_TWO = (
    "monitor_measures_what_one_device_computes",
    "monitor_follows_sharding_and_accumulation",
    "timeline_shows_all_workers",
    "join_of_known_and_unknown_lengths",
    "backup_restores_sharded_state",
)
# On two workers of two devices each.
OF_TWO_BY_TWO = (
    "lamb_in_stage_2_shared_by_node",
    "training_by_levels",
    "training_with_float16_between_nodes",
    "sparse_gradients_of_sharded_adam_clipnorm",
)
