"""Keras under a tfdp strategy: what is replaced in it, and what its loops are given.

Read in this order:

    install           THE TABLE of replaced functions: where, why, upstream issue
    trainer_hooks     compile, fit, evaluate, predict, save
    loop_agreement    what workers compare before a loop, by one message
    configs           configs of models and optimizers, in a form to be compared
    layer_hooks       scale of losses, moments of BatchNormalization, seeds
    optimizer_hooks   a plain Keras optimizer: its updates take the path of a step
    file_hooks        saving and loading with the user's own optimizer
    runtime_hooks     TensorFlow: replica contexts, traced functions, seeds
    file_view         that optimizer, as a view of the DistributedOptimizer around it
    scope_checks      what was made in which strategy's scope
    worker_callbacks  callbacks that each worker runs
    added_callbacks   callbacks that tfdp adds to the user's
    logs              logs of a step over the whole global batch
    saving            files that several workers write
"""
