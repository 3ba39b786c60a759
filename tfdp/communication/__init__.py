"""Discovery of workers, agreement between them, and transfer of their data.

- `collectives`: process groups, all-reduce algorithms.
- `transport`: connections and collectives between CPU processes.
- `coordination`: rendezvous, consistency checks, heartbeats.
- `connection`: authenticated TCP connections: both ends prove the job's secret.
- `cluster`: `TF_CONFIG`, Slurm, MPI, nodes, ports and devices.
"""
