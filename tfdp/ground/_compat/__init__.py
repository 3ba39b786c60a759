"""Access to private names of TensorFlow and Keras, which no other package uses.

If a release of either library breaks tfdp, the fix belongs here, or in the table of
replaced functions, `tfdp.training.keras_hooks.install`. Other packages write
`_compat.name`: this package exports all public names of its files. Read in this order:

    patches          machinery that replaces functions of Keras and TensorFlow
    owners           the classes and modules whose functions are replaced
    runtime          devices, server, collectives of a process
    programs         operations of a traced step, rebuilt on each replica
    graphs           operations of a graph under construction
    seeds            global seeds and random states
    distribute       classes of tf.distribute, values of each replica
    tensor_reads     variables that are assembled from tensors
    datasets         tf.data: datasets, distributed datasets and iterators
    pipelines        stages of a tf.data pipeline, rebuilt on another one
    keras_data       Keras's data adapters and epoch iterators
    keras_model      Keras's models: strategy, symbolic build, epochs
    keras_optimizer  Keras's optimizers: trained variables, the parts of an update
    optimizer_state  variables of Keras's optimizers: slots, accumulators, tracking
    optimizer_views  stand-ins with other state for Keras's own update
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
