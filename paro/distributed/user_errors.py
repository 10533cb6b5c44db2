"""How an entry script ends: errors of users and the machine in one line, bugs with a traceback."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from paro.errors import (
    PeerError,
    RunError,
    UserError,
    describe,
    is_memory_failure,
    is_storage_failure,
)

# Ranks that are started together may reach the same error this many seconds apart.
_PRINTING_RANK_SECONDS = 20.0
_LAGGARD_SECONDS = 1.0


def run_script(name: str, main: Callable[[], None]) -> NoReturn:
    """Runs an entry script and exits: 0, 2 after a user's mistake, 130 after Ctrl-C, else 1.

    An error that all ranks raise, or Ctrl-C, is one line of local rank 0; torchrun repeats the
    error in its final report. The process exits without cleanup: after a failure threads may hang
    in a collective with a dead peer, and after success interpreter shutdown sometimes aborts
    because of gloo's threads.
    """
    try:
        main()
    except UserError as error:
        _leave_with_line(name, str(error), 2, on_this_rank=error.on_this_rank)
    except RunError as error:
        _leave_with_line(name, str(error), 1, on_this_rank=False)
    except PeerError as error:
        _wait_for_printing_rank(1)
        if _local_rank() == 0:
            print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        _leave(1)
    except KeyboardInterrupt:
        if _local_rank() == 0:
            print(f"{name}: interrupted", file=sys.stderr, flush=True)
        _leave(130)
    except SystemExit as leaving:
        _leave(leaving.code if isinstance(leaving.code, int) else 1)
    except BaseException as error:
        if is_storage_failure(error) or is_memory_failure(error):
            _leave_with_line(name, describe(error), 1, on_this_rank=True)
        traceback.print_exc()
        _leave(1)
    _leave(0)


def _local_rank() -> int:
    text = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", ""))
    return int(text) if text.isdigit() else 0  # what is no number is a mistake of the environment


def _leave_with_line(name: str, text: str, status: int, *, on_this_rank: bool) -> NoReturn:
    """Exits; before that local rank 0 prints the error, or this rank if only this one met it."""
    line = f"{name}: error: {text}"
    _write_for_torchrun(line)
    if _local_rank() != 0 and not on_this_rank:
        _wait_for_printing_rank(status)
    else:
        print(line, file=sys.stderr, flush=True)
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1 and not on_this_rank:
            time.sleep(_LAGGARD_SECONDS)  # so that the others reach the error too
    _leave(status)


def _write_for_torchrun(line: str) -> None:
    """Writes the error file that torchrun reads for its report of a failed rank."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def _wait_for_printing_rank(status: int) -> None:
    """Gives the rank that prints the error time to reach it.

    A launcher stops all ranks as soon as one has exited; then this one exits with its status.
    """
    signal.signal(signal.SIGTERM, lambda *_: _leave(status))
    time.sleep(_PRINTING_RANK_SECONDS)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
