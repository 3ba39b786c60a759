"""Small modules that all rooms above share: context, batch weights, files.

Reading order:
    context: tfdp strategies of models, optimizers and scopes
    loops: the loop of Keras that is running
    feature: what can be added to training, and when it is called
    step_context: what one replica's step knows, in its thread; hooks of callbacks
    batch_weight: weight of a replica's rows in the sums over a global batch
    program_trace: the program of one device that is traced
    param_groups: variables by optimizer, and properties of Keras's optimizers
    wrappers: optimizers that were wrapped, and those beside a model's own
    xla, deferred_updates: what XLA compiles of a step, and what waits for its end
    stand_in_seed: seeds of those who give none
    finalizers: finalizers that run on a thread of their own
    intervals: intervals of a median
    process_identity: whether a process of this machine runs
    temporary: temporary files, and those that killed processes have left
    files: files that appear whole, and folders that only their owner can read
"""
