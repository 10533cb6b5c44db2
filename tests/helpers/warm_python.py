"""A `python` for shell scripts of tests, whose processes have torch and the project imported."""

from __future__ import annotations

import atexit
import ctypes
import gc
import marshal
import multiprocessing
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import connection
from pathlib import Path
from tempfile import mkdtemp

from tests.helpers.warm_process import HANGS_AFTER, warm_process

# Has the place of the process in the shell: passes its signals on, and ends as it ends.
CLIENT = """#!{python} -IS
import marshal, os, signal, socket, sys
if sys.argv[1:2] not in (["-u"], ["-P"], ["-m"], ["-c"]) and sys.argv[1].startswith("-"):
    os.execv({python!r}, ["python", *sys.argv[1:]])
passed_on = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM]
ignored = [int(number) for number in passed_on if signal.getsignal(number) is signal.SIG_IGN]
early = []
for number in set(passed_on) - set(ignored):
    signal.signal(number, lambda number, _: early.append(number))
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
task = marshal.dumps((sys.argv[1:], os.getcwd(), dict(os.environ), ignored))
places = [os.open("/proc/self/ns/" + kind, os.O_RDONLY) for kind in {namespaces!r}]
socket.send_fds(server, [len(task).to_bytes(8, "big")], [0, 1, 2, *places])
server.sendall(task)
pid = int.from_bytes(server.recv(8), "big")
assert pid, "the server is gone"
for number in set(passed_on) - set(ignored):
    signal.signal(number, lambda number, _: os.kill(pid, number))
for number in early:
    os.kill(pid, number)
status = int.from_bytes(server.recv(8), "big", signed=True)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -9 else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


ROOT = Path(__file__).resolve().parents[2]

# Those of a node of an emulated cluster.
NAMESPACES = ("net", "uts", "mnt")
_LIBC = ctypes.CDLL(None, use_errno=True)


@cache
def warm_python(executable: str | None = None) -> Path:
    """A folder with a `python` that runs what a new one would, without importing torch again.

    For a PATH of shell scripts, or as `sys.executable`. It takes a script, `-m` or `-c`, and has
    the folder, environment, streams, signals and namespaces of who starts it; torchrun forks its
    ranks, and `sys.executable` is this one again unless another is given. Its parent is another
    process, and /proc shows another environment.
    """
    folder = Path(mkdtemp(prefix="python-"))  # not below tmp_path: names of sockets are short
    atexit.register(shutil.rmtree, folder)
    address = str(folder / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    python = folder / "python"
    server = warm_process(_serve, listener, executable or str(python), name="warm python")
    server.start()
    atexit.register(server.kill)
    listener.close()
    client = CLIENT.format(python=sys.executable, address=address, namespaces=NAMESPACES)
    python.write_text(client)
    python.chmod(0o755)
    return folder


def run_python(
    words: Sequence[object], timeout: float = HANGS_AFTER, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script, from the repository's root, whose own Python processes start as quickly."""
    return subprocess.run(
        [warm_python() / "python", *map(str, words)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def _serve(listener: socket.socket, executable: str) -> None:
    """Forks a process for each task until the process of the tests ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal; clients have it too
    sys.executable = executable
    gc.freeze()
    while listener in connection.wait([listener, parent.sentinel]):
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _start(client)
        client.close()


def _start(client: socket.socket) -> None:
    """Starts one process, tells its client the id and the status, and ends it with its client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, received, _, _ = socket.recv_fds(client, 8, 3 + len(NAMESPACES))
    task = client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    pid = os.fork()
    if pid == 0:
        client.close()
        _enter(received[3:])
        _run(received[:3], *marshal.loads(task))
    for stream in (0, 1, 2, *received):
        os.close(stream)
    with suppress(BrokenPipeError):  # it may be gone already
        client.sendall(pid.to_bytes(8, "big"))
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, client.fileno()], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    client.sendall(status.to_bytes(8, "big", signed=True))
    os._exit(0)


def _enter(namespaces: Sequence[int]) -> None:
    """Moves this process to other namespaces, which only root can have made."""
    for kind, descriptor in zip(NAMESPACES, namespaces, strict=True):
        if not os.path.samestat(os.fstat(descriptor), os.stat(f"/proc/self/ns/{kind}")):
            assert _LIBC.setns(descriptor, 0) == 0, os.strerror(ctypes.get_errno())
        os.close(descriptor)


def _run(
    streams: Sequence[int],
    words: list[str],
    folder: str,
    environment: dict[str, str],
    ignored: Sequence[int],
) -> None:
    """Becomes the process that was asked for."""
    from tests.helpers.scripts import fork_ranks, status_of  # here, because it imports torch

    for default in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(default, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for own, stream in enumerate(streams):
        os.dup2(stream, own)
        os.close(stream)
    options = words[: next(at for at, word in enumerate(words) if word not in ("-u", "-P"))]
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put the null device in its place
    for output in (sys.stdout, sys.stderr):
        output.reconfigure(  # type: ignore[union-attr]
            line_buffering=output.isatty(), write_through="-u" in options
        )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    fork_ranks()
    status = status_of(lambda: _python(words[len(options) :], safe_path="-P" in options))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(status)


def _python(words: list[str], *, safe_path: bool) -> None:
    """What Python does with these words of its command line."""
    kind, *others = words
    first = os.getcwd() if kind in ("-m", "-c") else str(Path(kind).resolve().parent)
    given = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    own = [] if safe_path else [first]
    sys.path[:] = [*own, *given, *(path for path in sys.path if path != str(ROOT))]
    if kind == "-m":
        sys.argv = others
        sys.modules.pop(others[0], None)  # else runpy warns of a module that is there already
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *others[1:]]
        exec(others[0], {"__name__": "__main__"})
    else:
        sys.argv = words
        runpy.run_path(kind, run_name="__main__")
