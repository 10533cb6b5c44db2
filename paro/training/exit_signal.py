"""The reasons of a rank to end a training early, and the signals that ask it to."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from paro.config.train import TrainConfig


class ExitReasons(NamedTuple):
    """The reasons of a rank to exit early."""

    signalled: bool = False
    late: bool = False  # True: --exit-duration-in-mins has passed
    unsaved: bool = False  # True: an async save failed
    # The step since groups train alone after which all groups stop, said by the first rank of each.
    stop_after: int = 0

    @classmethod
    def summed(cls, sums: Mapping[str, float]) -> ExitReasons:
        """Return the reasons that any rank has, from sums over the ranks by field."""
        signalled, late, unsaved = (sums[name] > 0.0 for name in cls._fields[:3])
        return cls(signalled, late, unsaved, int(sums["stop_after"]))

    def joined(self, other: ExitReasons) -> ExitReasons:
        """Return the reasons that either has."""
        return ExitReasons._make(map(max, self, other))


class ExitSignal:
    """The first signal that asked this rank to exit, if any, under --exit-signal-handler."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None

    @property
    def name(self) -> str | None:
        return None if self.number is None else self.number.name

    @staticmethod
    def numbers(config: TrainConfig) -> set[signal.Signals]:
        """Return the signal numbers that ask a training to exit under these flags."""
        if not config.exit_signal_handler:
            return set()
        numbers = {signal.Signals[config.exit_signal], signal.SIGTERM, signal.SIGINT}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            numbers.add(signal.SIGHUP)  # sent when a terminal closes
        return numbers

    def catch(self, config: TrainConfig) -> None:
        """Record signals from now on instead of their usual effect, if the flags ask for it."""
        for number in self.numbers(config):
            signal.signal(number, self._came)

    @contextmanager
    def caught(self, config: TrainConfig) -> Iterator[None]:
        """Record signals inside the block; raise a recorded signal again after the block.

        After an exception, signals stay recorded while this rank ends: signals may come late.
        """
        before = {number: signal.getsignal(number) for number in self.numbers(config)}
        self.catch(config)
        yield
        for number, handler in before.items():
            signal.signal(number, handler)
        if self.number is not None:
            signal.raise_signal(self.number)

    def _came(self, number: int, _frame: FrameType | None) -> None:
        """Record the first signal; ignore later ones: torchrun and a terminal may both send one."""
        self.number = self.number or signal.Signals(number)
