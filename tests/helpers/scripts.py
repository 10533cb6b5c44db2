"""Scripts run as a user would, alone or under torchrun, and processes of this machine."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from tests.helpers.ranks import ROOT, RankError
from tests.helpers.warm_process import HANGS_AFTER, warm_process

# torchrun gets this long to end its ranks; it kills them itself after 30 s.
_GRACE_SECONDS = 45.0


class Script:
    """A script (`args[0]`) that runs from the repository's root: alone, or under torchrun.

    `env` is added to this process's environment, and `before` is called in the new process, whose
    ranks inherit what it changes. All processes are forked from one that has imported torch, which
    saves seconds for each; torchrun's agent itself is the real one. Output is kept in `folder`.
    """

    def __init__(
        self,
        args: Sequence[object],
        nproc: int = 0,
        *,
        folder: Path,
        env: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.words = list(map(str, args))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self._outputs = [folder / stream for stream in ("stdout", "stderr")]
        self._process = warm_process(
            _run_command, self.words, nproc, environment, self._outputs, before, name="script"
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status; minus the number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int | None:
        self._process.join(timeout)
        return self.status

    def output(self) -> tuple[str, str]:
        """What it has written so far to standard output and standard error."""
        stdout, stderr = (path.read_text() if path.exists() else "" for path in self._outputs)
        return stdout, stderr

    def end(self) -> None:
        """Ends it if it runs; torchrun, asked politely, ends its ranks, which only it knows."""
        if self.status is None:
            self._process.terminate()
            self._process.join(_GRACE_SECONDS)
            self._process.kill()
            self._process.join()


def run_script(
    args: Sequence[object],
    nproc: int = 0,
    *,
    env: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
    timeout: float = HANGS_AFTER,
) -> subprocess.CompletedProcess[str]:
    """Runs a `Script` to its end: under torchrun, or plain with nproc 0."""
    with TemporaryDirectory() as name:
        script = Script(args, nproc, folder=Path(name), env=env, before=before)
        try:
            status = script.wait(timeout)
        finally:
            script.end()
        stdout, stderr = script.output()
    if status is None:
        tails = f"{stdout[-4000:]}\n{stderr[-4000:]}"
        raise RankError(f"{script.words} did not end within {timeout} s\n{tails}")
    return subprocess.CompletedProcess(script.words, status, stdout, stderr)


def _run_command(
    words: list[str],
    nproc: int,
    environment: dict[str, str],
    outputs: list[Path],
    before: Callable[[], None] | None,
) -> None:
    """In the forked process: takes its streams and environment, runs, and leaves as Python does."""
    gc.freeze()  # a collection would copy every page that this process shares with the server
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    if before is not None:
        before()
    sys.exit(status_of(lambda: _run_with_torchrun(words, nproc) if nproc else _run_file(*words)))


class _ForkedPopen(subprocess.Popen[bytes]):
    """A Python script in a fork of this process, where a fresh interpreter is asked for."""

    def _execute_child(self, args: tuple[str, ...], *others: Any) -> None:
        _, _, *words = args
        environment = others[5]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # torchrun handles them
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.clear()
            os.environ.update(environment)
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)  # type: ignore[union-attr]
            os._exit(status_of(lambda: _run_file(*words)))


def fork_ranks() -> None:
    """Makes torchrun, in this process, fork its ranks unless they are no Python scripts."""
    own = SubprocessHandler._popen

    def popen(
        handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        unbuffered = args[:2] == (sys.executable, "-u")  # as torchrun starts Python
        return _ForkedPopen(args, env=env) if unbuffered else own(handler, args, env)

    SubprocessHandler._popen = popen  # type: ignore[method-assign, assignment]


def _run_with_torchrun(words: list[str], nproc: int) -> None:
    fork_ranks()
    torchrun.main(["--standalone", f"--nproc-per-node={nproc}", *words])


def _run_file(script: str, *words: str) -> None:
    sys.argv = [script, *words]
    sys.path[:] = [str(Path(script).resolve().parent), *(p for p in sys.path if p != str(ROOT))]
    runpy.run_path(script, run_name="__main__")


def status_of(run: Callable[[], None]) -> int:
    """What Python would leave with."""
    try:
        run()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def lives(pid: int) -> bool:
    """Whether a process exists and is more than an exit status that nobody has read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The processes that one has started; of one that is gone, none."""
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(word) for word in words]


def wait_for(is_so: Callable[[], object], seconds: float = HANGS_AFTER) -> None:
    """Waits until something is so; fails if it is not in this time."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def python_apart(program: str, *words: str, **environment: str) -> str:
    """Returns what a program prints in a new Python, without Triton's interpreter."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        env=own | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
