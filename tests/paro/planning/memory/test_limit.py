"""The usable memory of a device."""

from __future__ import annotations

from dataclasses import replace

from tests.paro.planning.cases import DEVICE, machine, workload


def test_of_a_device_nine_tenths_can_be_used_or_what_is_not_reserved() -> None:
    assert workload(memory_bytes=40 * 10**9).limit.usable_bytes == 36 * 10**9
    assert workload().limit.describe() == "72.0 GB that can be used of 80 GB"
    full = machine(device=replace(DEVICE, reserved_bytes=15 * 10**9))
    assert workload(machine=full).limit.usable_bytes == 65 * 10**9
    assert workload(machine=full, memory_bytes=40 * 10**9).limit.usable_bytes == 36 * 10**9
