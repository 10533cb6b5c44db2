"""Exports a simulated step in Chrome's trace format, for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence

from paro.planning.step.simulation import Activity


def chrome_trace(activities: Sequence[Activity]) -> str:
    """The trace as JSON: a process per group, a thread per stream; times in microseconds."""
    streams = sorted({(activity.actor, activity.stream) for activity in activities})
    events: list[dict[str, object]] = []
    for number, (actor, stream) in enumerate(streams):
        name = {"name": stream}
        events.append({"ph": "M", "name": "thread_name", "pid": actor, "tid": number, "args": name})
    for actor in sorted({actor for actor, _ in streams}):
        name = {"name": f"ranks of group {actor}"}
        events.append({"ph": "M", "name": "process_name", "pid": actor, "args": name})
    for activity in activities:
        events.append(
            {
                "ph": "X",
                "name": activity.name,
                "cat": activity.kind,
                "pid": activity.actor,
                "tid": streams.index((activity.actor, activity.stream)),
                "ts": activity.start * 1e6,
                "dur": (activity.end - activity.start) * 1e6,
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
