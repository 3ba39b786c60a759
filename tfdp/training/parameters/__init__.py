"""Sharded parameters (ZeRO-3): each replica holds a part, a step gathers what it reads.

Reading order:
    shard_groups: the process groups of those who share parameters or state
    packing: parts of several variables as one flat tensor, and back
    sharded_parameter: the variable: parts on the replicas, the whole to a model
    host_gathers: a whole parameter on the hosts of workers, or on one that reads alone
    gathers: reads of it, in a step and outside of one
    quantized_gathers: parameters that travel in 8 bits an element
    step_gathers: the units that the step of a replica gathers while it is traced
    backward_gathers: the same units gathered again for the backward pass
    conversion: variables of a model made sharded, when they are made or later, and
        whole again
"""
