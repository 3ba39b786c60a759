"""Classes and modules of Keras and TensorFlow whose functions tfdp replaces.

`tfdp.training.keras_hooks.install` says which functions, and why.
"""

from __future__ import annotations

from keras.src.backend.tensorflow import core as _core
from keras.src.backend.tensorflow import image as _image
from keras.src.backend.tensorflow import nn as _nn
from keras.src.backend.tensorflow import random as _random
from keras.src.backend.tensorflow import trainer as _trainer
from keras.src.legacy.saving import legacy_h5_format as _legacy_h5_format
from keras.src.losses import loss as _loss
from keras.src.optimizers import base_optimizer as _base_optimizer
from keras.src.saving import saving_lib as _saving_lib
from keras.src.trainers import compile_utils as _compile_utils
from keras.src.trainers import trainer as _base_trainer
from tensorflow.core.function.polymorphism import function_type as _function_type
from tensorflow.python.checkpoint import functional_saver as _functional_saver
from tensorflow.python.eager.polymorphic_function import (
    atomic_function as _atomic_function,
)
from tensorflow.python.eager.polymorphic_function import (
    polymorphic_function as _polymorphic_function,
)
from tensorflow.python.framework import random_seed as _random_seed

# `fit` and what it calls.
BaseTrainer = _base_trainer.Trainer
TensorFlowTrainer = _trainer.TensorFlowTrainer
EpochIterator = _trainer.TFEpochIterator
keras_trainer = _trainer
# Losses: the sum over all, the mean of one, its division by the number of replicas.
CompileLoss = _compile_utils.CompileLoss
keras_loss = _loss
# Layers: convolutions, the moments of synchronized BatchNormalization, and the modules
# that hold `draw_seed`, from which Dropout and its like take seeds; what is computed
# again for the backward pass.
keras_core = _core
keras_nn = _nn
keras_random = _random
keras_image = _image
# Optimizers.
BaseOptimizer = _base_optimizer.BaseOptimizer
# Files.
saving_lib = _saving_lib
legacy_h5_format = _legacy_h5_format
MultiDeviceSaver = _functional_saver.MultiDeviceSaver
# TensorFlow's traced functions and their types, and the seeds of operations.
PolymorphicFunction = _polymorphic_function.Function
AtomicFunction = _atomic_function.AtomicFunction
FunctionType = _function_type.FunctionType
random_seed = _random_seed
