"""Curves are compared by iteration with the first; incomparable ones are refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.helpers.commands import measured, write_lines
from tests.helpers.refusals import refused
from tools.compare_curves import main


def write_curve(path: Path, losses: Iterable[tuple[int, float]]) -> str:
    more = {"tokens_per_second": 1.0, "iteration_time_ms": 1.0}
    return str(write_lines(path, *({"iteration": at, "lm_loss": x, **more} for at, x in losses)))


def test_differences_are_relative_to_the_first_run(tmp_path: Path) -> None:
    first = write_curve(tmp_path / "a.jsonl", ((at, 4.0) for at in range(1, 21)))
    # One extra iteration, and one repeated after a restart: its last value counts.
    other = dict.fromkeys(range(1, 22), 4.0) | {2: 4.04, 20: 3.0}
    second = write_curve(tmp_path / "b.jsonl", [*other.items(), (20, 3.9)])
    picture = tmp_path / "curves.png"
    told, figures = measured(main, first, second, "--plot", picture, "--names", "one", "two")
    (distance,) = figures["distances"]
    assert figures["reference"] == "one"
    assert figures["losses"]["two"]["20"] == 3.9
    assert distance["first"] == 0.0
    assert distance["early"] == pytest.approx(0.01)
    assert distance["largest"] == pytest.approx(0.025)
    assert distance["mean"] == pytest.approx((0.01 + 0.025) / 20)
    assert distance["mean_signed"] == pytest.approx((0.01 - 0.025) / 20)
    assert "next to those of one" in told
    assert "2.5e-02" in told
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("names", "said"),
    [(["a"], "nothing to compare"), (["a", "late"], "no iteration in common")],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, names: list[str], said: str) -> None:
    curves = {"a": [(1, 2.0)], "late": [(7, 2.0)]}
    files = [write_curve(tmp_path / f"{name}.jsonl", curves[name]) for name in names]
    refused(lambda: main(files), said)


@pytest.mark.parametrize(
    ("flag", "name"), [("--json", ""), ("--plot", ""), ("--plot", "a.jsonl/x.png")]
)
def test_a_file_that_cannot_be_written_is_the_only_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, name: str
) -> None:
    curve = write_curve(tmp_path / "a.jsonl", [(1, 2.0), (2, 1.0)])
    words = [curve, curve, "--names", "one", "two", flag, str(tmp_path / name)]
    refused(lambda: main(words), str(tmp_path / name))
    assert capsys.readouterr().out == ""
