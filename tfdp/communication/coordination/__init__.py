"""Coordination of workers by short texts: joining, agreement, liveness, preemption.

Reading order:
    clock: time during which this process was not suspended
    flight_record: the last collectives of this worker, and the file of its record
    progress: loop, epoch and step of this worker, for messages
    flight_steps: steps whose collectives TensorFlow runs, for flight records
    data_wait: time that this worker has waited for a batch of its data
    worker_group: all-gather of texts over the job's store, and a mailbox
    model_group: the worker group of a model
    join: start-up checks, and joining the cluster
    tensorflow_server: TensorFlow's server, where its collectives are used
    facts: what must be the same on all workers, compared in one all-gather
    checks: facts of devices, versions, options, variables, plans and steps
    watch: heartbeats, failure detection, shutdown
    survivors: agreement of the workers that are left after the loss of others
    preemption: signals that request a checkpoint and exit
"""
