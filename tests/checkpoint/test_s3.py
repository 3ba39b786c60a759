"""Checkpoints and backups on a real server that speaks S3, through s3fs.

They need moto's server and s3fs, which `tools/test_object_store` installs in an
environment of its own.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.checkpoint import interrupted_fit
from tests.checkpoint.test_api import (
    check_nothing_loaded,
    folders,
    holds,
    restore,
    save,
    values,
)
from tests.checkpoint.test_backups import KILLED, TWO_WORKERS, assert_same
from tests.harness.commands import ROOT
from tests.harness.interrupted import run
from tests.harness.tf_config import free_ports
from tfdp.checkpoint import files, object_store
from tfdp.checkpoint.index_file import INDEX_FILE, load_index

s3fs = pytest.importorskip("s3fs", reason="not installed: tools/test_object_store")
pytest.importorskip("moto", reason="not installed: tools/test_object_store")

pytestmark = [pytest.mark.full, pytest.mark.processes]

URL = "s3://runs/latest"


@dataclass(frozen=True)
class Server:
    """A server of this machine, and how it is reached."""

    process: subprocess.Popen
    address: str

    def options(self, **more: Any) -> dict[str, Any]:
        return {"endpoint_url": self.address, "key": "k", "secret": "s", **more}

    def send(self, path: str, data: str) -> None:
        kind = {"Content-Type": "text/plain"}
        request = urllib.request.Request(self.address + path, data.encode(), kind)
        urllib.request.urlopen(request, timeout=10).close()


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    """A server with an empty bucket, of which fsspec knows."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    own = Server(process, f"http://127.0.0.1:{port}")
    try:
        _await(own)
        use(own, monkeypatch)
        s3fs.S3FileSystem(**own.options()).mkdir("runs")
        yield own
    finally:
        process.kill()
        process.wait()
        s3fs.S3FileSystem.clear_instance_cache()


def _await(server: Server) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(server.address, timeout=1).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("the server did not start in 30 s")


def use(server: Server, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Makes fsspec speak to a server, as its configuration does."""
    import fsspec.config

    monkeypatch.setitem(fsspec.config.conf, "s3", server.options(**more))


def names(server: Server) -> list[str]:
    store = s3fs.S3FileSystem(**server.options())
    store.invalidate_cache()
    return sorted(store.find("runs"))


@pytest.fixture
def small_parts(monkeypatch) -> None:
    monkeypatch.setattr(files, "SHARD_BYTES", 300)


def test_it_holds_the_bytes_of_a_local_save_and_no_stray(server, small_parts, tmp_path):
    for seed in (0, 1):
        assert save(values(seed), URL, 3) == [None] * 3
    index = load_index(URL)
    listed = [f"{index.token}/{f.name}" for part in index.shards for f in part.files]
    wanted = [f"runs/latest/{name}" for name in [*listed, INDEX_FILE]]
    assert names(server) == sorted(wanted)
    save(values(1), tmp_path / "local", 3)
    (folder,) = folders(tmp_path / "local")
    store = s3fs.S3FileSystem(**server.options())
    for path in folder.iterdir():
        own = store.cat_file(f"runs/latest/{index.token}/{path.name}")
        assert own == path.read_bytes()
    for count in (1, 2, 4):
        assert holds(values(1), URL, count)


def test_a_bucket_that_is_not_there_is_said_by_all(server):
    replies = save(values(), "s3://none/run")
    assert {type(reply) for reply in replies} == {OSError}
    assert "cannot be written (FileNotFoundError: " in str(replies[0])
    assert "'s3://none/run/data-" in str(replies[0])
    replies, _ = restore(values(), "s3://none/run")
    assert "There is no checkpoint in 's3://none/run'" in str(replies[0])


def test_who_may_not_write_is_told_so_and_the_previous_one_stays(server, monkeypatch):
    import boto3

    save(values(0), URL)
    iam = boto3.client(
        "iam",
        endpoint_url=server.address,
        region_name="us-east-1",
        aws_access_key_id="k",
        aws_secret_access_key="s",
    )
    iam.create_user(UserName="reader")
    allowed = {"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName="reader", PolicyName="read", PolicyDocument=policy)
    pair = iam.create_access_key(UserName="reader")["AccessKey"]
    server.send("/moto-api/reset-auth", "0")  # from now on it asks who it is
    own = {"key": pair["AccessKeyId"], "secret": pair["SecretAccessKey"]}
    use(server, monkeypatch, **own)
    replies = save(values(1), URL)
    assert {type(reply) for reply in replies} == {OSError}
    assert "(PermissionError: " in str(replies[0])
    assert "The save has not changed the previous contents of the directory" in str(
        replies[0]
    )
    assert holds(values(0), URL)


def test_a_server_that_stands_still_is_told_of_and_the_previous_one_stays(
    server, small_parts, monkeypatch
):
    save(values(0), URL)
    with monkeypatch.context() as patch:
        # s3fs gives up by itself on reads only, and not on a PUT.
        patch.setattr(object_store, "_REQUEST_SECONDS", 5.0)
        _stop_at_put(patch, server, signal.SIGSTOP)
        replies = save(values(1), URL, 3)
    server.process.send_signal(signal.SIGCONT)
    assert {type(reply) for reply in replies} == {OSError}
    assert "cannot be written (TimeoutError: no answer in 5 s)" in str(replies[0])
    assert holds(values(0), URL)
    save(values(2), URL)
    assert holds(values(2), URL)
    assert len({name.split("/")[2] for name in names(server)}) == 2


def test_a_server_that_dies_is_told_of(server, small_parts, monkeypatch):
    _stop_at_put(monkeypatch, server, signal.SIGKILL)
    start = time.monotonic()
    replies = save(values(1), URL, 3)
    print(f"said after {time.monotonic() - start:.1f} s: {replies[0]}")
    assert {type(reply) for reply in replies} == {OSError}
    assert "cannot be written (" in str(replies[0])
    replies, workers = restore(values(), URL)
    assert {type(reply) for reply in replies} == {OSError}
    check_nothing_loaded(workers)


def _stop_at_put(monkeypatch: pytest.MonkeyPatch, server: Server, number: int) -> None:
    from tfdp.checkpoint.object_store import ObjectStore

    upload = ObjectStore._upload

    def stop_and_upload(store: ObjectStore, file: str, name: str) -> None:
        if name.startswith("worker-1-2."):
            server.process.send_signal(number)
        upload(store, file, name)

    monkeypatch.setattr(ObjectStore, "_upload", stop_and_upload)


def test_a_worker_that_is_killed_between_two_puts_goes_on_exactly(server, tmp_path):
    environment = {"FSSPEC_S3": json.dumps(server.options())}
    options = {
        "directory": "s3://runs/mine",
        "save_freq": 3,
        "environment": environment,
    }

    def train(**more: Any) -> Any:
        return run(TWO_WORKERS, interrupted_fit.fit, tmp_path, more)

    undisturbed = train()
    killed = train(die_at_put={"backup": "step-9", "rank": 1}, **options)
    assert killed.codes[1] == KILLED, killed.output[-3000:]
    left = names(server)
    assert {name.split("/")[2] for name in left} == {"step-3", "step-6", "step-9"}
    assert not [name for name in left if name.endswith("step-9/index.json")]
    assert_same(train(**options), undisturbed)
    assert names(server) == []


SAVE = """
import sys, keras, tfdp
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
model.compile("adam", "mse")
tfdp.checkpoint.save(model, sys.argv[1])
"""


def test_convert_takes_a_url(server, tmp_path):
    import os

    env = {**os.environ, "FSSPEC_S3": json.dumps(server.options())}
    model = str(tmp_path / "model.keras")
    for command in (["-c", SAVE, URL], ["-m", "tfdp", "convert", URL, model]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=env,
            timeout=120,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "model.keras").stat().st_size > 0
