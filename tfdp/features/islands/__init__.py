"""Islands: workers that train as jobs of their own and meet in outer steps only.

One that ends stops no other, and one that comes back goes on from what all have in
common. Files, in reading order:

- `hub_connection`: messages and signs of life over an authenticated connection.
- `meeting`: means over the islands that come in time, and the state for who joins.
- `hub`: the process that islands connect to, one meeting for each `fit`.
- `member`: the hub as an island sees it.
- `launcher_link`: the hub as the launcher of another machine sees it.
- `outer_state`: weights that all islands have in common, and their optimizer.
- `training`: exchanges of an island while it trains.

Only the last two import TensorFlow: a hub runs in the launcher.
"""
