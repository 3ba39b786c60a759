"""Small modules that all other packages share: context, batch weights, files.

Reading order:
    context: the tfdp strategy of a model, optimizer, scope or replica
    loops: the loop of Keras that is running
    feature: base class of features of training, and its hooks
    step_context: state of one replica's step, by thread; active hooks of callbacks
    activities: evaluation, saves and backups, and their observers
    conditions: actions of a step that depend on a tensor
    batch_weight: weight of a replica's rows in the sums over a global batch
    program_trace: trace of a step as the program of one device
    param_groups: variables by optimizer, and properties of Keras's optimizers
    wrappers: wrappers and sharding of optimizers, and a model's further ones
    xla, deferred_updates: compilation of a step, and updates that run after it
    threads, finalizers: calls on separate threads, and finalizers that run on one
    intervals: confidence intervals of a median
    json_fields: dataclasses from values of JSON, with types checked
    memory: free memory of the host or container
    process_identity: identity of a process, to see whether it still runs
    temporary: temporary files, and removal of those of killed processes
    files: atomic writes, bounded reads and private folders
"""
