"""Limits of a process, compared with what a worker opens and starts."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from tfdp.communication.cluster.limits import (
    check_limits,
    lack_of_files,
    limit_for,
    needed_files,
    needed_threads,
)


def allow(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))


def test_a_limit_that_is_too_low_is_named_with_what_is_needed(monkeypatch):
    needed = needed_files(2, one_host=True, connects=True)
    allow(monkeypatch, 24)
    with pytest.raises(ValueError, match="may open 24 files") as caught:
        check_limits(2, one_host=True, connects=True)
    assert "`ulimit -n`" in str(caught.value)
    assert "2 workers" in str(caught.value)
    allow(monkeypatch, len(os.listdir("/dev/fd")) + needed)
    check_limits(2, one_host=True, connects=True)
    allow(monkeypatch, resource.RLIM_INFINITY)
    check_limits(10**6, one_host=True, connects=True)


def test_what_is_needed_grows_with_the_workers_and_with_what_tfdp_opens():
    assert needed_files(1, one_host=True, connects=True) == 0
    for num_workers in (2, 8, 64):
        nccl = needed_files(num_workers, one_host=True, connects=False)
        tcp = needed_files(num_workers, one_host=False, connects=True)
        memory = needed_files(num_workers, one_host=True, connects=True)
        assert nccl < tcp < memory < limit_for(num_workers, connects=True)
        assert memory < needed_files(num_workers + 1, one_host=True, connects=True)


def test_only_a_lack_of_files_is_explained_by_the_limit(monkeypatch):
    allow(monkeypatch, 24)
    for number in (errno.EMFILE, errno.ENFILE):
        text = lack_of_files(OSError(number, os.strerror(number)))
        assert text is not None
        assert "its limit is 24 (`ulimit -n`)" in text
    assert lack_of_files(ConnectionRefusedError(errno.ECONNREFUSED, "no")) is None


def test_a_limit_of_threads_is_named_unless_it_does_not_apply(monkeypatch):
    limits = {resource.RLIMIT_NOFILE: 10**6, resource.RLIMIT_NPROC: 60}
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limits[what], -1))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    check_limits(2, one_host=True, connects=True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match=r"may have 60 threads \(`ulimit -u`\)"):
        check_limits(2, one_host=True, connects=True)
    check_limits(1, one_host=True, connects=True)
    assert needed_threads(connects=True) < needed_threads(connects=False)
    limits[resource.RLIMIT_NPROC] = 10**7
    check_limits(2, one_host=True, connects=True)
