"""Islands: workers that train as separate jobs and communicate in outer steps only.

An island that ends does not stop the others, and one that restarts continues from the
state that all have in common. Files, in reading order:

- `island`: index of an island in its job, and address of the hub, from `TF_CONFIG`.
- `hub_connection`: messages and heartbeats over an authenticated connection.
- `hub`: the server that islands connect to: for each `fit` rounds of exchanges,
  and the state for islands that join.
- `hub_clients`: clients of the hub, for an island and for the launcher of another
  machine.
- `training`: exchanges of an island while it trains, and the common outer state.

Only `training` imports TensorFlow, since a hub runs in the launcher.
"""
