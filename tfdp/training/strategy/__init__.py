"""The strategies: what a user makes, and what TensorFlow calls.

Read `strategy` (the public classes), `replica_step` (what `strategy.run` does with a
step of Keras), `compiled_step` (the part of it that XLA compiles), `extended`
(variables, devices, groups), `cross_device_ops` (the reducer as tf.distribute sees it)
and `transports` (what carries the bytes).
"""
