"""The folder of check_gpu.py: results.json, which later runs extend, and its page."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from paro.errors import about
from paro.files.schema import Figure, read_json
from tools.bench.shared.clocks import clock_text
from tools.shared.output import markdown_table, write_json, write_text

RESULTS = "results.json"
PAGE = "README.md"
ARCHIVE = "gpu-check.tar.gz"
UNMEASURED = "not measured"


class _Part(TypedDict):
    """A part of the check as the page shows it."""

    title: str
    passed: bool
    seconds: Figure
    machine: str
    date: str
    commit: str
    lines: list[str]
    pictures: list[str]


def read_results(folder: Path) -> dict[str, Any]:
    """Read the results of earlier runs by letter; `UserError` if they are damaged."""
    file = folder / RESULTS
    if not file.exists():
        return {}
    with about(f"--out {folder} is damaged, give another folder: "):
        found: dict[str, Any] = read_json(file, dict[str, _Part])
    return found


def write_results(folder: Path, results: Mapping[str, Any], *, rehearsal: bool) -> None:
    ordered = {letter: results[letter] for letter in sorted(results)}
    write_json(folder / RESULTS, ordered, is_update=True)
    write_text(folder / PAGE, page(ordered, rehearsal=rehearsal), is_update=True)


def archive(folder: Path) -> Path:
    """Write all files of the folder into one of them."""
    (folder / ARCHIVE).unlink(missing_ok=True)
    made = shutil.make_archive(f"{folder}-all", "gztar", folder)
    return Path(shutil.move(made, folder / ARCHIVE))


def headline(results: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the three figures that matter most, with their goals, as lines of a list."""

    def rows(letters: str) -> dict[str, Any]:
        return {
            row["contender"]: row
            for letter in letters
            for row in results.get(letter, {}).get("figures", {}).get("rows", ())
            if "failure" not in row
        }

    def best(rows_of: Mapping[str, Any], figure: str, *names: str) -> Any:
        there = (rows_of[name] for name in names if name in rows_of)
        return max(there, key=lambda row: row[figure], default={figure: 0.0})

    def speed_of(rows_of: Mapping[str, Any], *names: str) -> float:
        speed: float = best(rows_of, "tokens_per_second", *names)["tokens_per_second"]
        return speed

    bf16, own = ("trainer", "trainer-compiled"), rows("ej")
    fastest = best(own or rows("k"), "mfu", *bf16)
    mfu = f"{fastest['mfu']:.1%}{clock_text(fastest)}" if fastest["mfu"] else UNMEASURED
    both = own if any("fp8" in name for name in own) else rows("p")  # of the same sequences
    speed, fp8 = speed_of(both, *bf16), speed_of(both, "trainer-fp8", "trainer-fp8-compiled")
    engine, plain = (speed_of(own, name) for name in ("trainer", "ours"))
    return (
        f"- MFU of the trainer in bf16: {mfu} (goal 65%)",
        f"- fp8 beside bf16, tokens/s: {f'{fp8 / speed:.2f}' if fp8 and speed else UNMEASURED} "
        "(goal 1.45)",
        "- time of the engine beside a plain loop: "
        f"{f'{plain / engine - 1:+.1%}' if plain and engine else UNMEASURED} (goal at most +2%)",
    )


def page(results: Mapping[str, Any], *, rehearsal: bool) -> str:
    """Return markdown: a table of the parts, then what each of them found."""
    lines = ["# Rehearsal on a machine without a GPU" if rehearsal else "# GPU check", ""]
    lines += [*headline(results), ""]
    if rehearsal:
        lines += ["Small shapes on CPU ranks: no figure here says anything about a GPU.", ""]
    rows = [
        (
            *(letter, part["title"], "yes" if part["passed"] else "**no**"),
            *(f"{part['seconds']:.0f}", part["machine"], part["date"], part["commit"]),
        )
        for letter, part in results.items()
    ]
    lines += markdown_table("part | | passed | seconds | machine | date | commit", rows)
    for letter, part in results.items():
        lines += ["", f"## {letter}. {part['title']}", "", "```text", *part["lines"], "```"]
        lines += [f"\n![{part['title']}]({picture})" for picture in part["pictures"]]
    return "\n".join(lines) + "\n"
