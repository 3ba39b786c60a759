"""`tfdp.DistributedOptimizer`, which wraps any Keras optimizer for many replicas.

Read `distributed` (the methods that Keras calls), `settings` (settings and counters),
`features` (optional features and their variables), `shardable` (sharding of the state)
and `arguments` (checks of arguments).
"""
