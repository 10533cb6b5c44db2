"""Makes a saved view of a Weights & Biases project: throughput and MFU first, then the rest."""

# The tags are those of `scalars_of` in paro/report/record.py. Without an account or with --dry-run,
# the view is printed and nothing is sent.

from __future__ import annotations

import argparse
import importlib
import importlib.util
import netrc
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paro.distributed.user_errors import run_script
from paro.errors import UserError, type_and_message
from paro.report.log import print_line
from paro.topology import WaitKind
from tools.shared.command_line import Parser


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart: its title, the tags it draws over iterations, and the unit of their axis."""

    title: str
    tags: tuple[str, ...]
    unit: str = ""


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "throughput and MFU": (
        Panel("tokens per second", ("throughput/tokens-per-second",), "tokens/s"),
        Panel(
            "tokens per second and device",
            ("throughput/tokens-per-second-per-device",),
            "tokens/s/device",
        ),
        Panel(
            "MFU, attention in full and halved",
            ("throughput/mfu-attention-in-full", "throughput/mfu-causal-attention-halved"),
            "of the peak",
        ),
        Panel("TFLOP/s of a device", ("throughput/tflops-per-device",), "TFLOP/s"),
        Panel("iteration time", ("iteration-time",), "s"),
    ),
    "training": (
        Panel("loss", ("lm loss", "lm loss validation", "lm loss validation ema"), "nats"),
        Panel("bits per byte", ("bits per byte validation",), "bits/byte"),
        Panel("learning rate", ("learning-rate", "decoupled-learning-rate")),
        Panel("gradient norm", ("grad-norm",)),
        Panel("cosine of outer gradients", ("outer/grad-cosine",)),
        Panel("steps left out", ("steps/skipped-iterations", "steps/nan-iterations"), "iterations"),
    ),
    "memory": (
        Panel(
            "measured and predicted",
            ("memory/peak-measured-bytes", "memory/predicted-total-bytes"),
            "bytes",
        ),
        Panel(
            "states of a rank",
            tuple(
                f"memory/measured-{kind}-bytes"
                for kind in ("parameters", "gradients", "optimizer", "whole-parameters")
            ),
            "bytes",
        ),
    ),
    "communication": (
        Panel("sent", ("communication/intra-bytes", "communication/inter-bytes"), "bytes"),
        Panel(
            "exposed by kind",
            tuple(f"communication/exposed-{kind.value}-ms" for kind in WaitKind),
            "ms",
        ),
        Panel(
            "exposed by links",
            ("communication/exposed-intra-ms", "communication/exposed-inter-ms"),
            "ms",
        ),
        Panel("waiting for data", ("data/wait-ms",), "ms"),
    ),
}


def describe(entity: str | None, project: str, name: str) -> str:
    """Return the view as text."""
    lines = [f"view {name!r} of {entity or 'your account'}/{project}:"]
    for section, panels in SECTIONS.items():
        lines.append(f"  {section}")
        for panel in panels:
            unit = f" [{panel.unit}]" if panel.unit else ""
            lines.append(f"    {panel.title}{unit}: {', '.join(panel.tags)}")
    return "\n".join(lines)


def make_workspace(entity: str, project: str, name: str) -> Any:
    """Return the view as an object of wandb-workspaces; nothing is sent yet."""
    workspaces = importlib.import_module("wandb_workspaces.workspaces")
    reports = importlib.import_module("wandb_workspaces.reports.v2")
    sections = [
        workspaces.Section(
            name=section,
            is_open=True,
            panels=[
                reports.LinePlot(
                    title=panel.title, x="Step", y=list(panel.tags), title_y=panel.unit or None
                )
                for panel in panels
            ],
        )
        for section, panels in SECTIONS.items()
    ]
    try:
        return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections)
    except ValueError as error:  # of the library's own rules for names
        raise UserError(f"wandb refuses --name {name}: {type_and_message(error)}") from error


def has_account() -> bool:
    """Return whether there is a login key where wandb looks for one; never prompts."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    parser.add_argument("--wandb-project", required=True, help="the project to show")
    parser.add_argument("--wandb-entity", help="the user or team it belongs to; needed to save")
    parser.add_argument("--name", default="throughput and MFU", help="name of the view")
    parser.add_argument("--dry-run", action="store_true", help="print the view and send nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(argv)
    entity, project = options.wandb_entity, options.wandb_project
    for package in ("wandb", "wandb_workspaces"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"this needs {package}: pip install -r requirements.txt")
    workspace = make_workspace(entity or "-", project, options.name)
    print_line(describe(entity, project, options.name))
    if options.dry_run or not has_account():
        why = "--dry-run" if options.dry_run else "no account: run `wandb login`"
        print_line(f"nothing was saved ({why})")
        return
    if entity is None:
        raise UserError("--wandb-entity is missing: whose project it is")
    try:
        workspace.save()
    except Exception as error:  # the service's: network, permissions, a project that does not exist
        raise UserError(f"the view could not be saved: {error}") from error
    print_line(f"saved: {workspace.url}")


if __name__ == "__main__":
    run_script("wandb_dashboard.py", main)
