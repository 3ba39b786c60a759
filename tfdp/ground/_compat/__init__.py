"""Access to private names of TensorFlow and Keras, which no other room touches.

Each function says why it is needed. A release of either library that breaks tfdp is
mended here, or in the table of what is replaced, `tfdp.training.keras_hooks.install`.
Other rooms write `_compat.name`: it has all public names of its files. Read in this
order:

    patches          machinery that replaces functions of Keras and TensorFlow
    owners           the classes and modules whose functions are replaced
    runtime          devices, coordination service, collectives of a process
    programs         operations of a traced step, built again on each replica
    graphs           operations of a graph under construction
    seeds            global seeds and random states
    distribute       classes of tf.distribute, values that each replica has its own of
    tensor_reads     variables that are put together from tensors
    datasets         tf.data: datasets, distributed datasets and iterators
    pipelines        stages of a tf.data pipeline, built again upon another one
    keras_data       Keras's data adapters and epoch iterators
    keras_model      Keras's models: strategy, symbolic build, epochs
    keras_optimizer  Keras's optimizers: what they train, the parts of an update
    optimizer_state  their variables: slots, accumulators, tracking
    optimizer_views  stand-ins that show other state to Keras's own update
    xla              lowering of traced functions

Checked on TensorFlow 2.21.0 with Keras 3.15.1; `tools/test_matrix` runs the tests on
the other supported versions, TensorFlow 2.19 to 2.21 with Keras 3.12 to 3.15.
"""

from __future__ import annotations

from tfdp.ground._compat.datasets import *
from tfdp.ground._compat.distribute import *
from tfdp.ground._compat.graphs import *
from tfdp.ground._compat.keras_data import *
from tfdp.ground._compat.keras_model import *
from tfdp.ground._compat.keras_optimizer import *
from tfdp.ground._compat.optimizer_state import *
from tfdp.ground._compat.optimizer_views import *
from tfdp.ground._compat.owners import *
from tfdp.ground._compat.patches import *
from tfdp.ground._compat.pipelines import *
from tfdp.ground._compat.programs import *
from tfdp.ground._compat.runtime import *
from tfdp.ground._compat.seeds import *
from tfdp.ground._compat.tensor_reads import *
from tfdp.ground._compat.xla import *
