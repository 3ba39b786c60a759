"""Rendezvous of the launchers of several machines: all start, stop and end together.

Node 0 listens; the launcher of each node, node 0 included, connects to it by TCP. The
clocks of the nodes may differ. No module here imports TensorFlow, and messages of peers
that lack the job's secret are rejected. Reading order:
    failure: failures of workers and nodes, and the errors of a rendezvous
    link: connection of a launcher to node 0, with heartbeats
    address: the address at which node 0 listens, and whether it is this machine's
    roster: the description of a node, and what must agree on all nodes; the connected
        nodes, their ranks and addresses; which of several failures is the cause
    restarts: the restart policy, also of a job on one machine
    coordinator: the state machine of the job, run by node 0
    job_probe: the thread of node 0 that asks the workers whether they train
    elastic_coordinator: the state machine of a job that continues without lost nodes
    server: the thread of node 0 that serves the connections of all nodes
    node_0_connection: the thread of each node that keeps its connection to node 0
"""
