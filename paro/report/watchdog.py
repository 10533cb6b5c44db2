"""Heartbeat file; a rank without progress shows its threads' stacks, and later ends."""

# A separate thread reads the last state noted by the training thread, so that a heartbeat costs
# training nothing. It starts before the flags' files are read and before the ranks meet. While it
# runs it also postpones Python's own dump of all stacks, which therefore only fires, and ends the
# process, when no Python code runs: a library hangs and holds the GIL. Bytes that the process reads
# or writes are progress too: a checkpoint of a terabyte may take longer than the limit.

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
import time
import traceback
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from paro.distributed.flight_recorder import FLIGHT_PREFIX, recorded_collectives
from paro.errors import UserError, describe, writing
from paro.files.atomic_file import replace_file

_BEAT_SECONDS = 1.0
_GRACE = 1.1  # times the limit of waits: a collective's own timeout ends first, and says more
_MOVING_BYTES = 2**20  # bytes read or written per tick that count as progress; logs move less
_State = tuple[str, int, float]  # current phase, iterations done, time of the last progress


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """Flags for reports of a hang: heartbeat file and stack dump."""

    heartbeat_file: str | None = None
    hang_dump_minutes: float | None = None  # stack dump after; None: half the distributed timeout

    def __post_init__(self) -> None:
        minutes = self.hang_dump_minutes
        if minutes is not None and not 0.0 <= minutes < math.inf:
            raise UserError(f"--hang-dump-minutes {minutes} must be 0 or more; 0: never")


class Observer:
    """Observer of the training loop; the training thread calls it, so calls must be cheap."""

    def begins(self, what: str, iteration: int) -> None:
        """Note that `what` (training, evaluating, saving) begins after `iteration` iterations."""

    def progressed(self) -> None:
        """Note that the next micro-batch of the current phase begins."""

    def ends(self) -> None:
        """Note that the run is over; no further call follows."""


class Watchdog(Observer, AbstractContextManager["Watchdog"]):
    """Watch over one rank's progress; on the first rank also the writer of the heartbeat file."""

    def __init__(
        self,
        config: WatchConfig,
        *,
        rank: int,
        timeout_minutes: float,
        flight_dir: str | None = None,
    ) -> None:
        minutes = config.hang_dump_minutes
        self._limit = 60.0 * (timeout_minutes / 2.0 if minutes is None else minutes)
        self._end = 60.0 * timeout_minutes * _GRACE
        self._rank = rank
        self._flights = None if flight_dir is None else Path(flight_dir) / f"{FLIGHT_PREFIX}{rank}"
        self._heartbeat: Path | None = None
        self._stream = sys.__stderr__ or sys.stderr
        self._state: _State = ("starting", 0, time.monotonic())
        self._reported: _State | None = None
        self._beaten: _State | None = None
        self._over = threading.Event()
        self._tick = min(_BEAT_SECONDS, (self._limit or self._end) / 4.0)
        self._bytes = _bytes_moved()
        self._moved_at = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_heartbeat(self, config: WatchConfig) -> None:
        """Write the heartbeat from here on; `UserError` without its folder."""
        if self._rank != 0 or config.heartbeat_file is None:
            return
        path = Path(config.heartbeat_file)
        with writing(f"--heartbeat-file {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._heartbeat = path

    def begins(self, what: str, iteration: int) -> None:
        self._state = (what, iteration, time.monotonic())

    def progressed(self) -> None:
        self.begins(*self._state[:2])

    def ends(self) -> None:
        self.begins("ending the run", self._state[1])  # waits for dashboards and ranks may hang

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._tick):
            state = self._state
            self._beat(state)
            faulthandler.dump_traceback_later(self._end, exit=True, file=self._stream)
            what, iteration, begun = state
            stalled = time.monotonic() - max(begun, self._last_moved())
            is_late = self._limit and stalled > self._limit
            fault = f"no progress for {stalled:.0f} s while {what}, after iteration {iteration}"
            if (is_late or stalled > self._end) and state is not self._reported:
                self._reported = state
                self._report(fault)
            if stalled > self._end:
                self._say(
                    f"[Rank {self._rank}] error: {fault}: the run ends; "
                    "--distributed-timeout-minutes is the limit\n"
                )
                os._exit(1)  # the training thread may be in a call that never returns
        faulthandler.cancel_dump_traceback_later()
        self._beat(self._state)

    def _last_moved(self) -> float:
        """Return the time of the last tick in which the process read or wrote `_MOVING_BYTES`."""
        before, self._bytes = self._bytes, _bytes_moved()
        if self._bytes - before >= _MOVING_BYTES:
            self._moved_at = time.monotonic()
        return self._moved_at

    def _say(self, text: str) -> None:
        with suppress(OSError):  # a closed terminal or a full disk must not end the watchdog
            self._stream.write(text)
            self._stream.flush()  # the next call may hang

    def _beat(self, state: _State) -> None:
        path, (what, iteration, _) = self._heartbeat, state
        if path is None or state is self._beaten:
            return
        beat = {"iteration": iteration, "doing": what, "time": time.time()}
        try:
            replace_file(path, json.dumps(beat) + "\n")
        except OSError as error:
            self._say(f"--heartbeat-file is left out from here on: {describe(error)}\n")
            self._heartbeat = None
        self._beaten = state

    def _write_flights(self, path: Path) -> None:
        try:
            recorded = recorded_collectives()
            if recorded is None:
                return
            replace_file(path, recorded)
            note = f"its last collectives are in {path}: torchfrtrace {path.parent} compares ranks"
        except (OSError, RuntimeError) as error:
            note = f"--flight-recorder-dir: {describe(error)}"
        self._say(f"[Rank {self._rank}] {note}\n")

    def _report(self, fault: str) -> None:
        """Show the stacks of all threads, in one write so that output of ranks does not mix."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"[Rank {self._rank}] {fault}; the stacks of its threads:"]
        for ident, frame in sys._current_frames().items():
            if ident == self._thread.ident:
                continue
            lines.append(f"[Rank {self._rank}] thread {names.get(ident, ident)}:")
            lines += [
                f"[Rank {self._rank}] {line}"
                for entry in traceback.format_stack(frame)
                for line in entry.rstrip("\n").splitlines()
            ]
        self._say("\n".join(lines) + "\n")
        if self._flights is not None:
            self._write_flights(self._flights)


def _bytes_moved() -> int:
    """Count the bytes that this process has read and written; 0 where the system does not say."""
    try:
        moved = psutil.Process().io_counters()
    except psutil.Error:
        return 0
    return int(moved.read_chars + moved.write_chars + moved.read_bytes)
