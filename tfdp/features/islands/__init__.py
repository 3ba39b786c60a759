"""Islands: workers that train as jobs of their own and meet in outer steps only.

One that ends stops no other, and one that comes back goes on from what all have in
common. Files, in reading order:

- `hub_connection`: messages and signs of life over an authenticated connection.
- `hub`: the process that islands connect to, one meeting for each `fit`: its rounds,
  and the state for who joins.
- `member`: the hub as an island sees it, or the launcher of another machine.
- `training`: exchanges of an island while it trains, and what all have in common.

Only the last imports TensorFlow: a hub runs in the launcher.
"""
