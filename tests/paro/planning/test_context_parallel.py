"""What attention sends where ranks share samples is what a rank counts, whatever part trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model.config import LlamaConfig, LoraConfig, RecomputeConfig, is_adapter
from model.llama import Llama
from paro.distributed.comm_stream import InlineStreams
from paro.distributed.groups import Links
from paro.distributed.world import World
from paro.planning.context_parallel import ContextAttention
from paro.planning.run_memory import RunMemory
from paro.planning.sending import Sender
from paro.precision import PrecisionConfig
from paro.spec.context_layout import ContextLayout
from tests.paro.planning.lone_rank import attention_of, silence
from tests.paro.planning.on_ranks import run_of

MODEL = LlamaConfig(
    num_layers=3,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=16,
    num_query_groups=4,
    kv_channels=4,
    max_position_embeddings=16,
    vocab_size=32,
    add_qkv_bias=True,
    qk_layernorm=True,
)
LAYOUTS = {
    "p2p": ContextLayout(size=4, inner=4),
    "allgather": ContextLayout(size=4, gathers=True),
    # Keys and values go with the first of 4 chunks of the queries, and with each of 2 chunks.
    "a2a": ContextLayout(size=4, heads=4),
    "a2a of two heads": ContextLayout(size=2, heads=2),
    "a2a+p2p": ContextLayout(size=4, heads=2, inner=4),
}
RECOMPUTES = {
    "none": None,
    "core": RecomputeConfig(granularity="selective"),
    "pairs": RecomputeConfig(granularity="full", num_layers=2),
    "all but attention": RecomputeConfig(granularity="full", keeps_core=True),
}
# What trains of block 1, by whether attention has gradients of queries, of keys or values, or none.
QUERIES = ("attention_norm", "wv", "q_norm")
KEYS = ("k_norm", "bv")
NONE = ("wo", "w_down")
ADAPTERS = ("wq", "wv", "wo")


def trained_cases() -> list[tuple[LlamaConfig, frozenset[str]]]:
    head = {"head.weight"}
    adapted = [replace(MODEL, lora=LoraConfig(rank=2, targets=(name,))) for name in ADAPTERS]
    names = [frozenset({f"blocks.1.{name}"} | head) for name in (*QUERIES, *KEYS, *NONE)]
    return [(MODEL, trained) for trained in names] + [(one, frozenset()) for one in adapted]


def zeros(config: LlamaConfig) -> Llama:
    llama = Llama(config)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.zero_()
    return llama


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_rank_sends_what_the_part_that_trains_needs(
    monkeypatch: pytest.MonkeyPatch, layout: str, recompute: str
) -> None:
    silence(monkeypatch)
    shared, links = LAYOUTS[layout], Links(InlineStreams())
    world, sender = World(size=4, group=4), Sender(group_size=4, rank=0)
    core, precision = attention_of(shared, world, links), PrecisionConfig(compute="fp32")
    tokens_BS = torch.zeros(1, 16 // shared.size, dtype=torch.int64)
    for model, names in trained_cases():
        config = replace(model, recompute=RECOMPUTES[recompute])
        is_trained = names.__contains__ if names else is_adapter
        llama = zeros(config)
        llama.core = core
        llama.freeze(is_trained)
        llama(tokens_BS, tokens_BS, torch.ones(tokens_BS.shape)).backward()
        run = run_of(config, "NNG", precision, world_size=4, is_trained=is_trained, context=shared)
        moves = RunMemory(None).step(run).schedule(1).actions()
        said = ContextAttention(run).sent(moves, sender)
        assert links.traffic.take() == said, names or config.lora
