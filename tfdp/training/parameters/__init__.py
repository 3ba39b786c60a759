"""Sharded parameters (ZeRO-3): replicas hold parts, and steps gather whole parameters.

A unit is a set of parameters that are gathered together. An owner is one of the
replicas that share the parameters: all replicas, or those of a node.

Reading order:
    shard_groups: the process groups of the replicas that share parameters or state
    packing: parts of several variables packed into one flat tensor, and unpacked
    sharded_parameter: the variable, which has a part on each replica
    host_gathers: gathers of a whole parameter in host memory, outside of a step
    gathers: reads of sharded parameters, in a step and outside of one
    quantized_gathers: gathers of parameters in 8 bits an element
    step_gathers: the units that a step of a replica gathers, built during its trace
    backward_gathers: second gathers of the same units for the backward pass
    conversion: conversions of a model's variables to sharded parameters, at creation
        or later, and back to whole variables
"""
