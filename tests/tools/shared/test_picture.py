"""Figures show texts of users and files as they are, and numbers of logarithms without formulas."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

from tests.helpers.house import ROOT
from tools.shared.picture import drawing, label_of, log_scale


@pytest.fixture(autouse=True)
def text_stays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """An SVG holds its texts as such, and not as shapes of letters."""
    from matplotlib import rcParams  # takes long to import, for every worker

    monkeypatch.setitem(rcParams, "svg.fonttype", "none")


def texts_of(path: Path) -> list[str]:
    return [unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", path.read_text())]


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    names = ["a$b$c", r"$\frac{$", r"\alpha", "5 $ and 6 $", "{x}", "%s", "_hidden"]
    names += ["x" * 2000, "<&>"]
    path = tmp_path / "names.svg"
    with drawing(path, 1, 2, size=(12, 6)) as (figure, (curves, bars)):
        for name in names:
            curves.plot([1, 2], [3, 4], label=label_of(name))
        curves.legend()
        curves.set_title(names[0])
        bars.set_yticks(range(len(names)), list(map(label_of, names)))
        figure.suptitle(names[1])
        bars.annotate(names[2], (0, 0))
    drawn = [text.strip() for text in texts_of(path)]
    for name in names[:7]:
        assert drawn.count(name) >= 2, f"{name}: {drawn}"
    for name in names[:3]:
        assert drawn.count(name) == 3, f"{name}: {drawn}"
    assert max(map(len, drawn)) < 100


def test_numbers_of_logarithms_are_plain(tmp_path: Path) -> None:
    path = tmp_path / "log.svg"
    with drawing(path, 1, 2, size=(8, 4)) as (_, (wide, narrow)):
        for panel, largest in ((wide, 1e9), (narrow, 4.0)):
            panel.plot([1.0, largest], [1.0, largest])
            log_scale(panel.xaxis, panel.yaxis)
    drawn = texts_of(path)
    assert {"1", "1e+06", "3"} <= set(drawn)
    assert not [text for text in drawn if "$" in text or "math" in text]


def test_all_axes_of_logarithms_have_plain_numbers() -> None:
    files = [path for path in (ROOT / "tools").rglob("*.py") if path.name != "picture.py"]
    axes = re.compile(r'scale\W{1,2}"log"|loglog|semilog')
    assert len(files) > 50
    assert not [path for path in files if axes.search(path.read_text())], "log_scale makes them"
