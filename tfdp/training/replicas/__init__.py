"""Variables on several replicas: kinds, initial values, merged states, drift.

Reading order:
    variables: the variables that a strategy creates
    synchronized_scope: broadcast of the first worker's initial values
    random_seed: agreement on one seed
    state_merge: metric states and statistics of all replicas as one
    checksum: checksums of weights
    assigned_values: what workers have assigned to sharded parameters
    drift, drift_probe: detection of replicas with different weights
"""
