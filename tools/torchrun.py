"""torchrun for one machine, which ends as its ranks do: with their status, their lines last."""

# torchrun itself ends every run that failed or was signalled with status 1 and a traceback of its
# own; at a signal it also kills ranks that have not saved within 30 s. Here the ranks get the
# signal, and time. What ranks print, such as the traceback of a bug, is theirs and is shown.

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paro.report.log import print_line
from tools.cluster.processes import children

NAME = "torchrun.py"
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
IMPATIENT_SECONDS = 1.0  # one signal may come twice, by a terminal and by a supervisor


class Ending:
    """The handler of signals: the ranks get the first one, and are killed by a later one."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self.status: int | None = None  # of the run, once its ranks have ended

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self._begun is None:
            self._begun = time.monotonic()
            self.status = end_with_ranks(number)
            sys.exit(self.status)
        if time.monotonic() - self._begun > IMPATIENT_SECONDS:
            send(signal.SIGKILL, children(os.getpid()))


def send(number: int, processes: Sequence[int]) -> None:
    for process in processes:
        os.kill(process, number)  # one that has ended is there until somebody waits for it


def end_with_ranks(number: int) -> int:
    """Pass a signal on, wait for the ranks, and return the exit status of the run."""
    started = children(os.getpid())  # and not yet seen to end
    send(number, started)
    # They stay waitable: torchrun looks for its ranks too.
    ended = [os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT) for rank in started]
    statuses = [end.si_status for end in ended if end and end.si_code == os.CLD_EXITED]
    if len(statuses) < len(started) or not started:
        print_line(f"{NAME}: ended by {signal.Signals(number).name}", stream=sys.stderr)
        return max(statuses, default=0) or 128 + number
    return max(statuses)


def status_of_failed(error: Any) -> int:
    """Return the status of the rank that failed first; print it unless the rank has said why."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        killer = signal.Signals(-failure.exitcode).name
        print_line(f"{NAME}: rank {rank} was killed by {killer}", stream=sys.stderr)
        return 128 - failure.exitcode
    if not Path(failure.error_file).is_file():  # else it has the line that the rank printed
        print_line(f"{NAME}: rank {rank} ended with status {failure.exitcode}", stream=sys.stderr)
    return int(failure.exitcode)


def main(argv: Sequence[str]) -> int:
    ending = Ending()
    for name in SIGNALS:
        if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:  # as nohup makes it
            signal.signal(getattr(signal, name), ending)
    # Imported after that, since it takes seconds.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = run.parse_args(["--signals-to-handle", "SIGQUIT", *argv])
    if options.max_restarts == 0:  # else its lines tell why ranks start again
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(
            logging.CRITICAL
        )
    try:
        run.run(options)
    except ChildFailedError as error:
        # Code that a signal interrupts may lose the exception that its handler raises.
        return status_of_failed(error) if ending.status is None else ending.status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
