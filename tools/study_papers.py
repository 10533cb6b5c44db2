"""Writes the page that sets the papers' figures beside the planner's, with a picture.

    python tools/study_papers.py --output examples/measured

writes papers.md and papers.png there. No ranks, no GPU, no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # started as a script: the repository's packages lie beside tools/
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.atomic_file import replacing
from tools.planning.pictures import draw_pairs
from tools.planning.published import AMSP, Figure, amsp_choices, feasible, figures

HEAD = """\
<!-- Written by python tools/study_papers.py --output examples/measured: change that. -->
# The papers' figures beside the planner's.

Written by `python tools/study_papers.py --output examples/measured`; nothing here was measured by
this project. Published are PaRO (NeurIPS 2024), AMSP (arXiv 2311.00257v2) and InternEvo's table;
*ours* is `paro/planning/` under one set of assumptions:

- PaRO's cluster is the shipped machine `dgx-a100-roce100`. Its 27 GB/s a node are a fit to R1 to
  R3; the paper names 100 Gb/s RoCE. Nothing overlaps, as in the code that the authors released.
  bf16 accumulators, micro-batches of 4 x 512 tokens, 10 a step, 65B recomputed in full.
- AMSP's cluster is `a800-ib800`: micro-batches of 1 x 4096, 30B recomputed in full. AMSP overlaps
  all but publishing, as its end-to-end runs do; MiCS overlaps nothing. Its sustained FLOP/s are
  those of AMSP's own best run.
- *overlapped* is what this project's engine would get there, everything overlapping.

![published and ours](papers.png)

| | figure | published | ours | error | within | overlapped |
|---|---|---|---|---|---|---|
"""


def page(rows: Sequence[Figure]) -> str:
    """The page in Markdown."""
    lines = [HEAD.rstrip("\n")]
    for row in rows:
        within = "order only"
        if row.tolerance is not None:
            within = f"{row.tolerance:.0%}: {'yes' if row.holds else '**no**'}"
        other = "" if row.overlapped is None else f"{row.overlapped:.3g}"
        lines.append(
            f"| {row.name} | {row.what} | {row.published:.3g} | {row.ours:.3g} | {row.error:+.0%} "
            f"| {within} | {other} |"
        )
    fits = feasible()
    listed = ", ".join(name for name, fit in fits.items() if fit)
    others = ", ".join(name for name, fit in fits.items() if not fit)
    lines += [
        "",
        "**R4**, 65B on 32 devices of 80 GB: of the strategies that the paper ran, it reports that "
        f"ZeRO-3, IGG and IIG fit (and ZeRO++, which is none of the 14). Ours: {listed} fit; "
        f"{others} do not.",
        "",
        "**AMSP's choices** on 1024 GPUs, from AMSP's own space (params, grads, optim):",
        "",
        "| model | AMSP | ours | AMSP's is slower here by |",
        "|---|---|---|---|",
    ]
    own = {preset: strategy for preset, strategy, *_ in AMSP}
    for preset, (chosen, slower) in amsp_choices().items():
        lines.append(f"| {preset} | {own[preset]} | {chosen} | {slower:.1%} |")
    lines += ["", "**What misses, and what might explain it**", ""]
    lines += [
        f"- {row.name}, {row.what}: {row.error:+.0%}. {row.note}".rstrip(" .") + "."
        for row in rows
        if not row.holds
    ]
    lines += ["", "**Notes**", ""]
    lines += [f"- {row.name}, {row.what}: {row.note}." for row in rows if row.note and row.holds]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="an old folder")
    args = parser.parse_args(argv)
    if not args.output.is_dir():
        parser.error(f"--output {args.output} is no folder")
    rows = figures()
    with replacing(args.output / "papers.md") as temporary:
        temporary.write_text(page(rows), encoding="utf-8")
    draw_pairs(args.output / "papers.png", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
