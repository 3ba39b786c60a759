"""Classes and modules of Keras and TensorFlow whose functions tfdp replaces.

`tfdp.training.keras_hooks.install` lists the functions and the reasons. `keras_random`
and `keras_image` have `draw_seed`, from which layers such as Dropout take seeds.
"""

# ruff: noqa: F401  other packages import these names from here.

from __future__ import annotations

from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.backend.tensorflow import core as keras_core
from keras.src.backend.tensorflow import image as keras_image
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.backend.tensorflow import random as keras_random
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.backend.tensorflow.trainer import TFEpochIterator as EpochIterator
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss as keras_loss
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.saving import saving_lib
from keras.src.trainers.trainer import Trainer as BaseTrainer
from tensorflow.core.function.polymorphism.function_type import FunctionType
from tensorflow.python.checkpoint.functional_saver import MultiDeviceSaver
from tensorflow.python.distribute import cross_device_ops, mirrored_run
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.eager.polymorphic_function.polymorphic_function import (
    Function as PolymorphicFunction,
)
from tensorflow.python.framework import random_seed
