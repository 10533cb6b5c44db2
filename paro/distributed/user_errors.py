"""How an entry script ends: errors of users and the machine in one line, bugs with a traceback."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from paro.distributed.world import (
    is_started_by_agent,
    launcher_ends_ranks,
    local_rank_to_print,
    read_error_file,
)
from paro.errors import (
    PeerError,
    RunError,
    UserError,
    describe,
    is_memory_failure,
    is_storage_failure,
    lost_peer,
    open_files_limit,
    printing,
    shown,
)

# Ranks that are started together may reach the same error at most so many seconds apart.
_PRINTING_RANK_SECONDS = 20.0
_LAGGARD_SECONDS = 1.0
# Seconds in which a launcher ends the other ranks once a rank has left (and told why).
_LOST_PEER_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1  # option of prctl, from linux/prctl.h


def run_script(name: str, main: Callable[[], None]) -> NoReturn:
    """Run an entry script and exit: 0, 2 after a user's mistake, 130 after Ctrl-C, else 1.

    If the reader of standard output ends first, as `head` does, the exit status is 141, as after
    SIGPIPE, and nothing is printed.

    An error that all ranks raise, or Ctrl-C, is one line of local rank 0; torchrun repeats the
    error in its final report. The process exits without cleanup: after a failure threads may hang
    in a collective with a dead peer, and after success interpreter shutdown sometimes aborts
    because of gloo's threads.
    """
    _open_closed_streams()
    try:
        status = _status_of(main)
        with printing():
            sys.stdout.flush()
    except UserError as error:
        _leave_with_line(name, describe(error), 2, on_this_rank=error.on_this_rank)
    except RunError as error:
        _leave_with_line(name, str(error), 1, on_this_rank=error.on_this_rank)
    except KeyboardInterrupt:
        if local_rank_to_print() == 0:
            _print_error(f"{name}: interrupted")
        _leave(130)
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout.fileno()):
            _leave(128 + signal.SIGPIPE)
        if (limit := open_files_limit(error)) is not None:
            _leave_with_line(name, limit, 2, on_this_rank=True)
        if isinstance(error, PeerError):
            _wait_to_be_ended(1, _PRINTING_RANK_SECONDS)
            if local_rank_to_print() == 0:
                _print_error(f"{name}: error: {error}")
            _leave(1)
        if (lost := lost_peer(error)) is not None:
            is_printing_rank = local_rank_to_print() == 0
            if is_printing_rank:
                _wait_to_be_ended(1, _LOST_PEER_SECONDS)
            _leave_with_line(name, lost, 1, on_this_rank=is_printing_rank)
        if is_storage_failure(error) or is_memory_failure(error):
            _leave_with_line(name, describe(error), 1, on_this_rank=True)
        _print_error(traceback.format_exc().rstrip("\n"))
        _leave(1)
    _leave(status)


def _status_of(main: Callable[[], None]) -> int:
    try:
        main()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    return 0


def _has_no_reader(descriptor: int) -> bool:
    """Return whether a descriptor is a pipe or socket whose other end is closed."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _open_closed_streams() -> None:
    """Open standard streams that the shell closed as /dev/null; escape unprintable characters."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:  # else the next opened file would get the descriptor and the output
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _print_error(text: str) -> None:
    with suppress(OSError):  # a full or closed stream: only the status tells
        print(shown(text), file=sys.stderr, flush=True)


def _leave_with_line(name: str, text: str, status: int, *, on_this_rank: bool) -> NoReturn:
    """Print the error on local rank 0, or on this rank if no other rank met it, and exit."""
    line = f"{name}: error: {text}"
    if path := read_error_file():
        extra = {"timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))
    if local_rank_to_print() != 0 and not on_this_rank:
        _wait_to_be_ended(status, _PRINTING_RANK_SECONDS)
    else:
        _print_error(line)
        if launcher_ends_ranks() and not on_this_rank:
            time.sleep(_LAGGARD_SECONDS)  # so that the others reach the error too
    _leave(status)


def _wait_to_be_ended(status: int, seconds: float) -> None:
    """Give the rank that prints the error time to reach the error, where a launcher ends all ranks.

    The launcher ends all ranks as soon as one has exited; this rank then exits with `status`.
    """
    if not launcher_ends_ranks():
        return
    signal.signal(signal.SIGTERM, lambda *_: _leave(status))
    time.sleep(seconds)


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def end_with_agent() -> None:
    """Let the kernel kill this rank when its agent ends; `PeerError` if the agent has ended.

    A rank that outlives the agent would write into the folders of its successor, the restarted
    job; therefore SIGKILL, after which a rank cannot save. Only on Linux, for a rank that
    torchrun's agent started itself; a script in between has to `exec`.
    """
    # torchrun starts each rank as the leader of a new session; a rank of a script is no leader.
    is_direct = is_started_by_agent() and os.getsid(0) == os.getpid()
    if sys.platform != "linux" or not is_direct:
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")
    # If the agent ended earlier, an init process or a process manager has adopted this rank.
    if os.getppid() != parent or not _is_python(parent):
        raise PeerError("torchrun ended before this rank had started")


def _is_python(pid: int) -> bool:
    """Return whether a process is a Python interpreter of this user, as the agent is."""
    try:
        program = Path(f"/proc/{pid}/exe").readlink()
    except OSError:  # another user's, or gone
        return False
    interpreter = Path("/proc/self/exe").readlink()
    return program == interpreter or program.name.startswith(("python", "pypy"))
