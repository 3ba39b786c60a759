"""A worker process: a fork that has TensorFlow, and runs cases as it is told."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing.connection
import os
import pathlib
import signal
import time
import traceback

from tests.harness.fork_server import begin
from tests.harness.results import Outcome, flatten_results
from tests.harness.setups import BY_NAME


def serve(
    setup: str,
    rank: int,
    flavor: str,
    connection: multiprocessing.connection.Connection,
    tf_config: str | None,
    log: pathlib.Path,
    stacks: pathlib.Path,
) -> None:
    """Runs cases until the parent says so or is gone; this is the new process."""
    begin(log, tf_config)
    file = stacks.open("w")
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    try:
        runner = Runner(setup, rank, flavor)
        connection.send(Outcome())
    except BaseException as error:  # noqa: BLE001 the parent reports it
        connection.send(_failed(error, 0.0))
        return
    while True:
        try:
            name, tmp = connection.recv()
        except EOFError:
            break
        connection.send(runner.run(name, pathlib.Path(tmp)))
    # Threads of the runtime may hang on a peer that is gone: do not join them.
    os._exit(0)


def _failed(error: BaseException, start: float) -> Outcome:
    text = "".join(traceback.format_exception(error))
    seconds = time.monotonic() - start
    return Outcome(None, text, isinstance(error, AssertionError), seconds)


class Runner:
    """Runs cases on one worker, all under one strategy."""

    def __init__(self, setup_name: str, rank: int, flavor: str):
        from tests.harness import registry, strategies

        self.setup = BY_NAME[setup_name]
        self.rank = rank
        self.flavor = flavor
        strategies.configure_devices(self.setup, flavor)
        self.strategy = strategies.make_strategy(self.setup, flavor)
        self.cases = registry.load_cases()
        # What is imported stays: collecting garbage between cases gets cheap.
        gc.freeze()

    def run(self, name: str, tmp: pathlib.Path) -> Outcome:
        """Runs one case from a clean session and the same seed everywhere."""
        import keras

        from tests.harness.env import Env

        print(f"--- {name}", flush=True)
        env = Env(self.setup, self.rank, self.strategy, tmp, self.flavor)
        start, cpu_start = time.monotonic(), time.process_time()
        try:
            case = self.cases[name]
            keras.backend.clear_session()
            if not case.fresh:
                keras.utils.set_random_seed(1234)
            results = flatten_results(case.function(env))
            seconds = time.monotonic() - start
            cpu_seconds = time.process_time() - cpu_start
            return Outcome(results, seconds=seconds, cpu_seconds=cpu_seconds)
        except Exception as error:  # noqa: BLE001 the parent reports it
            traceback.print_exc()
            return _failed(error, start)
