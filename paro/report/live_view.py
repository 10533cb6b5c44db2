"""Live terminal view of a run: progress, loss, throughput, memory and where states are placed."""

# It replaces the log lines on one node whose ranks share a terminal. Only the first rank draws, or
# ranks would overwrite each other; all other output scrolls above the view.

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paro.errors import one_line, shown
from paro.report.record import IterationRecord, Metrics, RunFacts

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARKS = 60
_LEAST_SECONDS = 0.25  # between two redraws: faster ones are not visible
_MEMORY = 0.9  # weight of past iterations in the running mean of the iteration time


def spark_line(values: Sequence[float], *, width: int = _SPARKS) -> str:
    """Values as block characters, scaled from minimum to maximum; averaged down to `width`."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    size = max(1, math.ceil(len(finite) / width))
    chunks = [finite[at : at + size] for at in range(0, len(finite), size)]
    means = [math.fsum(chunk) / len(chunk) for chunk in chunks]
    low, spread = min(means), max(means) - min(means)
    top = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[round((mean - low) / spread * top)] if spread else _BLOCKS[0] for mean in means
    )


def duration(seconds: float) -> str:
    """Seconds as 1:02:03, preceded by the days if there are any."""
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days} d {text}" if days else text


class LiveView:
    """Takes every iteration and redraws at most a few times a second."""

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
        self._bytes_before = bytes_before  # on a CPU: of the process before the model was built
        self._losses: list[float] = []
        self._seconds: float | None = None  # per iteration, running mean
        self._drawn = -math.inf
        self._latest: tuple[IterationRecord, Metrics] | None = None
        self._is_below = False
        self.console = console or Console()
        self._live = Live(console=self.console, auto_refresh=False, transient=False)
        self._live.start()
        self.console.show_cursor(True)  # else it would stay hidden after the run is killed

    def show(self, message: str) -> None:
        """Prints a message above the view."""
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def iteration(self, record: IterationRecord, metrics: Metrics) -> None:
        if not record.skipped:
            self._losses.append(record.lm_loss)
        seconds = record.iteration_time_ms / 1000.0
        before = seconds if self._seconds is None else self._seconds
        self._seconds = _MEMORY * before + (1.0 - _MEMORY) * seconds
        self._latest = (record, metrics)
        if time.monotonic() - self._drawn >= _LEAST_SECONDS:
            self._draw()

    def begin_below(self) -> None:
        """Starts the view again below, once: a launcher printed below it at an interrupt.

        It writes as many empty lines as the view has; the next redraw overwrites them.
        """
        if self._latest is not None and not self._is_below:
            lines = self.console.render_lines(self.render(*self._latest))
            self.console.file.write("\n" * min(len(lines), self.console.height))
            self._is_below = True

    def close(self) -> None:
        """Draws the last state and leaves it on the terminal."""
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        if self._latest is not None:
            self._drawn = time.monotonic()
            self._live.update(self.render(*self._latest), refresh=True)

    def render(self, record: IterationRecord, metrics: Metrics) -> Panel:
        """The view after an iteration."""
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold cyan", no_wrap=True)
        rows.add_column(overflow="fold")
        rows.add_row("loss", self._loss(metrics))
        for name, text in self._figures(record, metrics).items():
            rows.add_row(name, text)
        parts: list[Any] = [self._progress(record), Text(), rows]
        if self._placement:
            parts += [Text(), Text("\n".join(self._placement), style="dim", no_wrap=True)]
        return Panel(Group(*parts), title=self._title, title_align="left", padding=(0, 1))

    def _progress(self, record: IterationRecord) -> Table:
        done, of = record.iteration, self._facts.train_iters
        left = (of - done) * (self._seconds or 0.0)
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        row.add_row(
            Text(f"iteration {done}/{of}", style="bold"),
            ProgressBar(total=of, completed=done),
            f"{100.0 * done / of:.1f}%, {duration(left)} left",
        )
        return row

    def _loss(self, metrics: Metrics) -> str:
        least = min(self._losses, default=math.nan)
        return f"{metrics.lm_loss:.4f}  {spark_line(self._losses)}  least {least:.4f}"

    def _figures(self, record: IterationRecord, metrics: Metrics) -> dict[str, str]:
        facts, exposed = self._facts, record.exposed
        share = exposed.total * 1e5 / record.iteration_time_ms
        predicted = facts.predicted.get("total")
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
            "memory": f"{_megabytes(metrics.peak_memory_bytes)} at most"
            + (f", {_megabytes(predicted + self._bytes_before)} predicted" if predicted else ""),
            "sent": (
                f"{_megabytes(record.intra_bytes)} inside groups, "
                f"{_megabytes(record.inter_bytes)} between; "
                f"exposed {exposed.total * 1000:,.0f} ms ({share:.0f}%)"
            ),
            "step": (
                f"learning rate {record.learning_rate:.3E}, gradient norm {record.grad_norm:.3f}, "
                f"data {record.data_wait_ms:.1f} ms"
            ),
        }


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
