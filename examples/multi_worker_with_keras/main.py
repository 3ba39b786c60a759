"""TensorFlow's multi-worker tutorial, with the strategy line changed to tfdp's.

tfdp run -n 2 examples/multi_worker_with_keras/main.py
"""

from __future__ import annotations

import json
import os

import mnist_setup

import tfdp

per_worker_batch_size = 64
tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])

strategy = tfdp.MultiWorkerMirroredStrategy()

global_batch_size = per_worker_batch_size * num_workers
multi_worker_dataset = mnist_setup.mnist_dataset(global_batch_size)

with strategy.scope():
    multi_worker_model = mnist_setup.build_and_compile_cnn_model()

multi_worker_model.fit(multi_worker_dataset, epochs=3, steps_per_epoch=70)
