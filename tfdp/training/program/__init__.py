"""Single-device programs: a step is traced as on one device, and divided by rows.

N replicas compute what one device would compute. A replica holds its own rows of a
tensor, a partial sum, or the whole tensor; an operation without a rule receives whole
inputs. The idea is that of GSPMD: Xu et al. 2021, https://arxiv.org/abs/2105.04663.

Terms of this package:
    fact: what is known of a tensor before the step is built: its form and sizes
    form: how a replica holds a tensor: its own rows, a partial sum, the whole tensor
    own rows: the block of rows of the global batch that a replica has; a tensor that is
        held in this form is sharded by rows
    need: the form in which an operation has to receive an input
    decision: the needs of an operation, the facts of its outputs, and how it is built
    plan: the facts and decisions of all tensors and operations of a graph
    marker: an identity operation that tfdp has put into the program as a sign

Reading order:
    step: tracing, planning and building of a step on each replica
    batch: placeholders for the parts of a batch
    plan: a decision for each operation, made before anything is built
    liveness: the operations and tensors that the results need
    facts, sizes: how a replica holds a tensor, and sizes as multiples of the rows
    view, rules: an operation with the facts of its inputs, and the rule that returns
        its decision
    builder: construction of the operations on a replica
    replica: gathers of rows, sums of parts, slices of own rows
    control_flow: branches, loops and calls
    micro_batches: which operations run in a loop over micro-batches of a replica's rows
    micro_builder: construction of these loops, and of what follows them
    logs: the operations that compute logs after a step
    eager: a step that runs eagerly on the rows of all replicas
    gathers: the tensors that a step gathers, with the lines that need them
    divisions: the warning of losses divided by the number of replicas
    checks: comparison of steps between workers, and limits on what they gather
"""
