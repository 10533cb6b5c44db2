"""Makes one page of HTML and pictures from the metrics files of one or several runs."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paro.distributed.user_errors import run_script
from paro.errors import UserError
from paro.report.log import print_line
from tools.run_report.charts import as_png, charts_of
from tools.run_report.page import page
from tools.run_report.runs import read_runs
from tools.shared.command_line import Parser
from tools.shared.output import output_file, write_text

DESCRIPTION = """\
Writes a report of one or several runs, side by side: curves, throughput, MFU, memory,
communication, configuration and environment. The page needs no network and no other file.

  python tools/report.py runs/iig.jsonl runs/ggg.jsonl --output report.html --png-dir pictures
"""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=DESCRIPTION)
    parser.add_argument(
        "metrics", nargs="+", type=Path, help="the files of --metrics-file; reads FILE.run.json too"
    )
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page")
    parser.add_argument("--png-dir", type=Path, help="write every chart there as a picture too")
    parser.add_argument("--names", nargs="+", default=(), help="of the runs; default: strategies")
    parser.add_argument("--title", default="Training report", help="title of the page")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(argv)
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("this needs matplotlib: pip install -r requirements.txt")
    runs = read_runs(options.metrics, options.names)
    write_text(options.output, page(runs, options.title))
    print_line(f"wrote {options.output}")
    if options.png_dir is not None:
        for chart in charts_of(runs):
            place = options.png_dir / f"{chart.name}.png"
            with output_file(place) as temporary:
                temporary.write_bytes(as_png(chart, runs))
            print_line(f"wrote {place}")


if __name__ == "__main__":
    run_script("report.py", main)
