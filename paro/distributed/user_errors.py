"""Mistakes that a user can correct: one line, exit status 2, on every rank."""

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

# Ranks that start together may differ by this much until they have read their flags.
_SPEAKER_SECONDS = 20.0
_LAGGARD_SECONDS = 1.0


class UserMistakeError(Exception):
    """What a user can mend; its text is the one line that they see.

    All ranks raise it alike, and local rank 0 prints it; unless `on_this_rank`, where one rank
    met it alone and the launcher has to stop the others.
    """

    def __init__(self, text: str, *, on_this_rank: bool = False) -> None:
        super().__init__(text)
        self.on_this_rank = on_this_rank


@contextmanager
def user_mistakes() -> Iterator[None]:
    """Turns what a user can mend into their one line, before there are any peers."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserMistakeError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """What an error says without its line breaks; of several mistakes each keeps its line."""
    if isinstance(error, MistakesError):
        return str(error)
    return " ".join(str(error).split()) or type(error).__name__


def run_script(name: str, main: Callable[[], None]) -> NoReturn:
    """Runs an entry script and exits: 0, or 2 after a user's mistake, or 1 after any failure.

    A mistake is one line, printed by local rank 0, and once more in torchrun's report at the end;
    so is Ctrl-C, with 130. The process leaves at once in any case: after a failure threads may hang
    in a collective with a peer that is gone, and after a good end the interpreter's own tear-down
    now and then aborts among the threads of gloo.
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
                time.sleep(_LAGGARD_SECONDS)  # so that the others come to the mistake too
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
    """Writes the file from which torchrun takes what its report says of a rank that failed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def _wait_for_the_speaker() -> None:
    """Gives local rank 0 the time to come to the mistake and print it.

    A launcher ends all ranks as soon as one has left; then this one leaves with the same status.
    """
    signal.signal(signal.SIGTERM, lambda *_: _leave(2))
    time.sleep(_SPEAKER_SECONDS)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
