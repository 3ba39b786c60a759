"""`tfdp.DistributedOptimizer`, a wrapper that gives any Keras optimizer the path.

Read `distributed` (what Keras calls), `settings` (settings and counters), `features`
(the state of what is in use), `shardable` (where the state lies) and `arguments`
(checks).
"""
