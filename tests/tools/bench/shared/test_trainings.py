"""Trainings of a study run once, and those that are done stay when one fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from paro.errors import RunError
from tests.helpers.refusals import refused
from tools.bench.shared import trainings
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
