"""The program of one device: a step that is traced as one device's, and divided.

Whatever a step does, N replicas compute what one device computes. A replica holds its
own rows of a tensor, a part of a sum, or the whole; an operation without a rule gets
its inputs whole. The idea is GSPMD's: Xu et al. 2021, https://arxiv.org/abs/2105.04663.

Reading order:
    step: a step that is traced, planned and built on each replica
    batch: what stands for the parts of a batch
    plan: a decision for each operation, found before anything is built
    liveness: what of it is needed
    facts, sizes: what is held of a tensor, and its sizes as multiples of the rows
    view, rules: an operation, and what it gives by what is held of its inputs
    builder: the operations of a replica
    conversions: rows gathered, parts summed, own rows taken
    control_flow: branches, loops and calls
    logs: what is computed after a step
    eager: a step that runs eagerly, on the rows of all
    gathers: what a step gathers, with the lines that need it
    divisions: losses that are divided by the number of replicas
    checks: steps compared between workers, and what they gather told or refused
"""
