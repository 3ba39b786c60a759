"""Foundation of all other packages; nothing here depends on a strategy.

- `base`: state of the current step, and small modules that all packages share.
- `plans`: pure plans: buckets, shards, units, traffic, cost model, memory.
- `options`: `CommunicationOptions`.
- `links`: latency and bandwidth of the links between replicas.
- `arguments`: checks of booleans and numbers in arguments.
- `_compat`: the only access to private TensorFlow and Keras names.
- `user_code`: warnings that name the line of the user's script.
- `onednn`: activation of oneDNN's kernels in TensorFlow.
- `text`: singular and plural in messages.
- `forks`: cleanup in forked processes, and finalizers of one process only.
"""
