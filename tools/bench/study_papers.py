"""Writes the page that compares the papers' figures with the planner's, and a plot.

    python tools/bench/study_papers.py --output examples/measured

writes papers.md and papers.png there. Needs no ranks, no GPU and no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.atomic_file import replacing
from model.config import num_parameters
from tools.bench.planning.figure import Figure
from tools.bench.planning.partial import partial_table
from tools.bench.planning.published import feasible, paro_figures
from tools.bench.planning.published_amsp import LIMIT_GB, amsp_choices, amsp_figures, amsp_model
from tools.planning.pictures import draw_pairs

HEAD = """\
<!-- Written by python tools/bench/study_papers.py --output examples/measured: change that. -->
# The papers' figures and the planner's.

Written by `python tools/bench/study_papers.py --output examples/measured`; this project measured
nothing of it but the table of partial training. Published are PaRO (NeurIPS 2024), AMSP (arXiv
2311.00257v2) and InternEvo's table; *ours* is `paro/planning/` under one set of assumptions:

- Everywhere a collective over several nodes is one flat ring, as NCCL's are (but for MiCS, which
  gathers level by level), at a node's bandwidth; hops have the latencies of NCCL's own model.
- PaRO's cluster is the shipped machine `dgx-a100-roce100`. Its 27 GB/s a node are a fit to R1 to
  R3; the paper names 100 Gb/s RoCE. Nothing overlaps, as in the code that the authors released.
  bf16 accumulators, micro-batches of 4 x 512 tokens, 10 a step, 65B recomputed in full. Where the
  batch is dynamic: the largest micro-batches that fit, 540 samples a GPU.
- AMSP's cluster is `a800-ib800`, InternEvo's `a100-roce400`: micro-batches of 1 x 4096 and 4 of 2
  x 2048. Their engine is not this project's (`tools/bench/planning/amsp.py`): tensors have
  owners, sums are all-reduced, updates broadcast one owner after the other. It overlaps all but
  publishing in end-to-end runs. MiCS overlaps nothing. How fast a model computes, and what
  else a step takes, is a line through AMSP's own overlapped runs on 64 GPUs; no figure of the
  links is a fit. AMSP's 30B is {billions:.1f}B here: its MFU and its tokens a second agree on 181
  GFLOPs a token, not on LLaMA's 215.
- *overlapped* is what this project's engine would get there, everything overlapping.

![published and ours](papers.png)

| | figure | published | ours | error | within | overlapped |
|---|---|---|---|---|---|---|
"""


@cache
def figures() -> tuple[Figure, ...]:
    """All figures, in the order of the page."""
    return (*paro_figures(), *amsp_figures())


def page(rows: Sequence[Figure]) -> str:
    """The page in Markdown."""
    head = HEAD.format(billions=num_parameters(amsp_model("30B")) / 1e9)
    lines = [head.rstrip("\n"), *map(_row, rows), "", *_feasible(), "", *_choices()]
    lines += ["", *_partial()]
    lines += ["", "**What misses, and why**", ""]
    lines += [
        f"- {row.name}, {row.what}: {row.error:+.0%}. {row.note}".rstrip(" .") + "."
        for row in rows
        if not row.holds
    ]
    lines += ["", "**Notes**", "", *_notes(rows)]
    return "\n".join(lines) + "\n"


def _row(row: Figure) -> str:
    within = "order only"
    if row.tolerance is not None:
        within = f"{row.tolerance:.0%}: {'yes' if row.holds else '**no**'}"
    other = "" if row.overlapped is None else f"{row.overlapped:.3g}"
    return (
        f"| {row.name} | {row.what} | {row.published:.3g} | {row.ours:.3g} | {row.error:+.0%} "
        f"| {within} | {other} |"
    )


def _feasible() -> Iterator[str]:
    fits = feasible()
    listed = ", ".join(name for name, fit in fits.items() if fit)
    others = ", ".join(name for name, fit in fits.items() if not fit)
    yield (
        "**R4**, 65B on 32 devices of 80 GB: of the strategies that the paper ran, it reports that "
        f"ZeRO-3, IGG and IIG fit (and ZeRO++, which is none of the 14). Ours: {listed} fit; "
        f"{others} do not."
    )


def _choices() -> Iterator[str]:
    yield (
        "**AMSP's choices** on 1024 GPUs, from its space (params, grads, optim; grads cut as "
        "params), by its objective: the least time if nothing overlaps, within the memory. How "
        "much its engine can use is not stated; that MiCS took groups of 16 for 30B tells that 8, "
        f"which need 65 GB by our count, did not fit, so the limit here is {LIMIT_GB:.0f} GB."
    )
    yield from ("", "| model | AMSP | ours | needs GB | AMSP's is slower here by |")
    yield "|---|---|---|---|---|"
    for choice in amsp_choices():
        degrees = ",".join(map(str, choice.ours.strategy.degrees))
        yield (
            f"| {choice.preset} | {choice.amsp.strategy.name} | {degrees} "
            f"| {choice.gigabytes:.1f} | {choice.slower:.1%} |"
        )
    odd = [choice for choice in amsp_choices() if choice.slower > 0]
    if odd:
        names = ", ".join(choice.preset for choice in odd)
        yield ""
        yield (
            f"{names} differs: 8,8,32 all-reduces and broadcasts all of the model between nodes, a "
            "finer cut of params sends less there. By the paper's formulas too, unless rings over "
            "several nodes are slower than its links: it measured 16,16,16 to be slower in its "
            "engine (*sharding* above), and its profile of collectives is not published."
        )


def _partial() -> Iterator[str]:
    yield (
        "**Partial training, measured** on 8 CPU ranks in 2 emulated nodes with a NIC of 25 or 100 "
        "Mbit/s for each rank: a model of 5.6M parameters in 16 blocks, 4 micro-batches of 1 x 128 "
        "tokens, medians of 3 or 4 turns with the least and the most; all 14 strategies are in "
        "[25 Mbit/s](part-25mbit/steps.md) and [100 Mbit/s](part-100mbit/steps.md). The papers' "
        "are of 7B (R5) and 65B on 32 GPUs. ZeRO-2 is NGG, ZeRO-3 GGG."
    )
    yield from ("", *partial_table())


def _notes(rows: Sequence[Figure]) -> Iterator[str]:
    """Each note once, with all figures that it applies to."""
    about: dict[str, list[Figure]] = {}
    for row in rows:
        if row.note and row.holds:
            about.setdefault(row.note, []).append(row)
    for note, figures_of in about.items():
        what = "; ".join(dict.fromkeys(row.what for row in figures_of))
        yield f"- {figures_of[0].name}, {what}: {note}."


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
