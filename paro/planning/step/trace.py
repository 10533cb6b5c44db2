"""Exports a simulated step in Chrome's trace format, for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence

from paro.planning.step.simulation import Span


def chrome_trace(spans: Sequence[Span]) -> str:
    """The trace as JSON: a process per group, a thread per stream; times in microseconds."""
    streams = sorted({(span.actor, span.stream) for span in spans})
    events: list[dict[str, object]] = []
    for number, (actor, stream) in enumerate(streams):
        name = {"name": stream}
        events.append({"ph": "M", "name": "thread_name", "pid": actor, "tid": number, "args": name})
    for actor in sorted({actor for actor, _ in streams}):
        name = {"name": f"ranks of group {actor}"}
        events.append({"ph": "M", "name": "process_name", "pid": actor, "args": name})
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": span.actor,
                "tid": streams.index((span.actor, span.stream)),
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
