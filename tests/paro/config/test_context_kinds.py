"""Kinds of context parallelism: which ranks exchange heads or form rings, and what is refused."""

from __future__ import annotations

import pytest

from paro.context_parallel.layout import ContextLayout
from paro.distributed.world import World
from tests.helpers.refusals import refused
from tests.paro.config.test_run import SMALL, configure

EIGHT = World(size=8, ranks_per_node=4)
SIZES = "--hierarchical-context-parallel-sizes"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--cp-comm-type a2a+p2p", f"--cp-comm-type a2a+p2p needs {SIZES} ... 2 4"),
        (f"--cp-comm-type a2a+p2p {SIZES} 2 2", f"{SIZES} 2 2 ... --context-parallel-size 8"),
        (f"--cp-comm-type p2p {SIZES} 8", f"{SIZES} 8 ... --context-parallel-size 8"),
        (f"--cp-comm-type allgather {SIZES} 4 2", f"{SIZES} 4 2 ... p2p and a2a+p2p"),
        *(
            (f"--attention-backend {name}", f"--attention-backend {name} ... a2a")
            for name in ("unfused", "local", "fused")
        ),
        ("", "16 channels in fp32 on a GPU: give --bf16 ... or --cp-comm-type a2a"),
        ("--bf16 --kv-channels 12", "12 channels in bf16 ... a multiple of 8 ... (--kv-channels)"),
        ("--cp-comm-type p2p --bf16 --seq-length 24", "--seq-length 24 is no multiple of 16"),
        (f"{SIZES} 8 1 --cp-comm-type a2a+p2p --num-attention-heads 4", "8 ... 4 heads"),
    ],
)
def test_what_cannot_be_is_refused_with_what_could(words: str, told: str) -> None:
    refused(lambda: configure(f"{SMALL} --context-parallel-size 8 {words}", EIGHT), told)


@pytest.mark.parametrize(
    ("words", "layout", "rings"),
    [
        ("--cp-comm-type p2p", ContextLayout(size=8), [4, 2]),
        ("--cp-comm-type p2p p2p --paro-context-ring flat", ContextLayout(size=8, inner=8), [8, 1]),
        (f"--cp-comm-type p2p {SIZES} 2 4", ContextLayout(size=8, inner=2), [2, 4]),
        (f"--cp-comm-type a2a+p2p {SIZES} 2 4", ContextLayout(size=8, heads=2), [2, 2]),
        (f"--cp-comm-type a2a+p2p {SIZES} 4 2", ContextLayout(size=8, heads=4), [2, 1]),
        ("--cp-comm-type all_gather", ContextLayout(size=8, gathers=True), [4, 2]),
        ("--cp-comm-type a2a --num-attention-heads 8", ContextLayout(size=8, heads=8), [1, 1]),
    ],
)
def test_kinds_are_layouts(words: str, layout: ContextLayout, rings: list[int]) -> None:
    found = configure(f"{SMALL} --bf16 --context-parallel-size 8 {words}", EIGHT).context.layout
    assert found == layout
    topology = found.topology(world_size=8, group_size=4)
    assert [len(topology.members(span, 0)) for span in found.rings(topology)] == rings
