"""Rows of bench_collectives.py and their conditions as readable text, and bandwidths as plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paro.errors import count_text
from paro.machine.machine import Device, Machine
from paro.text import listed, ranks_text, size_text
from paro.topology import Link
from tools.shared.picture import drawing, log_scale


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows of one op along one axis span, as a text table."""
    over = {
        "intra": "inside groups",
        "inter": "between groups",
        "both": "inside and between groups",
    }
    title = f"{rows[0]['op']}, {rows[0]['ranks']} ranks, {over[rows[0]['axes']]}"
    lines = [f"{title:52s}ms      MB/s  bus MB/s  of bound"]
    for row in rows:
        fraction = row["fraction_of_bound"]
        lines.append(
            f"{row['bytes']:>14,} bytes  {row['algorithm']:22s} {row['seconds'] * 1e3:9.2f} "
            f"{row['algorithm_bandwidth'] / 1e6:9.1f} {row['bus_bandwidth'] / 1e6:9.1f} "
            f"{'' if fraction is None else format(fraction, '9.3f')}"
            f"{'' if row['correct'] else '  WRONG'}".rstrip()
        )
    return "\n".join(lines) + "\n"


def describe(facts: dict[str, Any]) -> str:
    """Return the conditions in one line."""
    num_nodes = facts["nodes"]
    rates = "".join(
        f"{link.value} links of {rate}, "
        for link in Link
        if (rate := facts[f"{link.value}_bandwidth"]) is not None
    )
    return (
        f"{ranks_text(facts['world_size'], facts['group_size'])}, "
        f"{count_text(num_nodes, 'node')}, {rates}{facts['dtype']}, {facts['backend']} on "
        f"{facts['device']}, torch {facts['torch']}, medians of {facts['rounds']} rounds"
    )


def memory_line(device: Device) -> str:
    """Describe the device memory of a rank without a model, and of each communicator."""
    group = device.communicator_bytes
    each = "none, gloo has no communicators" if group is None else size_text(group)
    return f"memory: {size_text(device.reserved_bytes)} without a model; of a communicator: {each}"


def written_lines(path: Path, machine: Machine) -> list[str]:
    """Describe a machine file that was just written, and which programs take it."""
    rows, device = machine.measured, machine.device
    sizes = sorted({row.bytes for row in rows})
    ranks = ranks_text(machine.world_size, machine.group_size)
    lines = [f"wrote the machine file {path}, for these {ranks}:"]
    if rows:
        lines.append(
            f"  {listed([*dict.fromkeys(row.op.value for row in rows)])} by "
            f"{listed([*dict.fromkeys(row.algorithm for row in rows)])}, over "
            f"{listed([*dict.fromkeys(row.axes.value for row in rows)])} axes, of "
            f"{size_text(sizes[0])} to {size_text(sizes[-1])}"
        )
    for link in Link:
        speed = machine.link(link)
        if speed is not None:
            rate, latency = speed.bits_per_second / 1e9, speed.latency_seconds * 1e6
            source = speed.bandwidth_source.value
            lines.append(
                f"  {link.value} links: {rate:.4g} Gbit/s ({source}), {latency:.0f} us a hop"
            )
    if device is not None:
        flops = f"{device.sustained_flops / 1e9:,.0f} of {device.peak_flops / 1e9:,.0f} GFLOP/s"
        if device.attention_flops is not None:
            flops += f", {device.attention_flops / 1e9:,.0f} in attention,"
        lines.append(f"  {device.name}, {size_text(device.memory_bytes)}, {flops} in training")
    return [
        *lines,
        f"--paro-machine {path} plans with it: tools/plan.py; pretrain_llama.py with --dry-run, "
        "--paro-strategy auto or --paro-collective auto",
    ]


def plot(path: Path, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write the plot of rows of one axis span: a panel per op, a line per algorithm."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    with drawing(path, 1, len(ops), size=(5 * len(ops), 4.5)) as (figure, panels):
        figure.suptitle(title, fontsize="medium")
        for panel, op in zip(panels, ops, strict=True):
            _draw(panel, op, [row for row in rows if row["op"] == op])


def _draw(panel: Any, op: str, rows: Sequence[dict[str, Any]]) -> None:
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        points = [
            (row["bytes"], row["algorithm_bandwidth"] / 1e6)
            for row in rows
            if row["algorithm"] == name
        ]
        panel.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
    bound = sorted(
        {(row["bytes"], row["bytes"] / row["bound_seconds"] / 1e6)
         for row in rows if row["bound_seconds"] is not None}
    )  # fmt: skip
    if bound:
        panel.plot(
            *zip(*bound, strict=True), linestyle="--", color="black", label="what the links allow"
        )
    panel.set(title=op, xlabel="bytes of the whole buffer", ylabel="algorithm bandwidth, MB/s")
    log_scale(panel.xaxis, panel.yaxis)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
