"""Cases of sharded state with sharded parameters in their place.

What they claim holds in every stage.
"""

from __future__ import annotations

import dataclasses
import fnmatch

from tests.harness import registry
from tests.harness.env import Env
from tests.sharding import (  # noqa: F401 what the table names
    cases_corners,
    cases_files,
    cases_offload,
    cases_optimizers,
)
from tests.sharding.cases_sharded import in_stage_3

CHOSEN = (
    "stage_2_by_callback_with_accumulation_and_loss_scaling",
    "overflow_is_skipped_by_all_owners*",
    "odd_variables_with_lamb_in_stage_2",
    "sharded_layers_frozen_between_fits_without_recompiling",
    "sharded_layers_frozen_between_fits_with_recompiling",
    "partial_batches_of_sharded_state*",
    "sharded_multi_optimizer*",
    "sharded_state_heeds_exclusions_and_constraints*",
    "lamb_in_stage_2_shared_by_node",
    "different_optimizers_are_named",
    "sharded_files_go_on_in_plain_keras",
    "backup_restores_sharded_state",
    "stage_1_by_*_with_accumulation_and_loss_scaling",
    "stage_2_by_constructor_with_accumulation_and_loss_scaling",
    "sharded_state_alone_trains_like_one_device",
    "warmup_scales_sharded_momentum",
    "state_that_is_there_is_shared_out_within_a_window",
    "odd_variables_with_adam_in_stage_1",
    "policy_*_of_sharded_variables",
    "more_replicas_than_variables",
    "sparse_gradients_of_sharded_*",
    "sharded_state_run_eagerly",
    "sharded_state_with_steps_per_execution",
    "loop_of_ones_own_with_sharded_state",
    "own_class_*",
    "averages_*",
    "adamw_in_stage_1_shared_by_*",
    "uneven_nodes_share_one_state",
    "sharded_with_*_on_the_wire",
    "hardly_anything_is_trained",
    "waiting_slices_survive_what_is_shared",
    "owner_without_a_gradient_counts_on",
    "offload*",
    "tensorboard_saves_embeddings_of_sharded_state",
    "only_the_first_worker_writes_sharded_state",
    "worker_that_is_asked_alone_says_what_to_do",
    "plain_files_go_on_sharded",
    "sharded_file_goes_on_whole",
    "sharded_files_open_in_a_process_without_tfdp",
)


def _register(case: registry.Case) -> None:
    def function(env: Env) -> dict:
        with in_stage_3():
            return case.function(env)

    options = {
        field.name: getattr(case, field.name)
        for field in dataclasses.fields(case)
        if field.name not in ("name", "function", "covers", "module", "quick_setup")
    }
    options["same_as"] = case.same_as or case.name
    function.__module__ = __name__
    registry.register(f"{case.name}_at_stage_3", function, case.covers, **options)


def _chosen() -> list[registry.Case]:
    modules = ("sharded", "optimizers", "corners", "offload", "files")
    cases = registry.load_cases(tuple(f"sharding.cases_{name}" for name in modules))
    return [
        case
        for name, case in cases.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in CHOSEN)
    ]


for _case in _chosen():
    _register(_case)
