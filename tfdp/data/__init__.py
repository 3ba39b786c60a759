"""Input data: division among replicas, epochs on all workers, position, checks.

Reading order:
    distribute: a dataset as one that gives every replica its rows
    same_datasets: comparison of the workers' datasets
    batch_sizes: rows of all batches, as far as known before they are read
    early_rows, raw_elements: rows that are taken before they are prepared
    own_rows: data of Keras's loops of which each worker reads its rows only, by
        py_dataset_rows, stored_rows, loader_rows
    rows, weighted_rows: rows of a batch for each replica, equal or by weight
    per_replica_dataset, element_specs: the distributed dataset on CPUs
    uneven_inputs: the end of the data for all workers
    lengths, epochs: number of steps and order of an epoch
    batch_weights: weights of the replicas in the sums over a batch
    load_balancer: weights of workers by their speed
    checks: messages for wrong data
    determinism: pipelines that give the same batches again
    position, batch_change: the position of a run that is resumed
"""
