"""What `CommunicationOptions` takes, and what it says about the rest."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tfdp.ground.options import CommunicationOptions

NAN, INF = float("nan"), float("inf")
NO_SIZES = [0, 0.0, -1, -0.5, NAN, INF, -INF, True, False, "25", None, [1]]


@pytest.mark.parametrize("value", NO_SIZES)
@pytest.mark.parametrize("name", ["bucket_mb", "first_bucket_mb"])
def test_size_that_is_no_positive_number_is_refused(name: str, value: object):
    with pytest.raises(ValueError, match=f"`{name}` must be .*a size") as caught:
        CommunicationOptions(**{name: value})
    assert str(caught.value).endswith(f"Received: {name}={value!r}")


@pytest.mark.parametrize("value", [v for v in NO_SIZES if v is not None])
def test_timeout_that_is_no_positive_number_is_refused(value: object):
    with pytest.raises(ValueError, match="`timeout_seconds` must be") as caught:
        CommunicationOptions(timeout_seconds=value)
    assert str(caught.value).endswith(f"Received: timeout_seconds={value!r}")


@pytest.mark.parametrize("value", ["star", "", "Ring", None, 1, ["ring"]])
@pytest.mark.parametrize("name", ["algorithm", "backend", "uneven"])
def test_unknown_name_is_refused_and_the_known_ones_listed(name: str, value: object):
    with pytest.raises(ValueError, match=f"`{name}` must be ") as caught:
        CommunicationOptions(**{name: value})
    known = '"join" or "stop"' if name == "uneven" else '"ring"'
    assert known in str(caught.value)
    assert str(caught.value).endswith(f"Received: {name}={value!r}")


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": {"inner": "hierarchical"}},
        {"algorithm": {"inner": "ring", "between": "ring"}},
        {"algorithm": {}},
        {"algorithm": {"inner": "adasum"}},
        {"algorithm": {"inner": "tree", "outer": "adasum"}},
        {"algorithm": "adasum", "compression": "int8"},
        {"algorithm": {"outer": "adasum"}, "compression": {"inner": "int8"}},
        {"compression": "int7"},
        {"compression": {"outer": "fp8"}},
        {"compression": {"everywhere": "bf16"}},
        {"node_size": 0},
        {"node_size": 1.5},
        {"node_size": True},
        {"node_size": -1},
        {"node_size": "2"},
        {"node_size": [2]},
        {"nodes": "ab"},
        {"nodes": 7},
        {"nodes": ["a", ""]},
        {"nodes": ["a", " "]},
        {"nodes": ["a", 1]},
        {"node_size": 2, "nodes": ["a", "b"]},
        {"links": 3.0},
    ],
    ids=str,
)
def test_what_is_wrong_with_levels_and_nodes_is_said(options: dict):
    with pytest.raises(ValueError, match="Received: ") as caught:
        CommunicationOptions(**options)
    name = next(iter(options))
    assert f"`{name}" in str(caught.value)


def test_a_compression_of_both_levels_or_of_one_is_taken_apart():
    assert CommunicationOptions().compression_levels == (None, None)
    both = CommunicationOptions(compression="fp16")
    assert both.compression_levels == ("fp16", "fp16")
    outer_only = CommunicationOptions(compression={"outer": "bf16"})
    assert outer_only.compression_levels == (None, "bf16")


def test_options_are_keyword_only_and_frozen():
    with pytest.raises(TypeError):
        CommunicationOptions(25.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        CommunicationOptions().bucket_mb = 1.0


def test_sizes_are_megabytes_of_two_to_the_twentieth_bytes():
    options = CommunicationOptions(bucket_mb=4, first_bucket_mb=0.5)
    assert options.bucket_bytes == 4 * 2**20
    assert options.first_bucket_bytes == 2**19


def test_first_bucket_is_never_larger_than_the_others():
    options = CommunicationOptions(bucket_mb=0.25)
    assert options.first_bucket_bytes == options.bucket_bytes == 2**18


def test_defaults_are_those_that_are_documented():
    options = CommunicationOptions()
    assert dataclasses.asdict(options) == {
        "bucket_mb": 25.0,
        "first_bucket_mb": 1.0,
        "algorithm": "auto",
        "backend": "auto",
        "interface": None,
        "compression": None,
        "node_size": None,
        "nodes": None,
        "links": None,
        "timeout_seconds": None,
        "uneven": "join",
        "on_loss": "stop",
        "min_workers": 1,
        "backup_workers": 0,
        "sync_batch_norm": False,
        "gathers": "allow",
    }


@pytest.mark.parametrize("value", [-1, 1.5, True, "1"])
def test_wrong_number_of_backup_workers(value):
    with pytest.raises(ValueError, match=f"backup_workers={value!r}"):
        CommunicationOptions(backup_workers=value)


@pytest.mark.parametrize(
    "other",
    [
        {"compression": "bf16"},
        {"algorithm": "tree"},
        {"bucket_mb": "auto"},
        {"on_loss": "continue"},
        {"backend": "mpi"},
    ],
)
def test_backup_workers_refuse_what_needs_all_workers(other: dict):
    with pytest.raises(ValueError, match="`backup_workers` ") as caught:
        CommunicationOptions(backup_workers=1, **other)
    ((name, value),) = other.items()
    assert str(caught.value).endswith(f"backup_workers=1, {name}={value!r}")


@pytest.mark.parametrize("name", ["auto", "nccl", "ring", "direct", "mpi"])
def test_every_backend_that_is_documented_is_taken(name: str):
    assert CommunicationOptions(backend=name).backend == name


@pytest.mark.parametrize("interface", ["", 3, ["eth0"]])
def test_wrong_interface(interface):
    with pytest.raises(ValueError, match=re.escape(f"interface={interface!r}")):
        CommunicationOptions(interface=interface)


def test_buckets_are_tuned_from_the_default_sizes():
    options = CommunicationOptions(bucket_mb="auto")
    default = CommunicationOptions()
    assert options.tunes_buckets
    assert not default.tunes_buckets
    assert options.adapts_buckets
    assert options.bucket_bytes == default.bucket_bytes
    assert options.first_bucket_bytes == default.first_bucket_bytes


@pytest.mark.parametrize("value", ["Auto", "automatic", "25", ""])
def test_another_word_for_a_bucket_size_is_refused(value: str):
    with pytest.raises(
        ValueError, match='must be "auto" or a size in megabytes'
    ) as caught:
        CommunicationOptions(bucket_mb=value)
    assert str(caught.value).endswith(f"Received: bucket_mb={value!r}")


@pytest.mark.parametrize("compression", ["int8", {"outer": "int8"}])
def test_what_is_kept_for_each_bucket_forbids_tuning(compression: object):
    with pytest.raises(ValueError, match="buckets must not change") as caught:
        CommunicationOptions(bucket_mb="auto", compression=compression)
    assert "compression=" in str(caught.value)
    assert CommunicationOptions(bucket_mb="auto", compression="bf16").tunes_buckets
