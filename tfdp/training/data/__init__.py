"""Input data: division among replicas, epochs on all workers, position, checks.

Public is what `tfdp.data` names. Reading order:
    distribute: a dataset as one that gives every replica its rows, by the policies of
        tf.data
    same_datasets: comparison of the workers' datasets, and of their lengths
    fingerprints, batch_labels: values of arrays and of batches, to compare workers by
    batch_sizes: rows of all batches, as far as known before they are read
    stages: stages of a pipeline, found and rebuilt
    early_rows: rows that are taken before they are prepared
    own_rows, loader_rows: data of Keras's loops of which each worker reads its rows
        only
    index_source: elements that are loaded by their index
    file_shards: files of which each worker reads its own
    rows: rows of a batch for each replica, equally many
    other_rows: parts of a batch that have another number of rows than the first
    per_replica_dataset, element_specs: the distributed dataset on CPUs
    uneven_inputs: the end of the data for all workers; batches asked for and given
    epochs: number of steps and order of an epoch
    batch_weights: weights of the replicas in the sums over a batch
    load_balancer: rows of a batch by weights, and weights by the speed of workers
    checks: messages for wrong data, and the name of data in messages
    determinism: pipelines that give the same batches again
    position, batch_change: the position of a run that is resumed
"""
