"""What all floors stand on; nothing here knows of a strategy.

- `base`: state of the current step, shared by the rooms above.
- `plans`: pure plans: buckets, shards, traffic, cost model, memory.
- `options`: `CommunicationOptions`.
- `links`: latency and bandwidth of the links between replicas.
- `arguments`: checks of arguments.
- `_compat`: the only access to private TensorFlow and Keras names.
- `user_code`: warnings that name the line of the user's script.
- `onednn`: TensorFlow's kernels of oneDNN, switched on.
- `text`: words for messages.
- `forks`: forked processes, in which what this process opened is closed.
"""
