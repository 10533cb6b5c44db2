"""Counters of interfaces and memory."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
import torch

from paro.report.memory import anonymous_bytes
from tests.helpers.refusals import refused
from tools.shared.meters import MemoryMeter, add_up_sent, sent_bytes, watched_interfaces


def test_the_bytes_that_left_are_read_and_not_those_that_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = SimpleNamespace(bytes_sent=2500, bytes_recv=1000)
    monkeypatch.setattr("psutil.net_io_counters", lambda **_: {"lo": counted, "nic0": counted})
    assert sent_bytes(("nic0",)) == {"nic0": 2500}
    refused(lambda: sent_bytes(("nic7",)), "GLOO_SOCKET_IFNAME ... nic7, ... lo,")


@pytest.mark.parametrize(
    ("names", "watched"),
    [(None, ()), ("", ()), ("lo", ()), ("nic1", ("nic1",)), ("eth0,eth1", ("eth0", "eth1"))],
)
def test_the_loopback_is_no_nic(names: str | None, watched: tuple[str, ...]) -> None:
    assert watched_interfaces(names) == watched


def test_a_nic_that_ranks_share_counts_once() -> None:
    assert add_up_sent([("0", {"nic0": 5}), ("0", {"nic1": 7}), ("1", {"nic0": 11})]) == 23
    # They read it at slightly different times.
    assert add_up_sent([("0", {"nic0": 5}), ("0", {"nic0": 6}), ("1", {"nic0": 11})]) == 17
    assert add_up_sent([("0", {}), ("0", {})]) is None


def test_pages_of_files_and_of_shared_memory_do_not_count() -> None:
    assert anonymous_bytes("5000 700 200 1 0 400 0\n") == 500 * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow("fills memory until it shows")
def test_memory_of_the_warm_up_is_seen_and_that_before_the_start_is_not() -> None:
    before = torch.ones(40_000_000)
    meter = MemoryMeter(torch.device("cpu"))
    meter.start()
    during = torch.ones(20_000_000)
    time.sleep(0.3)
    meter.end_of_warmup()
    del during
    after = torch.ones(60_000_000)
    peak = meter.peak()
    # Up to a few MB that earlier tests used may be freed during the measurement.
    assert 72_000_000 <= peak < 120_000_000
    assert before.numel() + after.numel() == 100_000_000
