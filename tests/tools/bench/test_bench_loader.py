"""The benchmark of the loader: all contenders read the same, and every figure is printed."""

import re
from pathlib import Path

import pytest

from tests.helpers.commands import measured
from tools.bench import bench_loader
from tools.bench.bench_loader import BLOCKS, main, make_corpus


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_loader, "WRITTEN_AT_ONCE", 2**16)
    # A collection takes long among all that the test process has imported.
    monkeypatch.setattr(bench_loader.gc, "collect", lambda: 0)


def test_all_contenders_read_the_same(tmp_path: Path) -> None:
    opened = {name: contender() for name, contender in make_corpus(tmp_path, 100_000).items()}
    assert list(opened) == ["mapped", "read", *(f"checked, {size // 1024} KiB" for size in BLOCKS)]
    assert [indexed.has_checksums for indexed in opened.values()] == [False] * 2 + [True] * 5
    for index in (0, 57, len(opened["read"]) - 1):
        parts = {indexed.get(index, 1).tobytes() for indexed in opened.values()}
        assert len(parts) == 1
        parts = {indexed.get(index, 1, 2).tobytes() for indexed in opened.values()}
        assert len(parts) == 1


def test_every_figure_is_printed_and_written(tmp_path: Path) -> None:
    flags = ["--gigabytes", "0.0002", "--seq-length", "64", "--samples", "8", "--rounds", "1"]
    told, found = measured(main, "--folder", tmp_path / "corpus", *flags)
    rows, lines = found["reading"], told.splitlines()
    assert len(rows) == 2 * (2 + len(BLOCKS))
    assert len(lines) == len(rows) + 1
    assert re.fullmatch(r"opened in \d+\.\d ms: (\d+) documents", lines[-1])
    assert found["opening"]["documents"] > 50
    assert 0 < found["opening"]["seconds"] < 1
    assert all(row["tokens_per_second"] > 0 for row in rows)
    for row in rows:
        assert (row["of_mapped"] == 1) is (row["contender"] == "mapped")
