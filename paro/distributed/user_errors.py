"""User mistakes: reported in one line, with exit status 2 on every rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from paro.errors import MistakesError

# Ranks that are started together may reach the same mistake this many seconds apart.
_SPEAKER_SECONDS = 20.0
_LAGGARD_SECONDS = 1.0


class UserMistakeError(Exception):
    """A mistake that the user can correct; its text is the one line that is printed.

    All ranks raise it and local rank 0 prints it. With `on_this_rank` only one rank raises and
    prints it, and the launcher has to stop the others.
    """

    def __init__(self, text: str, *, on_this_rank: bool = False) -> None:
        super().__init__(text)
        self.on_this_rank = on_this_rank


@contextmanager
def user_mistakes() -> Iterator[None]:
    """Turns `ValueError` and `OSError` into `UserMistakeError`, before process groups exist."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserMistakeError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """The text of an error without line breaks; a `MistakesError` keeps one line per mistake."""
    if isinstance(error, MistakesError):
        return str(error)
    return " ".join(str(error).split()) or type(error).__name__


def run_script(name: str, main: Callable[[], None]) -> NoReturn:
    """Runs an entry script and exits: 0, 2 after a user's mistake, 130 after Ctrl-C, else 1.

    Local rank 0 prints a mistake, or Ctrl-C, in one line; torchrun repeats a mistake in its final
    report. The process exits without cleanup: after a failure threads may hang in a collective with
    a dead peer, and after success interpreter shutdown sometimes aborts because of gloo's threads.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
    try:
        main()
    except UserMistakeError as mistake:
        line = f"{name}: error: {mistake}"
        _write_for_torchrun(line)
        if local_rank != 0 and not mistake.on_this_rank:
            _wait_for_the_speaker()
        else:
            print(line, file=sys.stderr, flush=True)
            if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1 and not mistake.on_this_rank:
                time.sleep(_LAGGARD_SECONDS)  # so that the others reach the mistake too
        _leave(2)
    except KeyboardInterrupt:
        if local_rank == 0:
            print(f"{name}: interrupted", file=sys.stderr, flush=True)
        _leave(130)
    except SystemExit as leaving:
        _leave(leaving.code if isinstance(leaving.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _write_for_torchrun(line: str) -> None:
    """Writes the error file that torchrun reads for its report of a failed rank."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def _wait_for_the_speaker() -> None:
    """Gives local rank 0 time to reach the mistake and print it.

    A launcher stops all ranks as soon as one has exited; then this one exits with status 2 too.
    """
    signal.signal(signal.SIGTERM, lambda *_: _leave(2))
    time.sleep(_SPEAKER_SECONDS)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
