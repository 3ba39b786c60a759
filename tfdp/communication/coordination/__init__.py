"""Coordination of workers by short texts: joining, agreement, liveness, preemption.

Reading order:
    clock: time in which this process ran
    progress: loop, epoch and step of this worker, for messages
    data_wait: since when this worker waits for a batch of its data
    worker_group: all-gather of texts over the coordination service
    mailbox: texts to the first worker without waiting
    join: a worker joins its cluster
    same_setup: workers compare devices, versions, options and nodes
    checks: workers compare variables, bucket plans and steps
    differences: the first difference between nests of settings
    watch: heartbeats, failure detection, shutdown
    preemption: signals that ask to save and exit
"""
