"""Input data: division among replicas, epochs on all workers, position, checks.

The public API is what `tfdp.data` exports. Reading order:
    distribute: the distributed dataset, which gives each replica its rows, by the
        auto-shard policies of tf.data
    same_datasets: comparison of the workers' datasets, and of their lengths
    fingerprints, array_parts: fingerprints of arrays, from rows of their parts
    value_differences: comparison of fingerprints, in messages that workers send anyway
    batch_labels: labels of batches, which workers compare
    batch_sizes: number of rows of each batch, as far as known before reading
    stages: stages of a tf.data pipeline, found and rebuilt
    early_rows: selection of a worker's rows before `map` prepares them
    own_rows, loader_rows: `PyDataset`s, arrays in files and torch's `DataLoader`s,
        where each worker reads only its rows
    index_source: elements that are loaded by their index
    file_shards: division of files among the workers
    rows: division of a batch among replicas, with row counts that differ by at most one
    other_rows: parts of a batch with another number of rows than the first part
    per_replica_dataset, element_specs: the distributed dataset on CPUs
    uneven_inputs: agreement on the end of the data; counters of reads
    epochs: number of steps and order of an epoch
    batch_weights: weights of the replicas in the sums over a batch
    load_balancer: division of a batch by weights that follow the workers' speed
    checks: validation of data, and the names of data in messages
    determinism: check that a pipeline gives the same batches again
    position, batch_change: the position in the data, restored by a resumed run
"""
