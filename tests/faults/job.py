"""A training that a test disturbs: starts it, pauses it at a point, or strikes at its place."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from paro.checkpoint.directory import iterations_in, latest_iteration
from paro.checkpoint.manifest import read_manifest
from tests.end_to_end.test_training import MODEL
from tests.helpers.scripts import Script, children, lives

ITERATIONS = 12
FLAGS = [
    *(*MODEL, "--eval-iters", "1", "--eval-interval", "5", "--paro-strategy", "NNG"),
    *("--distributed-timeout-minutes", "1", "--train-iters", str(ITERATIONS)),
    *("--save-interval", "3"),
]
LIMIT_SECONDS = 60.0  # the least that --distributed-timeout-minutes takes
_START_SECONDS = 90.0  # on a busy machine


class Point(StrEnum):
    """A function as `package.module:Class.function`, in the module where its callers look it up."""

    RENDEZVOUS = "paro.distributed.process_group:open_store"
    BUILDING = "paro.launch.setup:check_memory"
    READ_SAMPLE = "data.gpt_dataset:GPTDataset.__getitem__"
    READ_MOCK_SAMPLE = "data.batch:MockDataset.__getitem__"
    BUILD_INDEX = "data.gpt_dataset:build_order"
    STEP = "paro.training.loop:train_step"
    MICRO_BATCH = "paro.sharding.distributed_model:DistributedModel.forward_backward"
    EVALUATE = "paro.training.loop:evaluate"
    CLAIM_FOLDER = "paro.checkpoint.agreement:attempts_to_lock"
    WRITE_FILES = "paro.checkpoint.save:write_files"
    WRITE_DATA = "paro.checkpoint.storage:BoundedWriter.write_data"
    UPLOAD = "paro.files.object_store:StorePath.upload"
    READ_BACK = "paro.checkpoint.save:_read_back"
    COPY = "paro.checkpoint.in_memory.snapshot:SnapshotWriter.write"
    ROUND = "paro.optim.outer:OuterUnit.begin"
    BARRIER = "paro.distributed.control:Control.barrier"
    CLOSE_REPORT = "paro.report.report:Report.close"


@dataclass(frozen=True, slots=True)
class Pause:
    """For `before`: the ranks stop where they call a function, until `Run.release`."""

    folder: Path
    target: Point
    call: int = 1
    only: int | None = None  # rank
    first: Callable[[], object] = int  # to call before

    def __call__(self) -> None:
        self.first()
        module, _, name = self.target.partition(":")
        owner: Any = importlib.import_module(module)
        *parts, last = name.split(".")
        for part in parts:
            owner = getattr(owner, part)
        original, calls = getattr(owner, last), itertools.count(1)

        def paused(*args: Any, **named: Any) -> Any:
            rank = os.environ.get("RANK", "0")
            if next(calls) == self.call and self.only in (None, int(rank)):
                (self.folder / f"paused_{rank}").touch()
                while not (self.folder / "released").exists():
                    time.sleep(0.01)
            return original(*args, **named)

        setattr(owner, last, paused)

    def ranks(self) -> int:
        return len(list(self.folder.glob("paused_*")))


@dataclass(frozen=True, slots=True)
class Run:
    """The folder of a run, which its starts share."""

    root: Path
    store: Path | None = None  # to save into

    @property
    def save(self) -> Path:
        return self.store or self.root / "ckpt"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    def start(self, *flags: object, **how: Any) -> Job:
        paths = ["--save", self.save, "--load", self.save, "--metrics-file", self.metrics]
        data = [] if "--data-path" in flags else ["--mock-data"]
        return Job(self.root, [*FLAGS, *data, *paths, *flags], **how)

    def release(self) -> None:
        (self.root / "released").touch()

    def saved(self) -> int:
        """The iteration to resume from; fails unless it and all others are complete."""
        for iteration in iterations_in(self.save):
            manifest = read_manifest(self.save / f"iter_{iteration:07d}")
            manifest.verify()
        return latest_iteration(self.save) or 0

    def steps(self) -> list[tuple[Any, ...]]:
        """What must be the same bit for bit in an undisturbed run."""
        records = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        names = ("iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate")
        return [tuple(record[name] for name in names) for record in records]

    def final_sums(self) -> dict[str, Any]:
        """The checksums of the tensors of the last checkpoint."""
        manifest = read_manifest(self.save / f"iter_{ITERATIONS:07d}")
        files = manifest.files.items()  # in a store the names begin with other words
        return {n.rpartition("__")[2]: sums for n, sums in files if n.endswith(".distcp")}


class Job:
    """One start of a run: under torchrun's agent, or (`plain`) ranks as srun would start them."""

    def __init__(
        self,
        root: Path,
        flags: Sequence[object],
        *,
        ranks: int = 2,
        plain: bool = False,
        before: Sequence[Callable[[], None]] = (),  # one, or with `plain` one for each rank
        own: Sequence[Sequence[object]] = (),  # with `plain`: more flags of each rank
        env: dict[str, str] | None = None,
    ) -> None:
        self._is_plain = plain
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        self.scripts: list[Script] = []
        count = ranks if plain else 1
        for rank in range(count):
            folder = root / f"start_{len(list(root.glob('start_*')))}"
            folder.mkdir(parents=True)
            more = own[rank] if own else ()
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
            self.scripts.append(
                Script(
                    ["pretrain_llama.py", *flags, *more],
                    0 if plain else ranks,
                    folder=folder,
                    env={**({**address, **sizes, **place} if plain else {}), **(env or {})},
                    before=before[min(rank, len(before) - 1)] if before else None,
                )
            )

    def text(self) -> str:
        return "".join("".join(script.output()) for script in self.scripts)

    def errors(self) -> list[str]:
        """The lines that say why it ended, without what torchrun repeats."""
        lines = self.text().splitlines()
        return [line for line in lines if line.startswith("pretrain_llama.py: error: ")]

    def tail(self) -> str:
        return "\n".join(self.own_text().splitlines()[-30:])

    def own_text(self) -> str:
        """The same without the traceback that torchrun's agent adds."""
        lines = self.text().splitlines()
        agents = (n for n, line in enumerate(lines) if "torch/distributed/elastic" in line)
        return "\n".join(lines if self._is_plain else lines[: next(agents, len(lines))])

    def pids(self) -> list[int]:
        if self._is_plain:
            return [script.pid for script in self.scripts]
        return children(self.scripts[0].pid)

    def tree(self) -> list[int]:
        found = [script.pid for script in self.scripts]
        for pid in found:
            found += children(pid)
        return found

    def signal(self, number: int, rank: int | None = None) -> None:
        os.kill(self.scripts[0].pid if rank is None else self.pids()[rank], number)

    def wait_for(self, is_so: Callable[[], bool], seconds: float = _START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            assert any(script.status is None for script in self.scripts), self.tail()
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.01)

    def steps_printed(self) -> int:
        return max(map(int, re.findall(r"\] iteration +(\d+)/", self.text())), default=0)

    def end(self, seconds: float) -> list[int]:
        """The exit statuses; fails, and ends it, if it lasts longer."""
        deadline = time.monotonic() + seconds
        pids = self.pids()
        statuses = [script.wait(max(0.0, deadline - time.monotonic())) for script in self.scripts]
        if None in statuses:
            self.kill()
            raise AssertionError(f"no end within {seconds:.0f} s: {self.tail()}")
        while any(map(lives, pids)):
            assert time.monotonic() < deadline, "ranks outlive their agent"
            time.sleep(0.01)
        return [status for status in statuses if status is not None]

    def kill(self) -> None:
        for pid in [pid for pid in reversed(self.tree()) if lives(pid)]:
            os.kill(pid, signal.SIGKILL)
        for script in self.scripts:
            script.end()


_NEW_UTS = 0x04000000  # of unshare, in linux/sched.h
_NEW_PID = 0x20000000
_NEW_NET = 0x40000000
_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def other_host() -> None:
    """For `before`: the script runs where no process of this host is known, under another name."""
    _check(_LIBC.unshare(_NEW_UTS | _NEW_PID))
    socket.sethostname("node7")
    child = os.fork()
    if child:  # only children are in the new namespace
        _, status = os.waitpid(child, 0)
        sys.stdout.flush()
        os._exit(os.waitstatus_to_exitcode(status) % 256)
    _LIBC.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Node:
    """For `before`: the script runs in a network namespace."""

    name: str

    def __call__(self) -> None:
        descriptor = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        _check(_LIBC.setns(descriptor, _NEW_NET))
        os.close(descriptor)

    def ip(self, *words: str) -> None:
        _run("ip", "-n", self.name, *words)

    def set_link(self, state: str) -> None:
        self.ip("link", "set", "nic", state)


def print_into(path: Path) -> None:
    """For `before`: standard output is a file."""
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)


def no_reader() -> None:
    """For `before`: standard output is a pipe whose reader has ended."""
    here, there = os.pipe()
    os.dup2(there, 1)
    os.close(here)


@contextmanager
def two_nodes(name: str) -> Iterator[tuple[Node, Node]]:
    """Two namespaces with a link between them: 10.78.0.1 and 10.78.0.2, each on `nic`."""
    nodes = Node(f"{name}-0"), Node(f"{name}-1")
    try:
        for node in nodes:
            _run("ip", "netns", "add", node.name)
            node.ip("link", "set", "lo", "up")
        peer = ["peer", "name", "nic", "netns", nodes[1].name]
        nodes[0].ip("link", "add", "nic", "type", "veth", *peer)
        for number, node in enumerate(nodes, start=1):
            node.ip("addr", "add", f"10.78.0.{number}/24", "dev", "nic")
            node.set_link("up")
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "delete", node.name], check=False)


@contextmanager
def small_disk(path: Path, size: str = "8m") -> Iterator[Path]:
    """A file system of `size`, for the block."""
    path.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))
    try:
        yield path
    finally:
        while os.path.ismount(path):
            _run("umount", "-l", str(path))


def fill(folder: Path) -> Path:
    """Leaves no byte free on a file system; returns the file to remove."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as stream:
        try:
            while stream.write(bytes(2**16)):
                pass
        except OSError:
            return path
    raise AssertionError("a write of no bytes")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
