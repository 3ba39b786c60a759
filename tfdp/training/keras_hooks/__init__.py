"""Replacements of Keras functions under a tfdp strategy, and callbacks of its loops.

Read in this order:

    install           THE TABLE of replaced functions: where, why, upstream issue
    trainer_hooks     compile, fit, evaluate, predict, save
    step_functions    the function of a step: made, built, dropped; its outputs
    own_functions     check of the function of a step that a model makes itself
    loop_agreement    comparison of the workers' settings and data before a loop
    configs           configs of models and optimizers, in a comparable form
    layer_hooks       scale of losses, moments of BatchNormalization, seeds
    optimizer_hooks   updates by plain Keras optimizers, as steps of tfdp
    file_hooks        saving and loading with the user's own optimizer
    runtime_hooks     TensorFlow: replica contexts, traced functions, seeds
    file_view         the user's optimizer, as a view of the DistributedOptimizer
    scope_checks      checks of models and optimizers created outside the scope
    worker_callbacks  selection of the callbacks that each worker runs
    added_callbacks   callbacks that tfdp adds to the user's
    logs              logs of a step over the whole global batch
    saving            atomic saves by several workers
"""
