"""Ray Train for Keras 3. Public is what `tfdp.ray` names.

Reading order:
    trainer: workers of Ray as a cluster of tf.distribute
    report: metrics and checkpoints to Ray, and a worker's shard of Ray Data as a
        `tf.data.Dataset`
"""
