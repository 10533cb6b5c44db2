"""Trainings of a study run once; clocks of a GPU are means over spans of time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from paro.errors import RunError
from tests.helpers.refusals import refused
from tools.bench.shared import trainings
from tools.bench.shared.clocks import CLOCKS, clock_of, clock_text
from tools.bench.shared.trainings import Losses, read_found, run_missing, train

LINE = {"iteration": 2, "lm_loss": 4.0, "tokens_per_second": 1.0, "iteration_time_ms": 1.0}
RECORD = {
    "starts": [],
    "validations": [
        {"iteration": 1, "data_set": "validation set", "lm_loss": 5.0, "bits_per_byte": None},
        {"iteration": 2, "data_set": "validation", "lm_loss": 4.5, "bits_per_byte": None},
    ],
}


def trained(name: str, launch: Sequence[str], flags: Sequence[str], folder: Path) -> Losses:
    """Instead of a training: the name is its loss."""
    if name == "fails":
        raise RunError("fails failed")
    return Losses(loss=[], held_out=[(1, float(name))], seconds=1.0, flags=" ".join(flags))


def test_what_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs.json"
    monkeypatch.setattr(trainings, "train", trained)
    assert run_missing((), {"1": ["--a"]}, file, tmp_path)["1"].last == 1.0
    with pytest.raises(RunError):
        run_missing((), {"1": ["--a"], "2": ["--b"], "fails": [], "3": []}, file, tmp_path)
    assert set(read_found(file)) == {"1", "2"}, "none begins after a failure"
    monkeypatch.delattr(trainings, "train")
    assert set(run_missing((), {"1": ["--a"], "2": ["--b"]}, file, tmp_path)) == {"1", "2"}
    refused(lambda: run_missing((), {"1": ["--c"]}, file, tmp_path), "1 with other flags")
    for damaged in ("{", '{"1": {"loss": 1}}', "[]"):
        file.write_text(damaged)
        refused(lambda: read_found(file), "runs.json")


@pytest.mark.process
def test_a_training_s_losses_are_read(tmp_path: Path) -> None:
    """Here a shell writes them, where a training would."""
    script, folder = tmp_path / "script", tmp_path / "folder"
    script.write_text(
        f"echo '{json.dumps(LINE)}' >$4; echo '{json.dumps(RECORD)}' >$4.run.json\n"
        "echo why; exit $2"
    )
    found = train("run", ("bash", str(script), "-"), ["0"], folder)
    assert (found.loss, found.held_out) == ([(2, 4.0)], [(1, 5.0), (2, 4.5)])
    assert (found.last, found.flags) == (4.5, "0")
    with pytest.raises(RunError, match=r"run failed, .*log says why: why"):
        train("run", ("bash", str(script), "-"), ["3"], folder)


FIRST = datetime(2026, 3, 4, 5, 6, 7, 250_000)
BEGIN = FIRST.timestamp()


def write_clocks(path: Path, *samples: str) -> Path:
    """Writes samples such as "1700, 600.0, 60", one a second from `FIRST` on; the last is cut."""
    times = (FIRST + timedelta(seconds=number) for number in range(len(samples)))
    lines = (
        f"{at:%Y/%m/%d %H:%M:%S}.{at.microsecond // 1000:03d}, {sample}"
        for at, sample in zip(times, samples, strict=True)
    )
    path.write_text("\n".join(lines))
    return path


SAMPLES = ("900, 100.0, 50", "1700, 600.0, 60", "300, 90.0, 60", "1800, 700.0, 60", "9, 9.0, 9", "")


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        (SAMPLES, ", SM clock 1750 MHz, 650 W"),  # neither before, between nor after the spans
        (("900, 100.0, 50", "[N/A], 9, 9", "17"), ", SM clock and power not sampled"),
        ((), ""),
    ],
)
def test_a_clock_is_the_mean_of_the_spans(
    samples: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    spans = [(BEGIN + 0.75, BEGIN + 1.25), (BEGIN + 2.75, BEGIN + 3.0)]
    assert clock_text(clock_of(write_clocks(tmp_path / CLOCKS, *samples), spans)) == told
