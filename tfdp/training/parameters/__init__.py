"""Sharded parameters (ZeRO-3): each replica holds a part, a step gathers what it reads.

Reading order:
    shard_groups: the process groups of those who share parameters or state
    packing: parts of several variables as one flat tensor, and back
    sharded_parameter: the variable: parts on the replicas, the whole to a model
    deferred: parameters that are sharded as soon as they are made
    host_gathers: a whole parameter on the hosts of workers
    gathers: reads of it, in a step and outside of one
    quantized_gathers: parameters that travel in 8 bits an element
    compute_order: what the gathers of a step wait for
    step_gathers: the units that the step of a replica gathers while it is traced
    backward_gathers: the same units gathered again for the backward pass
    served_reads: reads by the worker that writes a file
    conversion: variables of a model made sharded, and whole again
"""
