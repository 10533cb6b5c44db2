"""Text from any machine: enough, reproducible, and an error if there is too little."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.commands import printed, read_lines
from tools.gather_text import main, python_sources


def gather(path: Path, *flags: str) -> list[str]:
    printed(main, "--output", path, *flags)
    return [entry["text"] for entry in read_lines(path)]


def test_this_python_has_eight_megabytes(tmp_path: Path) -> None:
    out = printed(main, "--output", tmp_path / "a.jsonl")
    texts = [entry["text"] for entry in read_lines(tmp_path / "a.jsonl")]
    assert sum(len(text.encode()) for text in texts) >= 8_000_000
    assert Path(json.__file__).read_text(encoding="utf-8") in texts
    assert f"{len(texts):,} files" in out


def test_the_order_is_shuffled_and_reproducible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for number in range(20):
        (library / f"module{number:02d}.py").write_text(f"x = {number}\n")
    (library / "empty.py").write_text("")
    (library / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    flags = ["--min-bytes", "100"]
    first = gather(tmp_path / "a.jsonl", *flags)
    assert first != [f"x = {number}\n" for number in range(20)]
    assert sorted(first) == sorted(f"x = {number}\n" for number in range(20))
    assert gather(tmp_path / "b.jsonl", *flags) == first
    assert gather(tmp_path / "c.jsonl", *flags, "--seed", "1") != first


def test_tests_packages_and_machine_specific_files_are_left_out(tmp_path: Path) -> None:
    wanted = ["a.py", "json/b.py", "testing.py"]
    left_out = ["test/c.py", "json/tests/d.py", "site-packages/e.py", "_sysconfigdata__linux_.py",
                "config-3.11-x/f.py", "notes.txt"]  # fmt: skip
    for name in wanted + left_out:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    assert list(python_sources(tmp_path)) == [tmp_path / name for name in wanted]
