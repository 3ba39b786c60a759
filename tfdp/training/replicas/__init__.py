"""Variables on several replicas: classes, initial values, merged states, drift.

Reading order:
    variables: classes of variables that a strategy creates
    synchronized_scope: broadcast of the first worker's initial values
    random_seed: agreement of all workers on one seed, and a seed for users without
    state_merge: merge of metric states and statistics over all replicas
    checksum: checksums of weights
    assigned_values: record of assignments to sharded parameters outside of steps
    drift: detection of replicas with different weights
"""
