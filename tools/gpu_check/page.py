"""The folder of check_gpu.py: results.json, which later runs extend, and its page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from paro.errors import UserError
from paro.untrusted.schema import Figure, read_json
from tools.shared.output import write_text

RESULTS = "results.json"
PAGE = "README.md"


class _Part(TypedDict):
    """What the page shows of a part."""

    title: str
    passed: bool
    seconds: Figure
    machine: str
    date: str
    commit: str
    lines: list[str]
    pictures: list[str]


def read_results(folder: Path) -> dict[str, Any]:
    """The results of earlier runs in this folder by letter; `UserError` if they are damaged."""
    file = folder / RESULTS
    if not file.exists():
        return {}
    try:
        found: dict[str, Any] = read_json(file, dict[str, _Part])
    except UserError as error:
        raise UserError(f"--out {folder} is damaged, give another folder: {error}") from error
    return found


def write_results(folder: Path, results: Mapping[str, Any], *, rehearsal: bool) -> None:
    ordered = {letter: results[letter] for letter in sorted(results)}
    write_text(folder / RESULTS, json.dumps(ordered, indent=1) + "\n")
    write_text(folder / PAGE, page(ordered, rehearsal=rehearsal))


def page(results: Mapping[str, Any], *, rehearsal: bool) -> str:
    """Markdown: a table of the parts, then what each of them found."""
    lines = ["# Rehearsal on a machine without a GPU" if rehearsal else "# GPU check", ""]
    if rehearsal:
        lines += ["Small shapes on CPU ranks: no figure here says anything about a GPU.", ""]
    lines += ["| part | | passed | seconds | machine | date | commit |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for letter, part in results.items():
        cells = (part[key] for key in ("machine", "date", "commit"))
        passed = "yes" if part["passed"] else "**no**"
        row = (letter, part["title"], passed, f"{part['seconds']:.0f}", *cells)
        lines.append(f"| {' | '.join(row)} |")
    for letter, part in results.items():
        lines += ["", f"## {letter}. {part['title']}", "", "```text", *part["lines"], "```"]
        lines += [f"\n![{part['title']}]({picture})" for picture in part["pictures"]]
    return "\n".join(lines) + "\n"
