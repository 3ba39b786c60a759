"""The notebook of the examples runs, and a kernel that is interrupted goes on.

An interrupt is a real one, as by the button: SIGINT to the kernel's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.commands import ROOT
from tests.harness.tiers import full

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
manager = pytest.importorskip("jupyter_client.manager")
pytest.importorskip("ipykernel")

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.processes]

NOTEBOOK = ROOT / "examples" / "tfdp_in_a_notebook.ipynb"
DEADLINE_SECONDS = 240


def environment(folder: Path) -> dict[str, str]:
    """What a kernel gets: the checkout, this Python's kernel, and nothing of a home."""
    kept = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {
        "PYTHONPATH": os.pathsep.join(paths),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_CONFIG_DIR": str(folder / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kernel")


# The notebook.


@pytest.fixture(scope="module")
def executed(folder) -> list[Any]:
    """The code cells of the notebook, with their outputs."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=DEADLINE_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=environment(folder))
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: Any) -> str:
    return "".join(o.get("text", "") for o in cell.outputs if o.name == "stdout")


def test_the_notebook_trains_on_several_replicas_and_learns(executed):
    assert int(printed(executed[0]).rpartition("replicas:")[2]) >= 1
    assert "Epoch 3/3" in printed(executed[2])
    accuracy = float(printed(executed[4]).rpartition("test accuracy")[2])
    assert accuracy > 0.8


def test_what_the_notebook_saves_is_the_same_on_one_device_and_on_all(executed):
    lines = printed(executed[5]).strip().splitlines()
    losses = [json.loads(line.partition(":")[2])[0] for line in lines[-2:]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_plan_as_the_last_line_of_a_cell_is_one_table(executed):
    (output,) = executed[3].outputs
    assert "conv2d/kernel" in output.data["text/html"]


def test_the_notebook_is_kept_without_outputs():
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


# Interrupts.


@dataclass(frozen=True)
class Ran:
    """How a cell ended: what it printed, and its error or `""`."""

    output: str
    error: str = ""


class Kernel:
    """A kernel whose cells can be interrupted at what they print."""

    def __init__(self, folder: Path) -> None:
        self._manager, self._client = manager.start_new_kernel(
            kernel_name="python3",
            startup_timeout=DEADLINE_SECONDS,
            env=environment(folder),
            cwd=str(folder),
        )

    def run(self, code: str, interrupt_at: str | None = None) -> Ran:
        """Run a cell; interrupt the kernel once the cell has printed a text."""
        message = self._client.execute(code)
        output, error, num_seen = "", "", 0
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                reply = self._client.get_iopub_msg(timeout=deadline - time.monotonic())
            except queue.Empty:
                pytest.fail(f"the cell did not end:\n{code}\n{output[-3000:]}")
            if reply["parent_header"].get("msg_id") != message:
                continue
            kind, content = reply["msg_type"], reply["content"]
            if kind == "stream":
                output += content["text"]
            elif kind == "error":
                error = f"{content['ename']}: {content['evalue']}"
            elif kind == "status" and content["execution_state"] == "idle":
                return Ran(output, error)
            if interrupt_at is not None and interrupt_at in output[num_seen:]:
                self._manager.interrupt_kernel()
                # Python ignores one that comes while TensorFlow's `__del__` runs, and
                # prints that. A user presses again.
                interrupt_at, num_seen = "Exception ignored in", len(output)

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(folder) -> Iterator[Kernel]:
    """A kernel with a model; all interrupts happen in it, one after the other."""
    kernel = Kernel(folder)
    pid = kernel._manager.provisioner.pid
    try:
        begun = kernel.run(BEGIN)
        assert not begun.error, begun
        yield kernel
    finally:
        kernel.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


BEGIN = """
import signal
import threading
import time

import keras
import numpy as np
import tfdp

strategy = tfdp.auto_strategy()
x = np.random.default_rng(0).normal(size=(640, 16)).astype("float32")
y = x.sum(axis=1, keepdims=True)


class Loud(keras.layers.Dense):
    def call(self, inputs, training=None):
        print("a step is traced")
        time.sleep(0.5)
        return super().call(inputs)


class Say(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch)

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 4:
            print("batch 4")

    def on_test_batch_begin(self, batch, logs=None):
        print("validation")
        time.sleep(0.5)


def make_model(layer=keras.layers.Dense):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [layer(8), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        model.compile("adam", "mse")
    return model


def losses(model, epochs=2, **options):
    fitted = model.fit(x, y, batch_size=32, epochs=epochs, verbose=0, **options)
    return fitted.history["loss"]


def check(model):
    "Goes on with a model; another one trains as if nothing had been."
    before = losses(model)
    assert losses(model)[-1] < before[0], "the model does not learn any more"
    for variable in model.weights:
        first, *rest = strategy.experimental_local_results(variable.value)
        for other in rest:
            assert np.array_equal(first.numpy(), other.numpy()), variable.path
    assert np.allclose(losses(make_model()), REFERENCE, rtol=1e-5)
    assert signal.getsignal(signal.SIGTERM) == HANDLER
    print("all is well")


HANDLER = signal.getsignal(signal.SIGTERM)
REFERENCE = losses(make_model())
"""

# By name: the cell that is interrupted, and what it prints before.
INTERRUPTED = {
    "steps": ("model.fit(x, y, epochs=9999, callbacks=[Say()])", "batch 4"),
    "tracing": (
        "model = make_model(Loud); model.fit(x, y, epochs=9999)",
        "a step is traced",
    ),
    "validation": (
        "model.fit(x, y, epochs=9999, validation_data=(x, y), callbacks=[Say()])",
        "validation",
    ),
    "callbacks": (
        "model.fit(x, y, batch_size=32, epochs=9999, callbacks=["
        "Say(), tfdp.callbacks.GradientAccumulation(steps=3), "
        "tfdp.callbacks.ShardedOptimizer(), "
        "tfdp.callbacks.ConsistencyCheck(every=2), "
        "tfdp.callbacks.CommunicationMonitor('monitor'), "
        "tfdp.callbacks.Timeline('timeline.json', steps=(2, 9999)), "
        "tfdp.callbacks.BackupAndRestore('backup')])",
        "batch 4",
    ),
}


@pytest.mark.parametrize(
    "name", [name if name == "callbacks" else full(name) for name in INTERRUPTED]
)
def test_a_kernel_that_is_interrupted_in_fit_goes_on(name, kernel):
    assert not kernel.run("model = make_model(); losses(model)").error
    code, text = INTERRUPTED[name]
    stopped = kernel.run(code, interrupt_at=text)
    assert stopped.error.startswith("KeyboardInterrupt"), stopped
    after = kernel.run("check(model)")
    assert "all is well" in after.output, after


def test_a_plan_that_a_cell_prints_is_its_text(kernel):
    shown = kernel.run("print(strategy.communication_plan(make_model()))")
    assert "/kernel" in shown.output


def test_a_fit_that_was_interrupted_resumes_when_its_cell_is_run_again(kernel):
    assert not kernel.run("model = make_model()").error
    cell = (
        "print(losses(model, epochs=20, callbacks=[Say(), "
        "tfdp.callbacks.BackupAndRestore('resumed', save_freq=15)]))"
    )
    stopped = kernel.run(cell, interrupt_at="epoch 3")
    assert stopped.error.startswith("KeyboardInterrupt"), stopped
    again = kernel.run(cell)
    assert not again.error, again
    expected = kernel.run("print(losses(make_model(), epochs=20))")
    assert last_list(again.output) == pytest.approx(last_list(expected.output))


def last_list(output: str) -> list[float]:
    """The list of numbers that a cell has printed last."""
    return json.loads(output.strip().splitlines()[-1])
