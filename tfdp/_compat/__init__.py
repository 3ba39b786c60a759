"""Access to private names of TensorFlow and Keras, which no other room touches.

Each function says why it is needed. A release of either library that breaks tfdp is
mended here, or in the table of what is replaced, `tfdp.keras_hooks.install`. Other
rooms write `_compat.name`: all names are gathered below. Read in this order:

    patches          machinery that replaces functions of Keras and TensorFlow
    owners           the classes and modules whose functions are replaced
    runtime          devices, coordination service, collectives of a process
    programs         operations of a traced step, built again on each replica
    graphs           operations of a graph under construction
    seeds            global seeds and random states
    distribute       classes of tf.distribute, values that each replica has its own of
    tensor_reads     variables that are put together from tensors
    datasets         tf.data: datasets, distributed datasets and iterators
    pipelines        stages of a tf.data pipeline, built again upon another one
    keras_data       Keras's data adapters and epoch iterators
    keras_model      Keras's models: strategy, symbolic build, epochs
    keras_optimizer  Keras's optimizers: what they train, the parts of an update
    optimizer_state  their variables: slots, accumulators, tracking
    optimizer_views  stand-ins that show other state to Keras's own update
    xla              lowering of traced functions

Checked on TensorFlow 2.21.0 with Keras 3.15.1; `tools/test_matrix` runs the tests on
the other supported versions, TensorFlow 2.19 to 2.21 with Keras 3.12 to 3.15.
"""

from __future__ import annotations

from tfdp._compat.datasets import (
    CompositeTensor,
    DistributedDatasetsFromFunction,
    DistributedIteratorInterface,
    NoneTensorSpec,
    PerReplicaSpec,
    any_has_value,
    asks_for_more,
    begin_shuffles,
    captures_dataset,
    dataset_batch_size,
    dataset_inputs,
    dataset_sources,
    empty_optional,
    is_unordered,
    kind_of_part,
    kinds_of_parts,
    local_dataset,
    local_element_spec,
    names_of_parts,
    operations_in,
    optionals_of_replicas,
    reshuffles,
    shards_of,
    shuffle_seeds,
    size_of_batch_stage,
    sources_of,
    strategy_of_iterator,
    that_asks,
    type_spec_of,
    unseeded_parts,
    values_or_empty,
    without_automatic_prefetch,
    without_partial_batches,
    writes_while_read,
)
from tfdp._compat.distribute import (
    CollectiveAllReduce,
    MirroredExtended,
    MirroredVariable,
    MultiWorkerExtended,
    PerReplica,
    StockOptions,
    SyncOnReadVariable,
    can_merge,
    copy_local_parts,
    elements_of,
    is_one_device,
    local_part,
    local_replica_id,
    local_replica_id_in_force,
    local_value,
    outside_strategies,
    per_replica,
    select_replica,
    set_cluster_resolver,
    stock_initial_value,
    sum_of_local_parts,
    variable_classes,
    without_tf_config,
)
from tfdp._compat.graphs import (
    constant_value,
    copy_of_operation,
    in_branch,
    in_loop_of_replica,
    op_age,
    op_position,
    ordered_by_itself,
    root_graph,
)
from tfdp._compat.keras_data import (
    ArrayDataAdapter,
    RowsOfPyDatasetAdapter,
    TorchDataLoaderAdapter,
    adapter_of_py_dataset,
    can_convert_arrays,
    dataset_maker,
    distributed_dataset,
    epoch_progress,
    first_batch_of,
    holds_arrays,
    inputs_of,
    is_torch_dataloader,
    set_dataset_of_epoch,
    set_distributed_dataset,
    set_epoch_progress,
    shuffles_arrays,
    source_of,
    spec_of_batches,
)
from tfdp._compat.keras_model import (
    OWN_STEPS,
    backup_that_writes_nothing,
    build_by_steps,
    build_eagerly,
    build_symbolically,
    calls_of,
    compile_arguments,
    function_arguments,
    has_default_config,
    initial_epoch,
    is_built_symbolically,
    layers_of,
    overridden,
    replaced_optimizer,
    set_initial_epoch,
    strategy_of,
    weights_of_layers,
)
from tfdp._compat.keras_optimizer import (
    apply_weight_decay,
    check_known,
    clip_gradients,
    count_update,
    decay_alike,
    finalize_averages,
    has_rate_variable,
    index_in,
    inner_index,
    is_on_one_device,
    is_optimizer_of,
    move_averages,
    overwrite_by_gradients,
    overwrite_with_moving_average,
    rate_variable,
    rehome_optimizer,
    rehome_variable,
    scope_of_optimizer,
    set_trained,
    strategy_of_optimizer,
    trained_by,
    update_moving_average,
    update_variables,
    uses_weight_decay,
    without_missing,
)
from tfdp._compat.optimizer_state import (
    accumulators,
    accumulators_of,
    build_without_state,
    built_without_memory,
    copy_of,
    drop_state,
    has_accumulators,
    is_on,
    micro_batch_counter,
    num_variables_before_accumulators,
    own_variables,
    single_variables,
    slots_of,
    state_variables,
    take_accumulators,
    untrack,
)
from tfdp._compat.optimizer_views import (
    adopt,
    as_accumulating,
    loss_scale_optimizer,
    multi_with_parts,
    plain_clone,
    stand_in,
    with_counter_read,
    with_fixed_scale,
    with_local_value,
    with_rate,
    with_slots,
    with_state,
)
from tfdp._compat.owners import (
    AtomicFunction,
    BaseOptimizer,
    BaseTrainer,
    CompileLoss,
    EpochIterator,
    FunctionType,
    MultiDeviceSaver,
    PolymorphicFunction,
    TensorFlowTrainer,
    keras_core,
    keras_image,
    keras_loss,
    keras_nn,
    keras_random,
    keras_trainer,
    legacy_h5_format,
    random_seed,
    saving_lib,
)
from tfdp._compat.patches import (
    Replacement,
    change_of,
    filter_traceback,
    hide_from_tracebacks,
    replace,
)
from tfdp._compat.pipelines import (
    buffer_size_of,
    count_of_stage,
    drops_remainder,
    function_of_map,
    name_of_map,
    parallelism_of,
    python_function_of_map,
    stateful_operation,
    zipped,
)
from tfdp._compat.programs import (
    OperationTemplate,
    ProgramGraph,
    branch_graphs,
    call_inline,
    captures_of,
    counter_of_passes,
    function_graph,
    has_effect,
    has_function,
    is_call,
    loop_graphs,
    marked,
    marker_of,
    results_of_call,
    signature_of,
    stack_of,
)
from tfdp._compat.runtime import (
    PREEMPTED_TASK_KEY,
    abort_collectives,
    call_in_progress,
    configure_coordination_service,
    coordinated_jobs,
    delete_key_value,
    device_type,
    get_key_value,
    is_context_initialized,
    num_local_devices,
    own_task,
    plain_variable,
    profile_of,
    remove_generated_files,
    set_key_value,
    uses_onednn,
)
from tfdp._compat.seeds import (
    global_seed,
    keras_global_seed,
    keras_seed_state,
    random_state,
    set_keras_global_seed,
    set_keras_seed_state,
    set_tensorflow_random_state,
    temporary_seed,
    tensorflow_random_state,
)
from tfdp._compat.tensor_reads import (
    all_attached,
    attached,
    autocast_dtype,
    autocasting,
    component_variable,
    is_cast_when_read,
    newest_age,
    operations,
    record_read,
    run_of_replicas,
    set_input,
    set_value_of,
    step_graph,
    unique_name,
    value_of,
    variable_like,
)
from tfdp._compat.xla import all_operations, lower, outermost, supports_jit
