"""The step of a replica, from its gradients to updated variables.

Read `path` first: `take_step` calls nine stages, in order.

| stage | file |
| --- | --- |
| 1 accumulate | `accumulation`: none, local, sharded (ZeRO-2), or Keras's |
| 2 reduce | `state_layout`: all-reduce; `tfdp.training.sharding`: reduce-scatter |
| 3 unscale | `path`: divide by micro-batches and by the scale of `loss_scale` |
| 4 all finite? | `state_layout`, agreed by all replicas |
| 5 clip | `state_layout` |
| 6 decay and update | `grouped_update` on `flat_params`; the rate by features |
| 7 averages, 8 constraints, 9 count | `path`, after every micro-batch |

`step` has the `Step` that the path reads, and builds it for a plain Keras optimizer;
`tfdp.training.optimizer.distributed` builds it for a `DistributedOptimizer`.
`empty_step` repeats the changes that Keras makes when data of unknown length ends, and
`undo` restores what a step has changed apart from its update.
"""
