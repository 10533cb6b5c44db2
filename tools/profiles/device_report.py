"""The figures of GPUs' profiles as a text, as JSON, and as a picture with a row for each stream."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.profiles.device import DeviceProfile, Work
from tools.profiles.kernel_class import CLASSES, NCCL, short_name
from tools.shared.picture import drawing, name_rows

_TOP_GAPS, _TOP_KERNELS = 5, 15
_WIDTH = 1800  # pixels in which a row is drawn, about those of the picture
_NAME_WIDTH = 80

_COLORS = dict(
    zip(
        CLASSES,
        ("#4c78a8", "#72b7b2", "#54a24b", "#b279a2", "#eeca3b", "#e45756", "#79706e"),
        strict=True,
    )
)


def device_text(profile: DeviceProfile) -> str:
    """Format the figures of a rank, in milliseconds of a mean step if not said otherwise."""
    step = profile.seconds / profile.num_steps
    gaps = profile.gaps
    idle = sum(gap.seconds for gap in gaps)

    def mean(seconds: float) -> str:
        return f"{1e3 * seconds / profile.num_steps:.3f} ms"

    lines = [
        f"rank {profile.rank}: {1e3 * step:.3f} ms a step (mean of {profile.num_steps}); "
        f"the GPU is busy for {profile.busy / profile.seconds:.1%}",
        f"  stream {profile.compute_stream} computes; it is idle for {mean(idle)} a step "
        f"({idle / profile.seconds:.1%}), in {len(gaps)} gaps of all steps",
        f"  NCCL {mean(profile.nccl)} a step, of these exposed: {mean(profile.exposed)}",
    ]
    for gap in sorted(gaps, key=lambda gap: -gap.seconds)[:_TOP_GAPS]:
        lines.append(
            f"  idle {1e3 * gap.seconds:.3f} ms at {1e3 * gap.start:.3f} ms, "
            f"after {_short(gap.before)}, before {_short(gap.after)}"
        )
    total = sum(profile.by_class.values())
    for kind, seconds in profile.by_class.items():
        if seconds:
            share = f"{seconds / total:.1%}"
            lines.append(f"  {kind:<18} {share:>6} of kernel time, {mean(seconds)} a step")
    for row in profile.kernels[:_TOP_KERNELS]:
        share = f"{row.seconds / total:.1%}" if total else ""
        lines.append(f"  {share:>6} {mean(row.seconds):>12} {row.runs:>6}x  {_short(row.name)}")
    return "\n".join(lines)


def _short(name: str) -> str:
    plain = short_name(name)
    return plain if len(plain) <= _NAME_WIDTH else f"{plain[: _NAME_WIDTH - 3]}..."


def device_figures(profile: DeviceProfile) -> dict[str, Any]:
    """Return a profile's figures for a JSON file, in seconds of all steps together."""
    gaps = sorted(profile.gaps, key=lambda gap: -gap.seconds)
    return {
        "rank": profile.rank,
        "num_steps": profile.num_steps,
        "seconds_per_step": profile.seconds / profile.num_steps,
        "busy_share": profile.busy / profile.seconds,
        "compute_stream": profile.compute_stream,
        "idle_seconds": sum(gap.seconds for gap in gaps),
        "num_gaps": len(gaps),
        "gaps": [asdict(gap) for gap in gaps[:_TOP_GAPS]],
        "nccl_seconds": profile.nccl,
        "exposed_nccl_seconds": profile.exposed,
        "class_seconds": profile.by_class,
        "kernels": [
            {"name": k.name, "class": k.kind, "runs": k.runs, "seconds": k.seconds}
            for k in profile.kernels[:_TOP_KERNELS]
        ],
    }


def draw_streams(path: Path, profiles: Sequence[DeviceProfile], title: str) -> None:
    """Draw a row for each stream of each GPU, colored by class; idle times stay white.

    Where kernels are shorter than a pixel, the height is the share of time in which any ran.
    """
    rows = [
        (profile, stream)
        for profile in profiles
        for stream in sorted(
            {item.stream for item in profile.work},
            key=lambda stream: (stream != profile.compute_stream, stream),
        )
    ]
    longest = max(profile.seconds for profile in profiles)
    with drawing(path, 1, 1, size=(14, 0.5 * len(rows) + 2.0)) as (_, (axes,)):
        labels = []
        for row, (profile, stream) in enumerate(rows):
            items = [item for item in profile.work if item.stream == stream]
            labels.append(f"rank {profile.rank}: stream {stream}{_use(profile, stream, items)}")
            for (kind, quarters), runs in blocks(items, 1e3 * longest / _WIDTH).items():
                height = 0.8 * quarters / 4
                # The rows are counted downwards.
                place = (row + 0.4 - height, height)
                axes.broken_barh(runs, place, color=_COLORS[kind], linewidth=0)
        unit = "ms from the start of the first step; a height is the share of time in use"
        axes.set(xlim=(0, 1e3 * longest), xlabel=unit, title=title)
        shown = {item.kind for profile in profiles for item in profile.work}
        name_rows(axes, labels, {kind: _COLORS[kind] for kind in CLASSES if kind in shown})


def _use(profile: DeviceProfile, stream: int, items: Iterable[Work]) -> str:
    if stream == profile.compute_stream:
        return " (compute)"
    if stream in profile.lanes:
        return f" ({profile.lanes[stream]})"
    return " (NCCL)" if any(item.kind == NCCL for item in items) else ""


Block = tuple[float, float]  # start and length, ms


def blocks(items: Iterable[Work], pixel: float) -> dict[tuple[str, int], list[Block]]:
    """Return blocks to draw by class and by quarters of the time in use; `pixel` ms are one column.

    Each column has the class that takes most of it, and neighbours that are equal become one block:
    a picture of many thousands of kernels has at most a block per column.
    """
    columns: dict[int, dict[str, float]] = {}
    for item in items:
        start, end = 1e3 * item.start, 1e3 * item.end
        for column in range(int(start / pixel), int(end / pixel) + 1):
            part = min(end, (column + 1) * pixel) - max(start, column * pixel)
            if part > 0.0:
                kinds = columns.setdefault(column, {})
                kinds[item.kind] = kinds.get(item.kind, 0.0) + part
    blocks: dict[tuple[str, int], list[Block]] = {}
    previous: tuple[int, str, int] | None = None
    for column, kinds in sorted(columns.items()):
        kind = max(kinds, key=lambda kind: kinds[kind])
        quarters = min(4, math.ceil(4 * sum(kinds.values()) / pixel - 1e-6)) or 1
        runs = blocks.setdefault((kind, quarters), [])
        if previous == (column - 1, kind, quarters):
            runs[-1] = runs[-1][0], (column + 1) * pixel - runs[-1][0]
        else:
            runs.append((column * pixel, pixel))
        previous = column, kind, quarters
    return blocks
