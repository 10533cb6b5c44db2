"""A cluster's state between commands: its folder, its state file and its lock."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from paro.errors import UserError, about
from paro.files.atomic_file import replacing
from paro.files.schema import read_json
from paro.files.waits import try_lock
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
    """Return the folder of a cluster's files while it exists; creating it claims the name."""
    return RUNTIME / f"{PREFIX}{name}"


def claim(name: str) -> None:
    """Make the folder of a new cluster; `UserError` says why a name is not available."""
    try:
        folder_of(name).mkdir()
    except FileExistsError:
        cluster = load(name)
        if cluster is None or cluster.status != "up":
            raise UserError(_half_made(name)) from None
        raise UserError(
            f"cluster {name!r} is up already ({cluster.spec.describe()}); "
            "take it `down` first or choose another --name"
        ) from None


def forget(name: str) -> None:
    """Remove a cluster's files."""
    if folder_of(name).exists():
        shutil.rmtree(folder_of(name))


def save(cluster: Cluster) -> None:
    """Write the state file."""
    path = folder_of(cluster.spec.name) / "state.json"
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(asdict(cluster), indent=1) + "\n", encoding="utf-8")


def load(name: str) -> Cluster | None:
    """Return the content of the state file; None if there is no file."""
    path = folder_of(name) / "state.json"
    if not path.exists():
        return None
    with about(suffix=f"; `down --name {name}` removes the cluster"):
        found: Cluster = read_json(path, Cluster)
    return found


def open_cluster(name: str = "default") -> Cluster:
    """Return the cluster of this name; `UserError` if it is not up."""
    check_name(name)
    cluster = load(name)
    if cluster is None and not folder_of(name).exists():
        names = sorted(path.name.removeprefix(PREFIX) for path in RUNTIME.glob(f"{PREFIX}*"))
        others = f"; there are {', '.join(names)}" if names else ""
        raise UserError(f"no cluster {name!r} is up{others}")
    if cluster is None or cluster.status != "up":
        raise UserError(_half_made(name))
    return cluster


@contextmanager
def locked(name: str) -> Iterator[bool]:
    """Try to hold the cluster's lock for a block; yield whether it does.

    The kernel releases the lock when a process ends, for whatever reason.
    """
    descriptor = os.open(folder_of(name), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


def _half_made(name: str) -> str:
    return f"cluster {name!r} is being made, or its making was cut off: then take it `down`"
