"""Makes and removes the namespaces and links of a cluster; never touches those of others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paro.errors import UserError, about
from tools.cluster.plan import SETTINGS, Batch, batches
from tools.cluster.spec import ClusterSpec, is_namespace_of, mark_of

NETNS = Path("/run/netns")  # where iproute2 keeps names of namespaces


def check_system() -> None:
    """Raise `UserError` unless this user is root and the tools for a cluster are installed."""
    if os.geteuid() != 0:
        raise UserError("needs root, to make network namespaces and shape links")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UserError(f"needs {' and '.join(missing)}: install the package iproute2")


def run_tool(command: Sequence[str], text: str = "") -> str:
    """Return the output of a command; `UserError` in one line with the command and its error.

    A terminal's Ctrl-C does not reach the command, so it is never interrupted.
    """
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, start_new_session=True
    )
    if done.returncode != 0:
        complaint = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise UserError(f"`{' '.join(command)}` failed: {complaint}")
    return done.stdout


def build(spec: ClusterSpec, made: list[str]) -> Iterator[None]:
    """Make a cluster step by step: its namespaces, recorded in `made`, and all that is in them."""
    for namespace in spec.namespaces:
        _make_namespace(namespace, mark_of(spec.name), made)
        yield
    for batch in batches(spec):
        _run_batch(batch)
        yield


def _make_namespace(namespace: str, mark: str, made: list[str]) -> None:
    if (NETNS / namespace).exists():
        raise UserError(f"the network namespace {namespace} exists already; choose another --name")
    run_tool(["ip", "netns", "add", namespace])
    made.append(namespace)
    run_tool(["ip", "-n", namespace, "link", "set", "dev", "lo", "alias", mark])
    root = Path("/proc/sys")
    settings = [f"echo {value} > {root / name}" for name, value in SETTINGS.items()
                if (root / name).exists()]  # fmt: skip
    run_tool(["ip", "netns", "exec", namespace, "sh", "-ec", "\n".join(settings)])


def _run_batch(batch: Batch) -> None:
    if batch.lines:
        command = [batch.tool, "-n", batch.namespace, "-batch", "-"]
        with about(suffix="; does the kernel have veth, bridge and sch_tbf?"):
            run_tool(command, "\n".join(batch.lines) + "\n")


def remove(namespace: str) -> None:
    """Remove a namespace with all links in it, if it exists."""
    if (NETNS / namespace).exists():
        run_tool(["ip", "netns", "delete", namespace])


def links(namespace: str) -> list[dict[str, Any]]:
    """Return the links of a namespace as `ip -json` lists them; none for a dangling name."""
    try:
        described: list[dict[str, Any]] = json.loads(
            run_tool(["ip", "-n", namespace, "-json", "-statistics", "link", "show"])
        )
    except UserError:
        return []
    return described


def namespaces_of(name: str, *, unfinished: bool = False) -> tuple[list[str], list[str]]:
    """Return the namespaces of a cluster, and unmarked ones with names like its own.

    One without a mark counts as the cluster's if it is still empty and `unfinished`: its creation
    was interrupted.
    """
    ours: list[str] = []
    others: list[str] = []
    for path in sorted(NETNS.glob("paro-*")):
        if not is_namespace_of(name, path.name):
            continue
        inside = links(path.name)
        marked = any(link.get("ifalias") == mark_of(name) for link in inside)
        is_ours = marked or (unfinished and len(inside) <= 1)
        (ours if is_ours else others).append(path.name)
    return ours, others


def check_namespaces(spec: ClusterSpec) -> None:
    """Raise `UserError` with the parts of a cluster that were removed from outside."""
    missing = [namespace for namespace in spec.namespaces if not (NETNS / namespace).exists()]
    if missing:
        raise UserError(
            f"cluster {spec.name!r} has lost {', '.join(missing)}; take it `down` and `up` again"
        )
