"""Single-device programs: a step is traced as on one device, and divided by rows.

N replicas compute what one device would compute. A replica holds its own rows of a
tensor, a partial sum, or the whole tensor; an operation without a rule receives whole
inputs. The idea is that of GSPMD: Xu et al. 2021, https://arxiv.org/abs/2105.04663.

Reading order:
    step: tracing, planning and building of a step on each replica
    batch: placeholders for the parts of a batch
    plan: a decision for each operation, made before anything is built
    liveness: the operations and tensors that the results need
    facts, sizes: how a replica holds a tensor, and sizes as multiples of the rows
    view, rules: an operation with the facts of its inputs, and the rule that decides it
    builder: construction of the operations on a replica
    conversions: gathers of rows, sums of parts, slices of own rows
    control_flow: branches, loops and calls
    logs: the operations that compute logs after a step
    eager: a step that runs eagerly on the rows of all replicas
    gathers: the tensors that a step gathers, with the lines that need them
    divisions: the warning of losses divided by the number of replicas
    checks: comparison of steps between workers, and limits on what they gather
"""
