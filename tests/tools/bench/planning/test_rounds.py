"""Medians over rounds, of rows and of machine files."""

from __future__ import annotations

from dataclasses import replace

from paro.collectives.schedule import Op
from paro.machine.machine import Measured
from paro.topology import Axes
from tests.paro.planning.cases import DEVICE, machine, speed
from tools.bench.planning.rounds import median_machine, median_row


def test_a_row_is_the_median_of_its_rounds_and_the_largest_peak() -> None:
    rounds = [
        {"setting": "IIG@native", "seconds": x, "peak_in_use": peak, "exposed": {"gather": 10 * x}}
        for x, peak in ((3.0, None), (1.0, 9), (2.0, 7))
    ]
    found = median_row(rounds)
    assert (found["setting"], found["seconds"]) == ("IIG@native", 2.0)
    assert found["peak_in_use"] == 9
    assert median_row(rounds[:1])["peak_in_use"] is None
    assert found["exposed"] == {"gather": 20.0}


def timed(num_bytes: int, seconds: float) -> Measured:
    what = {"axes": Axes.INTRA, "op": Op.ALL_GATHER, "algorithm": "native", "bytes": num_bytes}
    return Measured(**what, seconds=seconds, cpu_seconds=2 * seconds)


def test_a_machine_is_the_median_of_its_files() -> None:
    rounds = []
    for factor in (1.0, 3.0, 2.0):
        device = replace(DEVICE, sustained_flops=factor * 1e12, piece_seconds=factor)
        if factor > 1:
            device = replace(device, attention_flops=factor * 1e12)
        measured = (timed(64, factor), *[timed(128, 1.0)] * (factor < 3))
        rounds.append(machine(inter=10 * factor, device=device, measured=measured))
    found = median_machine(rounds)
    assert found.measured == (timed(64, 2.0),)  # values that one of the files lacks are left out
    assert found.inter == speed(20)
    assert (found.device.sustained_flops, found.device.piece_seconds) == (2e12, 2.0)
    assert found.device.attention_flops == 2.5e12  # of the files that have it
    assert median_machine(rounds[:1]) == rounds[0]
