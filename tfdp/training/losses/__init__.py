"""Support for losses that compare the rows of a batch, outside of Keras's loops.

Reading order:
    all_gather: `tfdp.all_gather`, which gathers the rows of all replicas
"""
