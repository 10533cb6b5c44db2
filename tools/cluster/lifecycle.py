"""Brings a cluster up, completely or not at all, and takes it down with everything in it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from paro.errors import UserError
from tools.cluster import network, state
from tools.cluster.counters import counters
from tools.cluster.interrupts import exit_by_signal, handling, noting
from tools.cluster.processes import end_processes
from tools.cluster.spec import ClusterSpec, check_name
from tools.cluster.state import Cluster

# How long a run may take to notice that its nodes were ended.
_STOP_SECONDS = 15.0


def up(spec: ClusterSpec) -> Cluster:
    """Make a cluster; on any failure or signal, remove what was made so far."""
    network.check_system()
    made: list[str] = []
    with noting() as end_if_noted:
        state.claim(spec.name)
        try:
            with state.locked(spec.name):
                cluster = Cluster(spec=spec, status="building")
                state.save(cluster)
                for _ in network.build(spec, made):
                    end_if_noted()
                cluster = replace(cluster, status="up", baseline=counters(spec))
                state.save(cluster)
                end_if_noted()
        except BaseException:
            for namespace in reversed(made):
                network.remove(namespace)
            state.forget(spec.name)
            raise
    return cluster


def down(name: str = "default") -> list[str]:
    """End all processes in a cluster and remove it, including what a crash left of it.

    Returns the namespaces with names like the cluster's that it did not make; they stay.
    """
    network.check_system()
    check_name(name)
    claimed = state.folder_of(name).exists()
    unfinished = claimed and _is_unfinished(name)
    ours, others = network.namespaces_of(name, unfinished=unfinished)
    if not claimed and not ours:
        state.open_cluster(name)  # raises if there is none
    if claimed:
        _remove_when_idle(name, ours, unfinished=unfinished)
    else:
        _remove(name, ours)
    return others


@contextmanager
def cluster(spec: ClusterSpec) -> Iterator[Cluster]:
    """Set up a cluster for the duration of the block; a signal ends both."""
    with handling(exit_by_signal):
        made = up(spec)
        try:
            yield made
        finally:
            with handling(signal.SIG_IGN):
                down(spec.name)


def _is_unfinished(name: str) -> bool:
    try:
        found = state.load(name)
    except UserError:
        return False  # damaged: only namespaces with the mark are ours
    return found is None or found.status != "up"


def _remove_when_idle(name: str, namespaces: list[str], *, unfinished: bool) -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    while True:
        with state.locked(name) as held:
            if held:
                _remove(name, namespaces)
                return
        if unfinished:
            raise UserError(f"cluster {name!r} is being made at this moment; try again")
        end_processes(namespaces)
        if time.monotonic() > deadline:
            raise UserError(f"what runs in cluster {name!r} does not end; stop it and try again")
        time.sleep(0.1)


def _remove(name: str, namespaces: list[str]) -> None:
    end_processes(namespaces)
    for namespace in namespaces:
        network.remove(namespace)
    state.forget(name)
