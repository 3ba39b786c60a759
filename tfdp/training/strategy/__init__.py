"""The strategies: classes for users, and the classes that TensorFlow calls.

Read `strategy` (the public classes), `replica_step` (the form of a Keras step that
`strategy.run` executes), `compiled_step` (the part of a step that XLA compiles),
`extended` (variables, groups, statistics), `multi_worker_extended` (the workers, and
the change of them), `cross_device_ops` (the reducer behind the interface of
tf.distribute) and `transports` (the choice of a transport).
"""
