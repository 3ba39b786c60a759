"""`python -m tools.bench models`: shapes of published models, payloads, refusals."""

from __future__ import annotations

import json
import math
import socket

import pytest

from tests.harness.commands import run_python
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tests.harness.timing import wait_until
from tfdp.ground.plans.topology import Topology
from tfdp.launch.cli.main import run_command
from tools.bench.__main__ import bench
from tools.bench.gradients import Settings, measure
from tools.bench.gradients_report import buckets_text, least_seconds
from tools.bench.link_rate import bits_per_second
from tools.bench.meters import tcp_bytes_sent
from tools.bench.published_models import (
    PUBLISHED_MODELS,
    Layer,
    PublishedModel,
    bert_large,
    resnet50,
    vgg16,
)
from tools.bench.report import Figure

CASE_MODULES = ("bench.cases_gradients",)
DEADLINE_SECONDS = 200
PNG = b"\x89PNG\r\n\x1a\n"
TINY = PublishedModel("tiny", "Tiny", 12, (Layer("only", {"kernel": (3, 4)}),))


def test_gradients(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


# Shapes.


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_models_have_their_published_number_of_parameters(name):
    model = PUBLISHED_MODELS[name]()
    assert model.num_parameters == model.published_parameters
    assert model.num_bytes == 4 * sum(map(math.prod, model.shapes.values()))
    assert len(model.shapes) == sum(len(layer.shapes) for layer in model.layers)


def parameters_by_part(model: PublishedModel, *parts: str) -> list[int]:
    """The parameters of the layers whose names begin so, for each part."""
    return [
        sum(x.num_parameters for x in model.layers if x.name.startswith(part))
        for part in parts
    ]


def test_parameters_of_resnet50_by_stage_are_those_of_torchvision():
    stages = [f"conv{number}" for number in range(1, 6)]
    assert parameters_by_part(resnet50(), *stages, "classifier") == [
        *(9408 + 128, 215_808, 1_219_584, 7_098_368, 14_964_736),
        2_049_000,
    ]


def test_parameters_of_vgg16_by_layer_are_those_of_the_paper():
    blocks = [f"block{number}" for number in range(1, 6)]
    assert parameters_by_part(vgg16(), *blocks, "fc1", "fc2", "predictions") == [
        *(38_720, 221_440, 1_475_328, 5_899_776, 7_079_424),
        *(102_764_544, 16_781_312, 4_097_000),
    ]


def test_parameters_of_bert_large_by_part_are_those_of_its_checkpoint():
    blocks = [f"block{number}_" for number in range(24)]
    parts = ("word", "position", "token_type", "embeddings_norm", "pooler")
    assert parameters_by_part(bert_large(), *blocks) == [12_596_224] * 24
    assert parameters_by_part(bert_large(), *parts) == [
        *(31_254_528, 524_288, 2048, 2048),
        1_049_600,
    ]


@pytest.mark.full
def test_shapes_are_those_of_the_models_of_keras():
    import keras

    def shapes_of(network: keras.Model) -> list[tuple[int, ...]]:
        variables = network.trainable_variables
        norms = [x for x in network.layers if "bn" in x.name]
        of_norms = {id(v) for norm in norms for v in norm.trainable_variables}
        # Keras's convolutions of ResNet-50 have biases, those of the paper do not.
        is_resnet = bool(norms)
        return sorted(
            tuple(v.shape)
            for v in variables
            if not is_resnet
            or id(v) in of_norms
            or v.name != "bias"
            or "predictions" in v.path
        )

    network = keras.applications.ResNet50(weights=None)
    assert shapes_of(network) == sorted(resnet50().shapes.values())
    network = keras.applications.VGG16(weights=None, include_top=False)
    top = ("fc1/", "fc2/", "predictions/")
    ours = [s for name, s in vgg16().shapes.items() if not name.startswith(top)]
    assert shapes_of(network) == sorted(ours)


# What is computed.


def test_the_bound_of_a_link_counts_nodes_and_not_replicas():
    assert least_seconds(125_000_000, 2, "1gbit") == 1.0
    assert least_seconds(125_000_000, 4, "500mbit") == 3.0
    assert bits_per_second("1.5mbit") == 1.5e6


def test_buckets_are_told_by_number_and_sizes():
    assert buckets_text([2**20, 3 * 2**19, 2**24]) == "3 buckets of 1 to 16 MB"


def test_a_figure_has_to_meet_both_of_its_goals():
    found = [Figure("f", x, at_least=0.9, at_most=1.1).met for x in (0.8, 1.0, 1.2)]
    assert found == [False, True, False]
    assert Figure("f", 1.0, at_least=0.9, at_most=1.1).goal == "goal 0.9 to 1.1"
    assert Figure("f", 1.0).met is None


def test_bytes_of_tcp_connections_of_this_process_are_counted():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        before = tcp_bytes_sent()
        sender.sendall(bytes(100_000))
        receiver.recv(100_000, socket.MSG_WAITALL)
        wait_until(lambda: tcp_bytes_sent() >= before + 100_000, "all bytes", 10.0)
        sender.sendall(b"x")  # the connection goes on
        assert receiver.recv(1) == b"x"


class Recorder:
    """Stands for the workers, and notes what they are asked for."""

    name = "workers"

    def __init__(self) -> None:
        self.orders: list[str] = []

    def run(self, variant: str, steps: int) -> list:
        self.orders.append(variant)
        if not variant.startswith("count "):
            return [0.25, 0.5]
        return [
            {
                "bucket_bytes": [48],
                "payload_bytes": 24,
                "tcp_bytes": sent,
                "num_wrong": 1,
            }
            for sent in (20, 30)
        ]


def test_algorithms_and_backends_of_a_model_take_turns_and_all_is_counted():
    settings = Settings([TINY], ("ring", "tree"), ("direct", "ring"), 2, 1.0)
    side = Recorder()
    rows, times = measure(settings, side, Topology(((0,), (1,))))
    routes = ["ring/direct", "ring/ring", "tree/direct", "tree/ring"]
    assert list(times) == [f"tiny/{route}" for route in routes]
    assert side.orders[-12:-4] == [*times, *reversed(times)]
    assert side.orders[-4:] == [f"count {name}" for name in times]
    for row in rows:
        assert row.seconds == 0.5
        assert row.payload_ratio == 0.5
        assert row.tcp_bytes == 25
        assert row.num_wrong == 2
        assert row.share_of_link is None
        assert row.busbw_gb_per_second == row.algbw_gb_per_second == 48 / 0.5 / 1e9
    assert settings.routes["tree/direct"] == {
        "algorithm": "tree",
        "backend": "direct",
        "node_size": None,
        "bucket_mb": 1.0,
    }


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("-n 1", "at least 2 replicas"),
        ("-n 2 --models resnet", "'resnet' is not one of"),
        ("-n 2 --algorithms rings", "'rings' is not one of"),
        ("-n 4 --algorithms hierarchical", "--node-size"),
        ("-n 3 --node-size 2 --algorithms ring hierarchical", "nodes of [2, 1]"),
        ("-n 2 --backends nccl", "'nccl' is not one of"),
        ("-n 2 --backends mpi", "without -n of its own. Received: --backends mpi"),
        ("--backends direct mpi", "mpiexec -n 2 python -m tools.bench models"),
        ("-n 2 --bucket-mb 0", "above 0. Received: 0"),
        ("-n 2 --link-rate fast", "such as 200mbit. Received: fast"),
        ("-n 2 --link-rate 0mbit", "such as 200mbit. Received: 0mbit"),
        ("-n 2 --link-rate 1gbit", "all replicas are on one; --node-size"),
        ("-n 2 --blocks 1", "at least 2. Received: 1"),
        ("-n 2 --plot x.png --no-plot", "--plot x.png"),
    ],
)
def test_what_cannot_be_run_is_answered_by_one_sentence(
    capsys, tmp_path, monkeypatch, arguments, said
):
    monkeypatch.chdir(tmp_path)
    for name in ("TF_CONFIG", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as stopped:
        run_command(bench, "tools.bench", ["models", *arguments.split()])
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("tools.bench: error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


# What is measured, for real.


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.slow
def test_gradients_of_resnet50_send_what_a_ring_has_to(tmp_path):
    files = {kind: tmp_path / f"models.{kind}" for kind in ("json", "png")}
    done = run_python(
        *("-m", "tools.bench", "models", "-n", "2", "--models", "resnet50"),
        *("--algorithms", "ring", "--blocks", "2", "--bucket-mb", "8"),
        *("--node-size", "1", "--link-rate", "10gbit"),
        *("--json", str(files["json"]), "--plot", str(files["png"])),
        deadline_seconds=DEADLINE_SECONDS,
    )
    assert done.code == 0, done.output
    assert files["png"].read_bytes().startswith(PNG)
    content = json.loads(files["json"].read_text("utf-8"))
    model_bytes = resnet50().num_bytes
    ring = 2 * (2 - 1) / 2 * model_bytes
    rows = {row["backend"]: row for row in content["rows"]}
    assert list(rows) == ["direct", "ring"]
    for row in rows.values():
        assert row["num_wrong"] == 0
        assert row["payload_bytes"] == pytest.approx(ring, rel=0.1)
        assert sum(row["bucket_bytes"]) == model_bytes
        largest_variable = 4 * 512 * 512 * 9
        assert max(row["bucket_bytes"]) <= max(8 * 2**20, largest_variable)
        share = least_seconds(model_bytes, 2, "10gbit") / row["seconds"]
        assert row["share_of_link"] == pytest.approx(share)
    # What the kernel counts: gRPC sends it all, shared memory only rings a bell.
    assert rows["ring"]["tcp_bytes"] == pytest.approx(ring, rel=0.1)
    assert rows["direct"]["tcp_bytes"] < 0.01 * ring
    assert content["settings"]["link_rate"] == "10gbit"
    layers = content["models"]["resnet50"]["layers"]
    assert sum(layers.values()) == resnet50().num_parameters
    for word in ("resnet50", "/ ideal", "#wrong", "25,557,032 parameters"):
        assert word in done.output
    assert "…" not in done.output  # no cell is cut off
