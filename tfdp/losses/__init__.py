"""Losses on replicas with the gradients that one device has.

Reading order:
    row_forms: how the tensors of a step depend on the rows of a batch
    loss_terms: gradients and logs, with each term of a loss scaled to a mean of rows
    training_group: replicas that train together: all, or those of a node
    global_statistics: functions of means and sums over the rows of all replicas
    all_gather: `tfdp.all_gather`, for losses that compare rows
"""
