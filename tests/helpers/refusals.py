"""Commands that run in this process: what they print and read, and asserts that they refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any

from paro.errors import RunError, UserError

_PRINTED = re.compile(r"\A[\w.-]+: error: (.+)\n\Z")  # a worker of pytest is called -c


def refused(run: Callable[[], object] | CompletedProcess[str], *parts: str, status: int = 2) -> str:
    """The one line with which `run` is refused, without the name of the program.

    `run` is a call that raises `UserError` (status 2) or `RunError` (status 1), the `main` of a
    command, which prints the line and ends with the status, or a process that has ended. The line
    has all `parts`: the flag with its value or the file, and the remedy, not the sentence.
    "--a 1 ... --b" asks for both in this order. A flag, word or number is met as a whole:
    "--lr" is not in "--lr-decay-iters 5", and "--lr-decay-iters 5" not in "--lr-decay-iters 50".
    """
    return says(_line_of(run, status), *parts)


def says(line: str, *parts: str) -> str:
    """The line itself, which has all `parts`, as in `refused`; also for notices."""
    for text in parts:
        pattern = ".*".join(map(_whole, text.split("...")))
        assert re.search(pattern, line), f"{text!r} is not in {line}"
    return line


def _line_of(run: Callable[[], object] | CompletedProcess[str], status: int) -> str:
    if isinstance(run, CompletedProcess):
        return _printed(run.returncode, run.stderr, status)
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            ended = run()
    except (UserError, RunError) as error:
        line, ended = str(error), 2 if isinstance(error, UserError) else 1
        return _printed(ended, f"raised: error: {line}\n", status)
    except SystemExit as left:
        ended = left.code
    return _printed(ended, errors.getvalue(), status)


def _printed(ended: object, text: str, status: int) -> str:
    assert ended == status, f"it ended with {ended}, not {status}: {text or 'nothing is message'}"
    line = _PRINTED.match(text)
    assert line, f"this is not one line with a mistake: {text}"
    return line[1]


def _whole(text: str) -> str:
    """A pattern of a text that ends where its last flag, word or number does."""
    text = text.strip()
    *_, last = text.split() or [""]
    end = r"(?![\w-])" if last.startswith("-") else r"(?!\w)" if last[-1:].isalnum() else ""
    return re.escape(text) + end


def output_of(run: Callable[[], object]) -> str:
    """Returns what a call prints on standard output."""
    with redirect_stdout(StringIO()) as out:
        run()
    return out.getvalue()


def printed(main: Callable[[list[str]], object], *words: object) -> str:
    """Returns what a script prints on standard output; it must succeed."""
    with redirect_stdout(StringIO()) as out:
        status = main([*map(str, words)])
    assert not status, f"it ended with {status}"
    return out.getvalue()


def measured(main: Callable[[list[str]], object], *words: object) -> tuple[str, Any]:
    """Returns what a script prints, and what it writes with --json, its only file there."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        message = printed(main, *words, "--json", file)
        assert [*Path(folder).iterdir()] == [file]
        return message, json.loads(file.read_text(encoding="utf-8"))


def write_lines(path: Path, *entries: object) -> Path:
    """A file with a line of JSON for each entry."""
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def read_lines(path: Path) -> list[Any]:
    """The entry of each line of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
