"""Live terminal view of a run: progress, loss, throughput, memory and where states are placed."""

# The view replaces the log lines on one node whose ranks share a terminal. Only the first rank
# draws, or ranks would overwrite each other. All other output scrolls above the view.

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paro.errors import one_line, shown
from paro.report.log_line import duration
from paro.report.record import IterationRecord, Metrics, RunFacts, Validation

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKS = 60
_LEAST_SECONDS = 0.25  # least time between two redraws; faster redraws are not visible
_HOME = "\x1b[H"  # escape sequence that moves the cursor to the first line


class Sparkline:
    """Renderable for rich: values as block characters, from minimum to maximum.

    Values are averaged down to the width of the column.
    """

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        finite = [value for value in self._values if math.isfinite(value)]
        if not finite:
            return
        size = math.ceil(len(finite) / min(_SPARKS, options.max_width))
        means = [fmean(finite[at : at + size]) for at in range(0, len(finite), size)]
        low, spread = min(means), max(means) - min(means)
        levels = [(mean - low) / spread if spread else 0.0 for mean in means]
        yield Text("".join(_BLOCKS[round(level * (len(_BLOCKS) - 1))] for level in levels))


class LiveConsole(Console):
    """Console that raises `BrokenPipeError`; rich's own would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class LiveView:
    """The live view of a run, redrawn at most a few times a second."""

    def __init__(
        self,
        facts: RunFacts,
        *,
        title: str,
        placement: Sequence[str],
        bytes_before: int = 0,
        console: Console | None = None,
    ) -> None:
        self._facts = facts
        self._title = one_line(title)
        self._placement = tuple(map(shown, placement))
        self._bytes_before = bytes_before  # on a CPU: process memory before the model was built
        self._losses: list[float] = []
        self._held_out: dict[str, str] = {}  # data set: its last validation loss
        self._seconds_left = 0.0
        self._drawn = -math.inf
        self._latest: tuple[IterationRecord, Metrics] | None = None
        self._is_below = False
        self.console = console or LiveConsole()
        self._width = self.console.width
        # Printed lines scroll above the view, unless the view is drawn on standard error.
        self._live = Live(
            console=self.console, auto_refresh=False, redirect_stdout=not self.console.stderr
        )
        self._live.start()
        self.console.show_cursor(True)  # a hidden cursor would stay hidden if the run is killed

    def show(self, message: str) -> None:
        """Print a message above the view."""
        self._leave_what_is_wrapped()
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def iteration(self, record: IterationRecord, metrics: Metrics, *, seconds_left: float) -> None:
        """Show an iteration; `OSError` once the view is closed."""
        if not self._live.is_started:
            raise OSError("the terminal takes no more output")
        if not record.skipped:
            self._losses.append(record.lm_loss)
        self._seconds_left = seconds_left
        self._latest = (record, metrics)
        if time.monotonic() - self._drawn >= _LEAST_SECONDS:
            self._draw()

    def validation(self, validation: Validation) -> None:
        """Add an evaluation's loss to the next redraw."""
        name, bits = one_line(validation.name.removeprefix("validation-")), validation.bits_per_byte
        before = "" if name == "validation" else f"{name} "
        behind = "" if bits is None else f" ({bits:.4f} bits per byte)"
        if validation.ema_loss is not None:
            behind += f", {validation.ema_loss:.4f} averaged"
        loss = "no answered token" if validation.lm_loss is None else f"{validation.lm_loss:.4f}"
        text = f"{before}{loss}{behind} at iteration {validation.iteration}"
        self._held_out[validation.name] = text

    def begin_below(self) -> None:
        """Restart the view once below lines that a launcher printed at an interrupt.

        Write as many empty lines as the view has; the next redraw overwrites the empty lines.
        """
        if self._latest is not None and not self._is_below:
            lines = self.console.render_lines(self.render(*self._latest))
            self.console.file.write("\n" * min(len(lines), self.console.height))
            self._is_below = True

    def close(self) -> None:
        """Draw the last state, leave it on the terminal, and restore the standard streams."""
        try:
            if self._live.is_started:
                self._draw()
        finally:
            self._live.stop()

    def _draw(self) -> None:
        if self._latest is not None:
            self._drawn = time.monotonic()
            self._leave_what_is_wrapped()
            self._live.update(self.render(*self._latest), refresh=True)

    def _leave_what_is_wrapped(self) -> None:
        """Restart the view on an empty screen if the terminal has become narrower.

        The terminal may have wrapped lines of the view, so how many lines to overwrite is unknown.
        """
        width = self.console.width
        if width < self._width:
            self.console.file.write("\n" * self.console.height + _HOME)
        self._width = width

    def render(self, record: IterationRecord, metrics: Metrics) -> Panel:
        """Draw the view after an iteration; leave out the placement if the terminal is too low."""
        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(style="bold cyan", no_wrap=True)
        rows.add_column(overflow="fold", ratio=1)
        lowest = f"lowest so far {min(self._losses, default=math.nan):.4f}"
        rows.add_row("loss", _row(f"{metrics.lm_loss:.4f}", Sparkline(self._losses), lowest))
        if self._held_out:
            rows.add_row("validation", Text(", ".join(self._held_out.values())))
        for name, text in self._figures(record, metrics).items():
            rows.add_row(name, text)
        parts: list[Any] = [self._progress(record), Text(), rows]
        if not self._placement:
            return self._panel(parts)
        placement = Text("\n".join(self._placement), style="dim", no_wrap=True, overflow="ellipsis")
        whole = self._panel([*parts, Text(), placement])
        fits = len(self.console.render_lines(whole)) <= self.console.height
        return whole if fits else self._panel(parts)

    def _panel(self, parts: Sequence[Any]) -> Panel:
        return Panel(Group(*parts), title=self._title, title_align="left", padding=(0, 1))

    def _progress(self, record: IterationRecord) -> Table:
        done, of = record.iteration, self._facts.train_iters
        label = Text(f"iteration {done}/{of}", style="bold")
        left = f"{100.0 * done / of:.1f}%, {duration(self._seconds_left)} left"
        return _row(label, ProgressBar(total=of, completed=done), left, justify="right")

    def _figures(self, record: IterationRecord, metrics: Metrics) -> dict[str, str]:
        facts, exposed = self._facts, record.exposed
        share = exposed.total * 1e5 / record.iteration_time_ms
        return {
            "throughput": (
                f"{metrics.tokens_per_second:,.0f} tokens/s, "
                f"{metrics.tokens_per_second / facts.world_size:,.0f} a device, "
                f"{metrics.tflops_per_device:.2f} TFLOP/s, {metrics.iteration_time_ms:,.0f} ms"
            ),
            "MFU": (
                f"{100 * metrics.mfu:.2f}% with attention in full, "
                f"{100 * metrics.mfu_causal:.2f}% with causal attention halved"
            ),
            "memory": self._memory(metrics),
            "sent": (
                f"{_megabytes(record.intra_bytes)} inside groups, "
                f"{_megabytes(record.inter_bytes)} between; "
                f"computing waits {exposed.total * 1000:,.0f} ms for it ({share:.0f}%, exposed)"
            ),
            "step": (
                f"learning rate {record.learning_rate:.3E}, gradient norm {record.grad_norm:.3f}, "
                f"data {record.data_wait_ms:.1f} ms"
            ),
        }

    def _memory(self, metrics: Metrics) -> str:
        """Describe memory: of the allocator's tensors on a GPU, of the process on a CPU."""
        most = f"{_megabytes(metrics.peak_memory_bytes)} at most"
        predicted = self._facts.predicted.get("total")
        if not self._bytes_before:
            forecast = "" if predicted is None else f", {_megabytes(predicted)} predicted"
            return f"tensors {most}{forecast}"
        forecast = "" if predicted is None else f"; tensors {_megabytes(predicted)} predicted"
        return f"process {most}, {_megabytes(self._bytes_before)} before the model{forecast}"


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _row(left: Any, middle: Any, right: str, *, justify: JustifyMethod = "left") -> Table:
    """Return a row whose middle takes the space that is left."""
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify=justify)
    row.add_row(left, middle, right)
    return row
