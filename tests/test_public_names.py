"""Names that users, their scripts and old files rely on: no renaming of code changes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from unittest.mock import patch

import pytest
import torch

from model.config import LoraConfig, is_adapter
from paro.arguments.parser import build_parser
from paro.checkpoint.chunks import chunked_states
from paro.distributed.comm_stream import stream_name
from paro.distributed.exposed_time import ExposedTime
from paro.distributed.timers import record_ranges
from paro.precision import PrecisionConfig
from paro.report.record import GroupsRecord, Metrics, scalars_of, summarize
from paro.spec.run_spec import Materialize
from paro.topology import StreamKind
from tests.helpers.house import ROOT
from tests.paro.planning.cases import LoneRank, on_ranks, rank_of, run_of, silence
from tests.paro.planning.test_units import SMALL
from tests.paro.report.test_report import FACTS, record

GOLDEN = json.loads((ROOT / "tests/fixtures/public_names.json").read_text())
ADAPTED = replace(
    SMALL, num_query_groups=4, num_layers=1, lora=LoraConfig(rank=2, targets=("wo", "w_up"))
)


def flags() -> set[str]:
    return {flag for action in build_parser()._actions for flag in action.option_strings}


def metrics() -> set[str]:
    return {field.name for field in fields(Metrics)}


def tags() -> set[str]:
    last = replace(
        record(1),
        num_zeros=0.0,
        params_norm=1.0,
        z_loss=1.0,
        decoupled_learning_rate=1.0,
        held={"params": 1},
        allocator={"max": 1},
        exposed=ExposedTime(intra=0.0, inter=0.0),
        groups=GroupsRecord(
            lm_losses=(1.0,), outer_grad_norm=1.0, outer_grad_cosine=1.0, num_left_out=1
        ),
    )
    facts = replace(FACTS, predicted={"total": 1})
    made = summarize([last], facts, peak_memory_bytes=1, peak_reserved_bytes=1)
    return set(scalars_of(last, made, facts, totals={"skipped": 0}))


def lone_ranks() -> Iterator[LoneRank]:
    precision = PrecisionConfig(compute="bf16", inter_param_bits=8, ema_decay=0.9)
    for way in Materialize:
        run = run_of(ADAPTED, "IIG", precision, is_trained=is_adapter, materialize=way)
        yield rank_of(run)


def ranges() -> set[str]:
    """The ranges of a step's profile; those of comm streams have the names of `streams`."""
    found: set[str] = set()

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        found.add(name)
        yield

    record_ranges(True)
    try:
        with patch.object(torch.profiler, "record_function", noted):
            for rank in lone_ranks():
                rank.step(1)
    finally:
        record_ranges(False)
    return {name.split(":")[0] if name.startswith("paro/lane:") else name for name in found}


def streams() -> set[str]:
    """The names of comm streams, in ranges and of threads."""
    _, topology = on_ranks("IIG", world_size=8, group_size=4)
    axes = topology.axes
    return {
        stream_name((kind, *span)) for kind in StreamKind for span in (axes[:1], axes[1:], axes)
    }


def checkpoint_keys() -> set[str]:
    return {key for rank in lone_ranks() for key in chunked_states(rank.optimizer.flat_shards())}


FOUND: dict[str, Callable[[], Iterable[str]]] = {
    "flags": flags,
    "metrics": metrics,
    "tags": tags,
    "ranges": ranges,
    "streams": streams,
    "checkpoint keys": checkpoint_keys,
}


@pytest.mark.parametrize("kind", FOUND)
def test_names_that_users_see_stay(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    silence(monkeypatch)
    assert set(GOLDEN[kind]) - set(FOUND[kind]()) == set()
