"""How workers are found, agree and send each other bytes.

- `collectives`: process groups, all-reduce algorithms.
- `transport`: connections and collectives between CPU processes.
- `coordination`: rendezvous, consistency checks, heartbeats.
- `connection`: TCP connections whose ends prove that they have the job's secret.
- `cluster`: `TF_CONFIG`, Slurm, MPI, nodes, ports and devices.
"""
