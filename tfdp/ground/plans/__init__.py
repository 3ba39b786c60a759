"""Plans: pure values and functions, without tensors or devices.

Reading order:
    topology: replicas of each node
    buckets: gradients of each collective
    shards: owner of each element of the optimizer state
    units: sharded parameters that are gathered together, and the owners' ranges
    sharding: options of sharding, and what they shard
    file_owners: files of each worker, balanced by size
    memory: bytes of training state on a replica
    gathers: tensors that a step gathers for operations that need the whole batch
    traffic: messages of all-reduce algorithms
    cost_model: predicted seconds of an all-reduce, and the fastest algorithm
    prediction: predicted seconds of a step
    schedules: learning rates and accumulation steps
"""
