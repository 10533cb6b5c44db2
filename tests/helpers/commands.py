"""Runs the `main` of a command in this process, and files of JSON lines that commands read."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def output_of(run: Callable[[], object]) -> str:
    """What a call prints on standard output."""
    with redirect_stdout(StringIO()) as out:
        run()
    return out.getvalue()


def printed(main: Callable[[list[str]], object], *words: object) -> str:
    """What it prints on standard output; it must succeed."""
    with redirect_stdout(StringIO()) as out:
        status = main([*map(str, words)])
    assert not status, f"it ended with {status}"
    return out.getvalue()


def measured(main: Callable[[list[str]], object], *words: object) -> tuple[str, Any]:
    """What it prints, and what it writes with --json, its only file there."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        told = printed(main, *words, "--json", file)
        assert [*Path(folder).iterdir()] == [file]
        return told, json.loads(file.read_text(encoding="utf-8"))


def write_lines(path: Path, *entries: object) -> Path:
    """A file with a line of JSON for each entry."""
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def read_lines(path: Path) -> list[Any]:
    """The entry of each line of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
