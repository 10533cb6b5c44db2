"""The page: one HTML file with everything inside, for light mode, dark mode and paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape

from paro.arguments.parser import spelled
from paro.errors import count_text
from tools.run_report.charts import BITS, NAMED, SERIES, as_svg, charts_of
from tools.run_report.runs import Run, differences


def _variables(dark: int) -> str:
    named = {**NAMED, "paper": ("#f5f7f9", "#12171d"), "card": ("#ffffff", "#1b222b")}
    return " ".join(f"--{name}: {colours[dark]};" for name, colours in named.items())


def _style() -> str:
    """Return the colours of both modes as variables, and the layout."""
    return f"""
:root {{ color-scheme: light dark; {_variables(0)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; padding: 2rem 1.25rem 3rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }}
main {{ max-width: 1180px; margin: 0 auto; }}
h1 {{ font-size: 1.6rem; margin: 0; letter-spacing: -0.01em; }}
h2 {{ font-size: 1.1rem; margin: 2.2rem 0 0.8rem; }}
h3 {{ font-size: 0.95rem; margin: 0; }}
.lead, .note, caption {{ color: var(--muted); }}
.lead {{ margin: 0.2rem 0 1rem; }}
.note {{ margin: 0.1rem 0 0.5rem; font-size: 0.85rem; }}
.runs {{ display: flex; flex-wrap: wrap; gap: 0.4rem 1.2rem; margin: 0; padding: 0;
  list-style: none; font-weight: 600; }}
.chip {{ display: inline-block; width: 0.8em; height: 0.8em; border-radius: 0.2em;
  margin-right: 0.45em; vertical-align: -0.05em; }}
.again {{ background-image: linear-gradient(90deg, transparent 35%, var(--card) 35% 65%,
  transparent 65%); }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr));
  gap: 1rem; }}
figure {{ margin: 0; padding: 0.9rem 1rem 0.6rem; background: var(--card);
  border: 1px solid var(--grid); border-radius: 8px; min-width: 0; }}
figure.wide {{ grid-column: 1 / -1; }}
svg {{ display: block; width: 100%; height: auto; }}
.table {{ overflow-x: auto; background: var(--card); border: 1px solid var(--grid);
  border-radius: 8px; }}
table {{ border-collapse: collapse; width: 100%; font-size: 0.88rem; }}
th, td {{ padding: 0.45rem 0.8rem; text-align: right; border-bottom: 1px solid var(--grid);
  font-variant-numeric: tabular-nums; }}
th {{ font-weight: 600; vertical-align: bottom; }}
th:first-child, td:first-child {{ text-align: left; }}
table.text td, table.text th {{ text-align: left; vertical-align: top; overflow-wrap: anywhere; }}
td:first-child {{ white-space: nowrap; }}
tr:last-child td {{ border-bottom: 0; }}
thead th {{ color: var(--muted); }}
code {{ font: 0.92em ui-monospace, "SF Mono", Menlo, monospace; }}
.warning {{ color: var(--c1); font-weight: 600; }}
details {{ margin-top: 0.8rem; }}
summary {{ cursor: pointer; color: var(--muted); }}
@media screen and (max-width: 760px) {{
  figure.wide {{ overflow-x: auto; }}
  figure.wide svg {{ width: 760px; }}
}}
"""


def _paper_style() -> str:
    """Return the style on paper: light colours, smaller, nothing cut off."""
    return f"""
@media print {{
  @page {{ margin: 14mm; }}
  :root {{ color-scheme: light; {_variables(0)} --paper: #ffffff; }}
  html {{ font-size: 11px; }}
  body {{ padding: 0; font-size: 11px; }}
  .charts {{ grid-template-columns: 1fr 1fr; }}
  .table {{ overflow: visible; }}
  th, td {{ padding: 0.3rem 0.45rem; }}
  figure, .table, tr {{ break-inside: avoid; }}
  h2 {{ break-after: avoid; }}
  * {{ print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
}}
"""


def page(runs: Sequence[Run], title: str) -> str:
    """Return the whole page."""
    legend = "".join(f"<li>{_chip(index)}{escape(run.name)}</li>" for index, run in enumerate(runs))
    charts = "".join(
        f'<figure id="{chart.name}"{" class=wide" if chart.wide else ""}>'
        f"<h3>{escape(chart.title)}</h3>"
        f'<p class="note">{escape(chart.note)}</p>{as_svg(chart, runs)}</figure>'
        for chart in charts_of(runs)
    )
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_style()}{_paper_style()}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="lead">{count_text(len(runs), "run")}, made {escape(made)}</p>
<ul class="runs">{legend}</ul>
<h2>Figures</h2>
{_figures(runs)}
<h2>Charts</h2>
<div class="charts">{charts}</div>
<h2>Configuration</h2>
{_configuration(runs)}
<h2>Environment</h2>
{_environment(runs)}
</main>
</body>
</html>
"""


def _chip(index: int) -> str:
    """Return a run's colour sample; broken, as its lines are, where colours repeat."""
    again = " again" if index >= len(SERIES) else ""
    colour = f"var(--c{index % len(SERIES)})"
    return f'<span class="chip{again}" style="background-color: {colour}"></span>'


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _figures(runs: Sequence[Run]) -> str:
    rows = []
    for index, run in enumerate(runs):
        ranks = run.facts.get("world_size")
        speed = run.typical("tokens_per_second")
        row = {
            "run": f"{_chip(index)}{escape(run.name)}",
            "ranks": _number(ranks, "d"),
            "iterations": str(int(run.lines[-1]["iteration"])),
            "loss, last": _last_loss(run),
            "held-out, last": "<br>".join(_held_out(run)) or "-",
            "tokens/s": _number(speed, ",.0f"),
            "per device": _number(speed / ranks if speed and ranks else None, ",.0f"),
            "MFU, in full": _number(run.typical("mfu"), ".2%"),
            "MFU, halved": _number(run.typical("mfu_causal"), ".2%"),
            "exposed": _number(_exposed(run), ".2%"),
            "states, MB": _number(run.last("model_state_bytes", scale=1e-6), ",.1f"),
            "peak, MB": _number(run.last("peak_memory_bytes", scale=1e-6), ",.1f"),
        }
        rows.append(row)
    note = (
        "Speeds are medians without the first tenth of the lines. Exposed is the part of an "
        "iteration in which computing waits for communication. The peak is allocated memory "
        "on CUDA and resident memory, interpreter and libraries included, on a CPU."
    )
    warnings = "".join(
        f'<p class="note warning">{escape(text)}</p>' for text in map(_left_out, runs) if text
    )
    table = _table([*rows[0]], [[*row.values()] for row in rows])
    return f'{table}{warnings}<p class="note">{note}</p>'


def _last_loss(run: Run) -> str:
    """Return the last loss that is a number, with its iteration if that is not the last one."""
    iterations, losses = run.series("lm_loss")
    if not losses:
        return "-"
    at_end = iterations[-1] == run.lines[-1]["iteration"]
    return f"{losses[-1]:.3f}" + ("" if at_end else f"<br>at {iterations[-1]}")


def _held_out(run: Run) -> Iterator[str]:
    """Yield the last loss on each set, with its bits per byte if they are known."""
    bits = run.validations(BITS)
    for name, (_, losses) in run.validations().items():
        shown = f"{escape(name.removeprefix('validation').removeprefix('-'))} {losses[-1]:.3f}"
        yield shown.strip() + (f" ({bits[name][1][-1]:.3f} bits/byte)" if name in bits else "")


def _left_out(run: Run) -> str:
    """Say how many steps a run skipped; empty if none."""
    skipped, not_finite = (
        int(sum(run.series(name)[1])) for name in ("skipped_iterations", "nan_iterations")
    )
    if skipped == 0:
        return ""
    return (
        f"{run.name} left out {count_text(skipped, 'step')}, {not_finite} with a loss not finite."
    )


def _exposed(run: Run) -> float | None:
    """Return the part of an iteration that waits for communication."""
    exposed, whole = run.exposed_ms(), run.typical("iteration_time_ms")
    return exposed / whole if exposed is not None and whole else None


def _configuration(runs: Sequence[Run]) -> str:
    known = [run for run in runs if run.arguments]
    if not known:
        return '<p class="note">There is no record in the folder of the metrics files.</p>'
    parts = []
    if len(runs) > 1:
        rows = [[_code(flag), *map(_code, values)] for flag, values in differences(runs).items()]
        heads = ["differs", *(escape(run.name) for run in runs)]
        same = '<p class="note">All flags are the same.</p>'
        parts.append(_table(heads, rows, text=True) if rows else same)
    for run in known:
        resumed = f", started {count_text(run.num_starts, 'time')}" if run.num_starts > 1 else ""
        rows = [
            [_code(words[0]), _code(" ".join(words[1:]))]
            for name, value in sorted(run.arguments.items())
            if (words := spelled(name, value))
        ]
        parts.append(
            f"<details><summary>All flags of {escape(run.name)}{resumed}</summary>"
            f"{_table(['flag', 'value'], rows, text=True)}</details>"
        )
    return "".join(parts)


def _environment(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.environment)
    rows = [
        [escape(name), *(escape(run.environment.get(name, "-")) for run in runs)] for name in names
    ]
    peaks = [(run.facts.get("peak") or {}).get("source", "-") for run in runs]
    rows.append(["peak of a device", *map(escape, peaks)])
    if not names:
        return '<p class="note">There is no record in the folder of the metrics files.</p>'
    if all(len(set(cells)) == 1 for _, *cells in rows):
        one = escape(runs[0].name) if len(runs) == 1 else "all runs"
        return _table(["", one], [row[:2] for row in rows], text=True)
    return _table(["", *(escape(run.name) for run in runs)], rows, text=True)


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, text: bool = False) -> str:
    """Return an HTML table; cells are HTML already."""
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    kind = ' class="text"' if text else ""
    return (
        f'<div class="table"><table{kind}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
