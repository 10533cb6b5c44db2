"""What is known of a cluster between two commands: its folder, its state file and its lock."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from data.atomic_file import replacing
from tools.cluster.spec import ClusterSpec, check_name

RUNTIME = Path("/run")
PREFIX = "paro-cluster-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster as its state file describes it.

    `baseline` is what the counters showed when they were last set to zero.
    """

    spec: ClusterSpec
    status: Literal["building", "up"]
    baseline: dict[str, int] = field(default_factory=dict)


def folder_of(name: str) -> Path:
    """Where a cluster's files lie for as long as it exists; to make it is to claim the name."""
    return RUNTIME / f"{PREFIX}{name}"


def claim(name: str) -> None:
    """Makes the folder of a new cluster, or says why that name cannot be had."""
    try:
        folder_of(name).mkdir()
    except FileExistsError:
        cluster = load(name)
        if cluster is None or cluster.status != "up":
            raise ValueError(_half_made(name)) from None
        raise ValueError(
            f"cluster {name!r} is up already ({cluster.spec.describe()}); "
            "take it `down` first or choose another --name"
        ) from None


def forget(name: str) -> None:
    """Removes a cluster's files."""
    if folder_of(name).exists():
        shutil.rmtree(folder_of(name))


def save(cluster: Cluster) -> None:
    """Writes the state file."""
    path = folder_of(cluster.spec.name) / "state.json"
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(asdict(cluster), indent=1) + "\n", encoding="utf-8")


def load(name: str) -> Cluster | None:
    """What the state file says; None where there is none."""
    path = folder_of(name) / "state.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Cluster(**{**fields, "spec": ClusterSpec(**fields["spec"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); `down --name {name}` removes the cluster"
        ) from None


def open_cluster(name: str = "default") -> Cluster:
    """The cluster so called, which has to be up."""
    check_name(name)
    cluster = load(name)
    if cluster is None and not folder_of(name).exists():
        names = sorted(path.name.removeprefix(PREFIX) for path in RUNTIME.glob(f"{PREFIX}*"))
        others = f"; there are {', '.join(names)}" if names else ""
        raise ValueError(f"no cluster {name!r} is up{others}")
    if cluster is None or cluster.status != "up":
        raise ValueError(_half_made(name))
    return cluster


@contextmanager
def locked(name: str) -> Iterator[bool]:
    """Holds the cluster's lock for a block if nobody else does: the block is told which.

    The kernel lets go of the lock when a process ends, however it does.
    """
    descriptor = os.open(folder_of(name), os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _half_made(name: str) -> str:
    return f"cluster {name!r} is being made, or its making was cut off: then take it `down`"
