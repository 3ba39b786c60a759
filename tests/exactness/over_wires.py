"""Cases for each wire: one of each feature that has a way of its own over it."""

from __future__ import annotations

# On two workers.
OF_TWO = (
    "multi_optimizer_with_everything_in_float64_and_sharded_gradients",
    "sgd_nesterov_with_an_overflow_on_one_replica_in_float32",
    "training_with_bfloat16_on_the_wire",
    "embedding_with_adam",
    "stop_at_the_shortest_of_known_lengths",
)
# On two workers of two devices each.
OF_TWO_BY_TWO = (
    "lamb_in_stage_2_shared_by_node",
    "training_by_levels",
    "training_with_float16_between_nodes",
    "sparse_gradients_of_sharded_adam_clipnorm",
)
