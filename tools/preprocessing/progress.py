"""Progress, speed and time of work on text, on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from paro.report.log import print_line
from paro.report.log_line import duration
from tools.preprocessing.encode import Tally

_NOTICE_SECONDS = 10.0  # between lines that say how long a call takes


class Progress:
    """A bar on a terminal; elsewhere Megatron's line about every `interval` documents."""

    def __init__(self, *, total_bytes: int, interval: int) -> None:
        self.tally = Tally()
        self._total = max(1, total_bytes)
        self._interval = interval
        self._begin = time.perf_counter()
        self._done_before = 0  # bytes of partitions that an earlier run finished
        bar: dict[str, Any] = {"total": self._total, "unit": "B", "unit_scale": True}
        self._bar = tqdm(**bar, dynamic_ncols=True, disable=not sys.stderr.isatty())

    def passed_over(self, num_bytes: int) -> None:
        """Add the bytes that an earlier run has encoded."""
        self._done_before += num_bytes
        self._bar.update(num_bytes)

    def count(self, tally: Tally) -> None:
        before = self.tally.documents // self._interval
        self.tally += tally
        self._bar.set_postfix_str(f"{self.tally.documents:,} documents", refresh=False)
        self._bar.update(tally.advance)
        if self._bar.disable and self.tally.documents // self._interval > before:
            done = self._done_before + self.tally.advance
            rest = max(0, self._total - done) / max(1, self.tally.advance) * self._seconds()
            self._print(f" {min(99, 100 * done // self._total)}% done, {duration(rest)} left.")

    def finish(self) -> None:
        self._bar.close()
        self._print("")

    def _seconds(self) -> float:
        return max(time.perf_counter() - self._begin, 1e-9)

    def _print(self, outlook: str) -> None:
        seconds = self._seconds()
        print_line(
            f"Processed {self.tally.documents} documents "
            f"({self.tally.documents / seconds:.1f} docs/s, "
            f"{self.tally.num_bytes / seconds / 2**20:.2f} MB/s).{outlook}",
            stream=sys.stderr,
        )


@contextmanager
def elapsing(what: str) -> Iterator[None]:
    """Show how long the block takes, for a call that does not tell how far it is."""
    ended = threading.Event()
    thread = threading.Thread(target=_show_elapsed, args=(what, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show_elapsed(what: str, ended: threading.Event) -> None:
    if sys.stderr.isatty():
        with tqdm(desc=what, bar_format="{desc}, {elapsed}") as clock:
            while not ended.wait(1.0):
                clock.refresh()
        return
    print_line(what, stream=sys.stderr)
    begin = time.monotonic()
    while not ended.wait(_NOTICE_SECONDS):
        print_line(f"{what}, {duration(time.monotonic() - begin)}", stream=sys.stderr)
