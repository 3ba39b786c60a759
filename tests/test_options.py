"""What `CommunicationOptions` takes, and what it says about the rest."""

from __future__ import annotations

import dataclasses

import pytest

from tfdp.options import CommunicationOptions

NAN, INF = float("nan"), float("inf")
NO_SIZES = [0, 0.0, -1, -0.5, NAN, INF, -INF, True, False, "25", None, [1]]


@pytest.mark.parametrize("value", NO_SIZES)
@pytest.mark.parametrize("name", ["bucket_mb", "first_bucket_mb"])
def test_size_that_is_no_positive_number_is_refused(name: str, value: object):
    with pytest.raises(ValueError, match=f"`{name}` must be a size") as caught:
        CommunicationOptions(**{name: value})
    assert str(caught.value).endswith(f"Received: {name}={value!r}")


@pytest.mark.parametrize("value", [v for v in NO_SIZES if v is not None])
def test_timeout_that_is_no_positive_number_is_refused(value: object):
    with pytest.raises(ValueError, match="`timeout_seconds` must be") as caught:
        CommunicationOptions(timeout_seconds=value)
    assert str(caught.value).endswith(f"Received: timeout_seconds={value!r}")


@pytest.mark.parametrize("value", ["star", "", "Ring", None, 1, ["ring"]])
@pytest.mark.parametrize("name", ["algorithm", "backend"])
def test_unknown_name_is_refused_and_the_known_ones_listed(name: str, value: object):
    with pytest.raises(ValueError, match="must be one of") as caught:
        CommunicationOptions(**{name: value})
    assert '"ring"' in str(caught.value)
    assert str(caught.value).endswith(f"Received: {name}={value!r}")


@pytest.mark.parametrize("value", ["hierarchical", "halving_doubling", "tree"])
def test_algorithm_that_comes_later_is_refused_as_such(value: str):
    with pytest.raises(ValueError, match="not there yet") as caught:
        CommunicationOptions(algorithm=value)
    assert str(caught.value).endswith(f"Received: algorithm={value!r}")


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
        "timeout_seconds": None,
    }


@pytest.mark.parametrize("name", ["auto", "nccl", "ring"])
def test_every_backend_that_is_documented_is_taken(name: str):
    assert CommunicationOptions(backend=name).backend == name
