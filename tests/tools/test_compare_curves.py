"""Curves are compared by iteration with the first; incomparable ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.refusals import refused
from tools.compare_curves import main


def write_curve(path: Path, losses: dict[int, float]) -> str:
    lines = [
        {"iteration": at, "lm_loss": loss, "tokens_per_second": 1.0, "iteration_time_ms": 1.0}
        for at, loss in losses.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_differences_are_relative_to_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_curve(tmp_path / "a.jsonl", dict.fromkeys(range(1, 21), 4.0))
    # One extra iteration, and one repeated after a restart: its last value counts.
    other = dict.fromkeys(range(1, 22), 4.0) | {2: 4.04, 20: 3.0}
    second = write_curve(tmp_path / "b.jsonl", other)
    with (tmp_path / "b.jsonl").open("a") as file:
        again = {"iteration": 20, "lm_loss": 3.9, "tokens_per_second": 1, "iteration_time_ms": 1}
        file.write(json.dumps(again) + "\n")
    out, picture = tmp_path / "curves.json", tmp_path / "curves.png"
    main([first, second, "--names", "one", "two", "--json", str(out), "--plot", str(picture)])
    figures = json.loads(out.read_text())
    (distance,) = figures["distances"]
    assert figures["reference"] == "one"
    assert figures["losses"]["two"]["20"] == 3.9
    assert distance["first"] == 0.0
    assert distance["early"] == pytest.approx(0.01)
    assert distance["largest"] == pytest.approx(0.025)
    assert distance["mean"] == pytest.approx((0.01 + 0.025) / 20)
    assert distance["mean_signed"] == pytest.approx((0.01 - 0.025) / 20)
    printed = capsys.readouterr().out
    assert "next to those of one" in printed
    assert "2.5e-02" in printed
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("names", "said"),
    [(["a"], "nothing to compare"), (["a", "late"], "no iteration in common")],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, names: list[str], said: str) -> None:
    curves = {"a": {1: 2.0}, "late": {7: 2.0}}
    files = [write_curve(tmp_path / f"{name}.jsonl", curves[name]) for name in names]
    refused(lambda: main(files), said)
