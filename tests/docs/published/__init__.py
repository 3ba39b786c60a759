"""Programs that do, call by call, what the published guides on distribution do.

Of https://www.tensorflow.org/tutorials/distribute/:

- `fit_tutorial`: keras
- `loop_tutorial`: custom_training
- `workers_fit_tutorial`: multi_worker_with_keras
- `workers_loop_tutorial`: multi_worker_with_ctl
- `files_tutorial`: save_and_load
- `input_tutorial`: input

`strategies_guide` is https://www.tensorflow.org/guide/distributed_training. And of
https://keras.io/guides/:

- `keras_guide`: distributed_training_with_tensorflow
- `keras_workers_guide`: the part on several workers that this page had before
- `transfer_guide`: transfer_learning

They are written for these tests, not copied: models, optimizers, batch sizes, callbacks
and the order of calls are those of the page. What differs everywhere, and is not
marked again:

- The strategy's line, which is the first to use TensorFlow, as several workers need.
- Data: a few small pictures that are computed, in the types and shapes of MNIST.
- Fewer epochs and steps; paths in a folder of the test; no cells of the shell.
- float64, so that what is left of rounding is far below any fault.

All other differences are marked by `Differs:`. They are mostly names that Keras 3
does not have, so that the page fails on one device, too.

Pages that are left out, since they are about what tfdp does not have: parameter servers
(`parameter_server_training`), DTensor (`dtensor_keras_tutorial` and
`dtensor_ml_tutorial`), TPUs (`TPUStrategy` in the guide), and
`multi_worker_with_estimator`: TensorFlow has no Estimator since 2.16. Custom
`train_step`s of Keras's guides are in `tests/keras_hooks/cases_guides.py`.
"""
