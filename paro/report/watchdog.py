"""Heartbeat file, and a dump of all threads' stacks when a rank makes no progress."""

# A separate thread reads the last state noted by the training thread, so that a heartbeat costs
# training nothing. While this thread runs it also postpones Python's own dump of all stacks, which
# therefore only fires when no Python code runs: a library hangs and holds the GIL.

from __future__ import annotations

import faulthandler
import json
import math
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from data.atomic_file import replacing
from paro.distributed.flight_recorder import FLIGHT_PREFIX, recorded_collectives
from paro.errors import UserError, writing
from paro.report.observer import Observer

_BEAT_SECONDS = 1.0
_State = tuple[str, int, float]  # current phase, iterations done, time of the last progress


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """How a hang is reported: heartbeat file and stack dump."""

    heartbeat_file: str | None = None
    hang_dump_minutes: float | None = None  # None: half of --distributed-timeout-minutes

    def __post_init__(self) -> None:
        minutes = self.hang_dump_minutes
        if minutes is not None and not 0.0 <= minutes < math.inf:
            raise UserError(f"--hang-dump-minutes {minutes} must be 0 or more; 0: never")


class Watchdog(Observer):
    """Watches one rank; the first rank also writes the heartbeat."""

    def __init__(
        self,
        config: WatchConfig,
        *,
        rank: int,
        timeout_minutes: float,
        flight_dir: str | None = None,
        stream: TextIO | None = None,
    ) -> None:
        minutes = config.hang_dump_minutes
        self._limit = 60.0 * (timeout_minutes / 2.0 if minutes is None else minutes)
        self._rank = rank
        self._flights = None if flight_dir is None else Path(flight_dir) / f"{FLIGHT_PREFIX}{rank}"
        self._heartbeat = None
        if rank == 0 and config.heartbeat_file is not None:
            self._heartbeat = Path(config.heartbeat_file)
            with writing(f"--heartbeat-file {self._heartbeat}"):
                self._heartbeat.parent.mkdir(parents=True, exist_ok=True)
        self._stream = stream or sys.__stderr__ or sys.stderr
        self._state: _State = ("starting", 0, time.monotonic())
        self._told: _State | None = None
        self._beaten: _State | None = None
        self._over = threading.Event()
        self._tick = min(_BEAT_SECONDS, self._limit / 4.0) if self._limit else _BEAT_SECONDS
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if self._limit or self._heartbeat is not None:
            self._thread.start()

    def begins(self, what: str, iteration: int) -> None:
        self._state = (what, iteration, time.monotonic())

    def goes_on(self) -> None:
        self.begins(*self._state[:2])

    def ends(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._tick):
            state = self._state
            if self._heartbeat is not None and state is not self._beaten:
                self._beat(state, self._heartbeat)
            if not self._limit:
                continue
            faulthandler.dump_traceback_later(self._limit * 1.5 + self._tick, file=self._stream)
            stood = time.monotonic() - state[2]
            if stood > self._limit and state is not self._told:
                self._told = state
                self._stream.write(self._standstill(state, stood))
                self._stream.flush()  # the next call may hang as well
                if self._flights is not None:
                    self._write_flights(self._flights)
        if self._limit:
            faulthandler.cancel_dump_traceback_later()
        if self._heartbeat is not None and self._state is not self._beaten:
            self._beat(self._state, self._heartbeat)

    def _beat(self, state: _State, path: Path) -> None:
        what, iteration, _ = state
        beat = {"iteration": iteration, "doing": what, "time": time.time()}
        try:
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(beat) + "\n", encoding="utf-8")
        except OSError as error:
            self._stream.write(f"--heartbeat-file is left out from here on: {error}\n")
            self._heartbeat = None
        self._beaten = state

    def _write_flights(self, path: Path) -> None:
        try:
            recorded = recorded_collectives()
            if recorded is None:
                return
            with replacing(path) as temporary:
                temporary.write_bytes(recorded)
            told = f"its last collectives are in {path}: torchfrtrace {path.parent} compares ranks"
        except (OSError, RuntimeError) as error:
            told = f"--flight-recorder-dir: {error}"
        self._stream.write(f"[Rank {self._rank}] {told}\n")
        self._stream.flush()

    def _standstill(self, state: _State, stood: float) -> str:
        """The stacks of all threads, as one text so that output of ranks does not mix."""
        what, iteration, _ = state
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [
            f"[Rank {self._rank}] no progress for {stood:.0f} s while {what}, after iteration "
            f"{iteration}; its threads stand here:"
        ]
        for ident, frame in sys._current_frames().items():
            if ident == self._thread.ident:
                continue
            lines.append(f"[Rank {self._rank}] thread {names.get(ident, ident)}:")
            lines += [
                f"[Rank {self._rank}] {line}"
                for entry in traceback.format_stack(frame)
                for line in entry.rstrip("\n").splitlines()
            ]
        return "\n".join(lines) + "\n"
