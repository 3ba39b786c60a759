"""`tfdp.ray` on two nodes: network namespaces, each with a Ray of its own.

They need Ray, which `tools/test_ray` installs in an environment of its own, and root.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.harness.commands import ROOT
from tests.ray import loops
from tools.bench import hosts_bed
from tools.bench.hosts_bed import TwoHosts

pytest.importorskip("ray.train", reason="Ray Train is not installed: tools/test_ray")

pytestmark = [
    pytest.mark.full,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(hosts_bed.missing()), reason=hosts_bed.missing()),
]
PORT = 6379
DEADLINE_SECONDS = 200.0
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
# Each node holds one worker, so that two need both.
START = (
    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1"),
    *("--disable-usage-stats", "--object-store-memory=100000000"),
)


@pytest.fixture
def bed() -> Iterator[TwoHosts]:
    with TwoHosts("1gbit") as bed:
        yield bed


def run_on(bed: TwoHosts, host: int, *command: str) -> str:
    """Run a command on a host to its end."""
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    kept.pop("TF_CONFIG", None)
    own = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **TOKEN}
    done = subprocess.run(
        [*bed.enter(host), *command],
        cwd=ROOT,
        env=kept | own | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.fixture
def session() -> Iterator[str]:
    """Folder of Ray's: its name has to be short enough for the sockets in it."""
    with tempfile.TemporaryDirectory(
        prefix="ray-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        yield folder


def test_workers_on_two_nodes_train_like_one_device(session, bed, tmp_path: Path):
    first, second = bed.addresses
    address = f"{first}:{PORT}"
    head = ("--head", f"--port={PORT}", "--include-dashboard=false")
    own = (f"--temp-dir={session}", f"--node-ip-address={first}")
    run_on(bed, 0, *START, *head, *own)
    run_on(bed, 1, *START, f"--address={address}", f"--node-ip-address={second}")
    script = str(ROOT / "tests" / "ray" / "two_nodes.py")
    run_on(bed, 0, sys.executable, script, address, str(tmp_path))
    notes = (tmp_path / "notes").read_text().splitlines()
    assert sorted(notes) == [f"2 workers, {first}", f"2 workers, {second}"]
    model = loops.build()
    model.fit(
        *loops.data(),
        batch_size=loops.BATCH_SIZE,
        epochs=loops.EPOCHS,
        shuffle=False,
        verbose=0,
    )
    reported = keras.saving.load_model(tmp_path / "model.keras")
    for own, other in zip(reported.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)
    assert min(bed.bytes_sent()) > 10_000
