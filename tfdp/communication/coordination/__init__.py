"""Coordination of workers by short texts: joining, agreement, liveness, preemption.

Reading order:
    clock: time in which this process ran
    progress: loop, epoch and step of this worker, for messages
    data_wait: since when this worker waits for a batch of its data
    worker_group: texts over the coordination service: of all, or to the first worker
    join: a worker joins its cluster
    checks: workers compare devices, versions, options, variables, plans and steps
    watch: heartbeats, failure detection, shutdown
    preemption: signals that ask to save and exit
"""
