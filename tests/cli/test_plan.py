"""`tfdp plan`: predictions of real models, and a sentence for what is wrong."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import click
import keras
import pytest

from tests.harness.commands import Finished, run_python
from tests.harness.forks import run_script
from tests.harness.timing import within
from tfdp.ground.links import DEFAULT_LINKS, Link, Links
from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.buckets import Bucket, BucketPlan, Entry
from tfdp.ground.plans.cost_model import predict_seconds
from tfdp.ground.plans.sharding import SHARDINGS, ShardingOptions
from tfdp.ground.plans.topology import Topology
from tfdp.ground.plans.traffic import Algorithm
from tfdp.launch.cli import forecast, main, plan
from tfdp.launch.cli import parameter_types as types
from tfdp.training.compression.algorithm_choice import WireFormat
from tfdp.training.reduction.algorithm_selector import (
    AlgorithmChoice,
    AlgorithmSelector,
)
from tfdp.training.sharding.memory_report import param_group_memory
from tfdp.training.sharding.sharded_state import shard_plan

pytestmark = pytest.mark.slow

DEADLINE_SECONDS = 120
CLUSTER = ("--nodes", "2", "--replicas-per-node", "4")

# A dense model whose buckets are known, one with rows, and files that are none.
MAKE_MODELS = """
import pathlib, sys, zipfile, keras
folder = pathlib.Path(sys.argv[1])
layers = [keras.layers.Dense(512, name=f"d{i}") for i in range(4)]
dense = keras.Sequential([keras.Input((512,)), *layers])
dense.compile("adam", "mse")
dense.save(folder / "dense.keras")
words = [keras.layers.Embedding(50, 8, name="words"), keras.layers.Dense(2)]
keras.Sequential([keras.Input((3,)), *words]).save(folder / "rows.keras")
frozen = keras.Sequential([keras.Input((3,)), keras.layers.ReLU()])
frozen.save(folder / "nothing.keras")
class Own(keras.Model):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.dense = keras.layers.Dense(1)
    def call(self, x):
        return self.dense(x)
own = Own()
own.build((None, 3))
own.save(folder / "own.keras")
code = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x + 1)])
code.save(folder / "code.keras")
(folder / "text.keras").write_text("no model")
zipfile.ZipFile(folder / "zip.keras", "w").writestr("config.json", "{}")
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("models")
    done = run_script(MAKE_MODELS, folder, deadline_seconds=DEADLINE_SECONDS)
    assert done.code == 0, done.errors
    return folder


def run_plan(*arguments: object) -> Finished:
    code = "import sys; from tfdp.launch.cli.main import main; main(sys.argv[1:])"
    return run_script(code, "plan", *arguments, deadline_seconds=DEADLINE_SECONDS)


def plan_in_process(capsys, *arguments: object) -> tuple[int, str, str]:
    """For what is answered before TensorFlow is needed."""
    with pytest.raises(SystemExit) as stopped:
        main.main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    return stopped.value.code, captured.out, captured.err


@pytest.mark.processes
def test_json_holds_the_buckets_of_the_model_and_sums_that_fit(models):
    result = run_plan(
        models / "dense.keras",
        *CLUSTER,
        *("--alpha", "100,200", "--beta", "2,0.1", "--step-ms", "50"),
        *("--algorithm", "hierarchical:ring,tree", "--compression", "outer:bf16"),
        "--json",
    )
    assert result.code == 0, result.errors
    found = json.loads(result.output)
    assert (found["num_nodes"], found["num_replicas"]) == (2, 8)
    assert found["num_bytes"] == 4 * (512 * 512 + 512) * 4
    names = [name for bucket in found["buckets"] for name in bucket["variables"]]
    assert sorted(names) == sorted(f"d{i}/{k}" for i in range(4) for k in _KINDS)
    # The backward pass makes the last layer's gradients first.
    assert names.index("d3/kernel") < names.index("d0/kernel")
    links = dataclasses.replace(
        DEFAULT_LINKS["nccl"],
        inside=Link(1e-4, 0.5e-9),
        across=Link(2e-4, 1e-8),
    )
    topology = Topology((tuple(range(4)), tuple(range(4, 8))))
    shares = {"float32": 1.0, "bfloat16": 0.5}
    for bucket in found["buckets"]:
        assert bucket["algorithm"] == "hierarchical (ring, tree)"
        size = bucket["num_bytes"]
        # A bucket of one bias waits for latency, and is not worth two casts.
        wire_dtype = "bfloat16" if size > 10**4 else "float32"
        assert (bucket["inner_wire"], bucket["outer_wire"]) == (
            "float32",
            wire_dtype,
        )
        for key, algorithm, share in (
            (
                "seconds",
                Algorithm("hierarchical", "ring", "tree"),
                shares[wire_dtype],
            ),
            ("ring_seconds", Algorithm("ring"), 1.0),
        ):
            seconds = predict_seconds(
                algorithm, size, topology, links, outer_ratio=share
            )
            assert bucket[key] == pytest.approx(seconds)
    total = sum(bucket["seconds"] for bucket in found["buckets"])
    assert found["communication_seconds"] == pytest.approx(total)
    assert total > found["exposed_seconds"] >= total - 0.05 * 2 / 3
    step = 0.05 + found["exposed_seconds"]
    assert found["efficiency"] == pytest.approx(0.05 / step)


_KINDS = ("kernel", "bias")


@pytest.mark.full
@pytest.mark.processes
def test_the_table_says_what_it_predicts_and_what_it_assumes(models):
    result = run_plan(
        *(models / "rows.keras", "--nodes", 64, "--replicas-per-node", 8),
        *("--step-ms", 10, "--overlap", 0.5),
    )
    assert result.code == 0, result.errors
    for words in (
        "on 512 replicas (64 nodes of 8)",
        "scaling efficiency",
        "communication",
        "by the flat ring alone",
        "Assumed",
        "default for nccl, not measured",
        "over the last 50 % of the step's compute",
        "Rows of sparse gradients are left out: words/embeddings.",
        "weak scaling",
    ):
        assert words in result.output, result.output


@pytest.mark.full
@pytest.mark.processes
def test_adasum_between_nodes_makes_rows_dense_as_in_training(models):
    algorithm = ("--algorithm", "hierarchical:ring,adasum")
    nodes = ("--nodes", 2, "--replicas-per-node", 2)
    result = run_plan(models / "rows.keras", *nodes, *algorithm)
    assert result.code == 0, result.errors
    assert "Rows of sparse gradients" not in result.output


@pytest.mark.processes
def test_sums_of_micro_batches_are_planned_as_dense(models):
    result = run_plan(models / "rows.keras", *CLUSTER, "--accumulates", "--json")
    assert result.code == 0, result.errors
    found = json.loads(result.output)
    assert found["sparse"] == []
    assert found["num_bytes"] == 4 * (50 * 8 + 8 * 2 + 2)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text.keras", "The file is not a saved Keras model"),
        ("zip.keras", "Keras cannot load the model ("),
        ("own.keras", "(Could not locate class 'Own'); for a model with custom"),
        ("code.keras", "`Lambda` layer whose `function` is a Python lambda)"),
        ("nothing.keras", "The model has no variables to train."),
    ],
)
def test_a_model_that_cannot_be_planned_gets_one_sentence(models, name, words):
    result = run_plan(models / name, *CLUSTER)
    assert (result.code, result.output) == (2, "")
    (line,) = [li for li in result.errors.splitlines() if li.startswith("tfdp: error")]
    assert words in line
    assert f"Received: {models / name}" in line
    assert "Traceback" not in result.errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nodes", "0"), "whole number of at least 1. Received: 0"),
        (("--nodes", "-3"), "Received: -3"),
        (("--nodes", "1.5"), "Received: 1.5"),
        (("--replicas-per-node", "0"), "Received: 0"),
        (("--nodes", str(10**9)), "at most 1,048,576 replicas"),
        (("--alpha", "-1"), "not negative. Received: -1"),
        (("--alpha", "5,"), "Received: 5,"),
        (("--alpha", "1,2,3"), "Received: 1,2,3"),
        (("--beta", "0"), "above 0. Received: 0"),
        (("--beta", "10,-1"), "Received: 10,-1"),
        (("--beta", "nan"), "Received: nan"),
        (("--beta", "1e-320"), "at least 0.000000001. Received: 1e-320"),
        (("--step-ms", "0"), "above 0. Received: 0"),
        (("--step-ms", "fast"), "Received: fast"),
        (("--step-ms", "5", "--overlap", "1.5"), "from 0 to 1. Received: 1.5"),
        (("--overlap", "0.5"), "--step-ms"),
        (("--algorithm", "star"), "Received: star"),
        (("--algorithm", "ring:tree,ring"), "Received: ring:tree,ring"),
        (("--algorithm", "hierarchical:star"), "Received: hierarchical:star"),
        (
            ("--algorithm", "adasum", "--compression", "int8"),
            '`algorithm="adasum"` does not support compressors',
        ),
        (
            ("--algorithm", "hierarchical:tree,adasum"),
            "Received: hierarchical:tree,adasum",
        ),
        (("--compression", "int7"), "int7"),
        (("--bucket-mb", "-2"), "Received: -2"),
        (("--bucket-mb", "1e308"), "at most 1,000,000,000. Received: 1e308"),
        (("--step-ms", "1e-320"), "at least 0.000000001. Received: 1e-320"),
        (("--alpha", "1,1e300"), "at most 1,000,000,000. Received: 1,1e300"),
        (("--nodes", "9" * 4000), "at most 1,000,000,000. Received: 999"),
        (("--nodes", "9" * 5000), "whole number of at least 1. Received: 999"),
        (("--overlap", "9" * 5000), "a number from 0 to 1. Received: 999"),
        (("--backend", "smoke"), "smoke"),
        ((), "There is no such file; give the path of a saved model."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_argument_gets_one_sentence_and_code_2(capsys, arguments, words):
    with within(10):
        values = {"--nodes": "2", "--replicas-per-node": "2"}
        values.update(zip(arguments[::2], arguments[1::2], strict=True))
        flat = [text for pair in values.items() for text in pair]
        code, out, err = plan_in_process(capsys, "nowhere.keras", *flat)
        assert (code, out) == (2, "")
        assert err.startswith("tfdp: error: ")
        assert err.count("\n") == 1
        assert words in err
        assert len(err) < 500


@pytest.mark.processes
def test_a_wrong_argument_is_told_before_tensorflow_is_imported():
    code = "import sys, tfdp.launch.cli.plan; print('tensorflow' in sys.modules)"
    done = run_python("-c", code, deadline_seconds=DEADLINE_SECONDS)
    assert (done.code, done.output.strip()) == (0, "False")


@pytest.mark.parametrize(
    "arguments", [(), ("m.keras",), ("m.keras", "--nodes", "2")], ids=len
)
def test_what_is_missing_is_named(capsys, arguments):
    code, out, err = plan_in_process(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "Missing" in err


LINKS = Links(Link(1e-5, 0.0), Link(1e-4, 1e-9))


def cluster(num_nodes, node_size):
    ranks = range(0, num_nodes * node_size, node_size)
    return Topology(tuple(tuple(range(r, r + node_size)) for r in ranks))


def bucket_of(count, dtype="float32", itemsize=4):
    return Bucket((0,), (Entry("w", (count,), dtype, itemsize),), dtype)


def route_of(bucket, topology, **options):
    algorithm_selector = AlgorithmSelector(
        CommunicationOptions(links=LINKS, **options), topology, "nccl"
    )
    return algorithm_selector.select(bucket.num_bytes, bucket.dtype)


def forecast_of(num_nodes, node_size, **changes):
    topology = cluster(num_nodes, node_size)
    bucket = bucket_of(10**6)
    fields = {
        "model": "m.keras",
        "buckets": (bucket,),
        "sparse": (),
        "topology": topology,
        "links": LINKS,
        "backend": "nccl",
        "is_given": True,
        "compression": "none",
        "routes": (route_of(bucket, topology),),
        "ring": (route_of(bucket, topology, algorithm="ring"),),
        "warned": (),
        "compute_seconds": None,
        "overlap": 0.5,
        **changes,
    }
    return forecast.Forecast(**fields)


def test_without_the_time_of_a_step_efficiency_is_left_open(capsys):
    forecast.show(forecast_of(2, 2), as_json=False)
    output = capsys.readouterr().out
    assert "unknown: give the time of a step by --step-ms" in output
    assert "weak scaling" not in output
    forecast.show(forecast_of(2, 2), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["efficiency"] is None
    assert found["communication_seconds"] > 0


def test_a_free_link_is_shown_as_one(capsys):
    forecast.show(forecast_of(2, 2), as_json=False)
    output = capsys.readouterr().out
    assert "10 us whatever its size" in output
    assert "100 us and its bytes at 1 GB/s" in output
    assert "(as given)" in output


def test_one_replica_needs_no_communication_and_is_fully_efficient(capsys):
    forecast.show(forecast_of(1, 1, compute_seconds=0.1), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["communication_seconds"], found["efficiency"]) == (0, 1)


def test_hierarchical_with_one_replica_a_node_is_said_to_be_flat(capsys):
    flat = forecast_of(4, 1)
    route = route_of(flat.buckets[0], flat.topology, algorithm="hierarchical")
    assert route.seconds == pytest.approx(flat.ring[0].seconds)
    forecast.show(forecast_of(4, 1, routes=(route,)), as_json=False)
    assert "hierarchical works as a flat algorithm" in capsys.readouterr().out


def test_the_table_shows_what_travels(capsys):
    route = AlgorithmChoice(
        Algorithm("hierarchical"), outer=WireFormat(dtype_name="bfloat16")
    )
    forecast.show(forecast_of(2, 2, routes=(route,)), as_json=False)
    output = capsys.readouterr().out  # the cell may be broken over lines
    assert "hierarchical (ring, ring)," in output
    assert "bfloat16 across nodes" in output


@pytest.mark.parametrize(
    ("algorithm", "option"),
    [
        ("auto", "auto"),
        ("tree", "tree"),
        ("adasum", "adasum"),
        ("hierarchical", {"inner": "ring", "outer": "ring"}),
        ("hierarchical:tree,ring", {"inner": "tree", "outer": "ring"}),
    ],
)
def test_an_algorithm_becomes_the_option_of_the_same_name(algorithm, option):
    assert types.ALGORITHM.convert(algorithm, None, None) == option


@pytest.mark.parametrize(
    ("compression", "option", "levels"),
    [
        ("none", None, (None, None)),
        ("fp16", "fp16", ("fp16", "fp16")),
        ("outer:bf16", {"outer": "bf16"}, (None, "bf16")),
        ("outer:int8", {"outer": "int8"}, (None, "int8")),
    ],
)
def test_a_compression_becomes_the_option_of_the_same_name(compression, option, levels):
    assert plan.compression_option(compression) == option
    assert CommunicationOptions(compression=option).compression_levels == levels


@pytest.mark.parametrize("nodes", [(1, 1), (1, 8), (2, 4), (64, 8)])
@pytest.mark.parametrize("compression", [None, "bf16", {"outer": "fp16"}, "int8"])
def test_what_is_planned_is_what_training_routes(nodes, compression):
    topology = cluster(*nodes)
    buckets = [bucket_of(count) for count in (1, 1000, 10**7)]
    buckets += [bucket_of(10**6, "bfloat16", 2), bucket_of(10**6, "float64", 8)]
    options = CommunicationOptions(compression=compression, links=LINKS)
    found, _ = plan.routes_of(BucketPlan(tuple(buckets)), options, topology, "nccl")
    algorithm_selector = AlgorithmSelector(options, topology, "nccl", warn=False)
    # Links are known, so nothing that training may take is left out.
    assert algorithm_selector.are_links_known
    assert list(found) == [
        algorithm_selector.select(b.num_bytes, b.dtype) for b in buckets
    ]


def test_a_bucket_that_gains_little_is_planned_as_it_is():
    # Of one element the latency counts, of many the bytes.
    few, many = (
        route_of(bucket_of(count), cluster(2, 1), compression="bf16")
        for count in (1, 10**8)
    )
    assert (few.inner.name, many.inner.name) == (None, "bfloat16")


def test_what_has_no_effect_is_told_in_the_assumptions(capsys):
    options = CommunicationOptions(
        links=LINKS, algorithm="hierarchical", compression={"outer": "bf16"}
    )
    buckets = BucketPlan((bucket_of(10**6),))
    routes, warned = plan.routes_of(buckets, options, cluster(1, 4), "nccl")
    assert str(routes[0]) == "ring"
    forecast.show(forecast_of(1, 4, routes=routes, warned=warned), as_json=False)
    assert (
        "falls back to 'ring': all replicas are on one node" in capsys.readouterr().out
    )


@pytest.fixture(scope="module")
def small_model() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])


def test_owners_of_nothing_change_no_memory_and_take_no_time(small_model):
    options, variables = CommunicationOptions(), small_model.trainable_variables
    muon = keras.optimizers.Muon()
    with within(10):
        few, many = (
            plan._predict_memory(small_model, "muon", cluster(1, count), options, True)
            for count in (8, 2**16)
        )
    assert few == many
    for stage, (_, memory) in enumerate(few):
        found = param_group_memory(
            muon,
            variables,
            shard_plan(muon, variables, 8, options) if stage else None,
            accumulates=True,
            sharding=ShardingOptions(SHARDINGS[stage]),
        )
        assert dataclasses.replace(memory, gathered=0) == found


@pytest.mark.parametrize("name", ["LossScaleOptimizer", "optimizer"])
def test_an_optimizer_that_no_name_makes_gets_one_sentence(small_model, name):
    with pytest.raises(click.UsageError, match=f"such as adam. Received: {name}"):
        plan._predict_memory(
            small_model, name, cluster(1, 2), CommunicationOptions(), False
        )
