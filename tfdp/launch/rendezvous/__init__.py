"""Rendezvous of the launchers of several machines: all start, stop and end together.

Node 0 listens; the launcher of each node, its own too, connects to it by TCP. Nothing
here depends on clocks that are equal, imports TensorFlow, or believes a message of
somebody who has not the job's secret. Reading order:
    failure: what ends a rendezvous, or a worker or node, in words
    secret: the job's secret, in a file or made for one job
    channel: sealed lines of JSON over a connection, and heartbeats
    address: where node 0 listens, and whether this machine is it
    roster: what a node says of itself, and what has to be the same on all; the nodes
        that are there, their ranks and addresses; which of several failures to name
    restarts: what follows a failure, also of a job on one machine
    coordinator: the course of the job, decided by node 0
    server: thread of node 0 that serves the connections
    member: thread of every node that keeps its connection
"""
