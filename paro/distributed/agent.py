"""Ends a rank with torchrun's agent: a rank without one would write where its successor does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from paro.distributed.world import is_started_by_agent
from paro.errors import PeerError

_PR_SET_PDEATHSIG = 1  # of prctl, in linux/prctl.h


def end_with_agent() -> None:
    """From now on the kernel kills this rank when its agent ends; `PeerError` if it has already.

    Only for a rank that torchrun's agent itself started, on Linux; a script in between has to
    `exec`. SIGKILL: a rank that could still save would meet the restarted job in the same folder.
    """
    # torchrun starts each rank in a session of its own; in one of a script it is not the leader.
    is_direct = is_started_by_agent() and os.getsid(0) == os.getpid()
    if sys.platform != "linux" or not is_direct:
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")
    # If it ended before, an init process or a manager of processes has adopted this rank.
    if os.getppid() != parent or not _is_python(parent):
        raise PeerError("torchrun ended before this rank had started")


def _is_python(pid: int) -> bool:
    """Whether a process is a Python interpreter of this user, as the agent is."""
    try:
        program = Path(f"/proc/{pid}/exe").readlink()
    except OSError:  # another user's, or gone
        return False
    own = Path("/proc/self/exe").readlink()
    return program == own or program.name.startswith(("python", "pypy"))
