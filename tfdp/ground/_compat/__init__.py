"""Access to private names of TensorFlow and Keras, which no other package uses.

If a release of either library breaks tfdp, the fix belongs here, or in the table of
replaced functions, `tfdp.training.keras_hooks.install`. Other packages import the file
and write `graphs.root_graph()`, so that each call names it. Read in this order:

    patches          machinery that replaces functions of Keras and TensorFlow
    owners           the classes and modules whose functions are replaced
    runtime          devices, server, collectives of a process
    programs         operations of a traced step, rebuilt on each replica
    graphs           operations of a graph under construction
    random_seeds     global seeds and random states
    tf_distribute    classes of tf.distribute, values of each replica
    tensor_reads     variables that are assembled from tensors
    tf_data          tf.data: datasets, distributed datasets and iterators
    pipelines        stages of a tf.data pipeline, rebuilt on another one
    keras_data       Keras's data adapters and epoch iterators
    keras_model      Keras's models: strategy, symbolic build, epochs, callbacks
    keras_optimizer  Keras's optimizers: trained variables, the parts of an update
    optimizer_state  variables of Keras's optimizers: slots, accumulators, tracking
    optimizer_views  stand-ins with other state for Keras's own update
    xla_lowering     lowering of traced functions

Checked on TensorFlow 2.21.0 with Keras 3.15.1; `tools/test_matrix` runs the tests on
the other supported versions, TensorFlow 2.19 to 2.21 with Keras 3.12 to 3.15.
"""
