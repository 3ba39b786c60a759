"""Ray Train for Keras 3; `tfdp.ray` exports the public names.

Reading order:
    trainer: workers of Ray as a cluster of tf.distribute
    report: metrics and checkpoints reported to Ray, and a worker's shard of Ray Data as
        a `tf.data.Dataset`
"""
