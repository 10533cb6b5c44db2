"""Where a fault happens: another host, a network namespace with a link, a small file system."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class Printing:
    """For `before`: standard output is a file."""

    path: Path

    def __call__(self) -> None:
        os.dup2(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)


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
