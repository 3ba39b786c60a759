"""The strategies: what a user makes, and what TensorFlow calls.

Read `strategy` (the public classes), `replica_step` (what `strategy.run` does with a
step of Keras), `extended` (variables, devices, groups) and `cross_device_ops` (the
reducer as tf.distribute sees it).
"""
