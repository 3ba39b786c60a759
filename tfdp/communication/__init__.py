"""Discovery of workers, agreement between them, and transfer of their data.

- `collectives`: process groups, all-reduce algorithms.
- `transport`: connections and collectives between CPU processes.
- `coordination`: agreement, consistency checks, heartbeats.
- `store`: the job's key-value store: all-gathers of texts, reports of the workers.
- `connection`: authenticated connections: both ends prove the job's secret.
- `cluster`: `TF_CONFIG`, Slurm, MPI, nodes, ports and devices.
"""
