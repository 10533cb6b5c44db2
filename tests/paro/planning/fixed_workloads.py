"""400 workloads drawn from a seed, and what the planner predicts of each, as recorded.

`python -m tests.paro.planning.fixed_workloads` writes the record anew. Do that only where a value
changes for a reason that a measurement supports, and say which in the commit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from model.config import LLAMA_PRESETS, LlamaConfig, LoraConfig, RecomputeConfig, targets_of
from model.trainable import Trainable
from paro.collectives.schedule import NCCL_COLLECTIVES
from paro.errors import UserError
from paro.machine.files import find_machine
from paro.machine.machine import Machine
from paro.planning.estimator import Estimator
from paro.planning.planner import plan
from paro.planning.search_space import Candidate, PlanRequest, SearchSpace, legal_strategies
from paro.precision import PrecisionConfig
from paro.spec.context_layout import ContextLayout
from paro.spec.run_spec import ContextLimits, Materialize
from tests.paro.planning.cases import DEVICE, machine

RECORD = Path(__file__).with_name("fixed_workloads.json")
NUMBER, SHARED_FROM, PLANNED_EVERY = 400, 300, 15
WORLDS = ((8, 8), (16, 8), (32, 8), (8, 4), (24, 8), (64, 16))  # ranks, ranks of a group


def drawn(index: int) -> tuple[PlanRequest, Candidate]:
    """The request of a number and a candidate; the first drawn that is legal."""
    for attempt in range(1000):
        random = Random(f"{index}/{attempt}")
        try:
            request = _request(random)
            if index >= SHARED_FROM:
                request = _shared(random, request)
            return request, _candidate(random, request)
        except UserError:
            continue
    raise AssertionError("nothing legal was drawn")


def predicted(index: int) -> dict[str, Any]:
    """Return the planner's figures of a candidate, and for some requests the planner's choice."""
    request, candidate = drawn(index)
    estimate = Estimator(request).estimate(candidate)
    found: dict[str, Any] = {
        "candidate": candidate.describe(),
        "memory": [estimate.memory.name, {k: v for k, v in estimate.memory.parts().items() if v}],
        "seconds": estimate.seconds.hex(),
        "sent": [estimate.sent.intra, estimate.sent.inter],
    }
    if index % PLANNED_EVERY == 0:
        space = SearchSpace(
            micro_batch_sizes=(request.micro_batch_size,), collectives=(candidate.collective,)
        )
        best = plan(request, space).best
        found["best"] = None if best is None else [best.candidate.describe(), best.seconds.hex()]
    return found


def _request(random: Random) -> PlanRequest:
    world_size, group_size = random.choice(WORLDS)
    micro, count = random.choice((1, 1, 2, 4)), random.choice((1, 2, 3, 8))
    compute = random.choice(("bf16", "bf16", "fp32", "fp16"))
    bits = random.choice((16, 16, 4)) if compute == "bf16" else 16
    model = _model(random)
    return PlanRequest(
        model=model,
        machine=_machine(random, world_size, group_size),
        group_size=group_size,
        seq_length=random.choice((128, 512, 2048)),
        micro_batch_size=micro,
        global_batch_size=micro * count * world_size,
        precision=PrecisionConfig(
            compute=compute,
            grad_reduce_in_bf16=compute == "bf16" and random.random() < 0.4,
            inter_param_bits=bits,
            inter_grad_bits=bits,
        ),
        prefetch_units=random.choice((0, 1, 1, 2, 3)),
        materialize=random.choice((Materialize.GATHER,) * 2 + (*Materialize,)),
        trainable=_trainable(random) if model.lora is None else Trainable(),
        device_type="cuda",
    )


def _shared(random: Random, request: PlanRequest) -> PlanRequest:
    """The request with ranks that share samples, or that update by Muon, or both."""
    group = request.group_size
    sizes = [size for size in (1, 2, 2 * group, 4 * group) if request.world_size % size == 0]
    if len(sizes) < 3:
        raise UserError("one group")
    size = random.choice((*sizes, *sizes[2:] * 2))  # mostly rings across groups
    heads = random.choice([heads for heads in (1, 1, 1, 2, size) if size % heads == 0])
    layout = ContextLayout(
        size=size, heads=heads, gathers=heads == 1 < size and random.random() < 0.3
    )
    request = replace(request, materialize=Materialize.GATHER)
    if reason := ContextLimits(request, request.world_size).reason_invalid(layout):
        raise UserError(reason)
    model, recompute = request.model, request.model.recompute
    if recompute is not None and recompute.granularity == "full":
        model = replace(model, recompute=replace(recompute, keeps_core=random.random() < 0.5))
    optimizer = "muon" if size == 1 or random.random() < 0.3 else "adam"
    precision = replace(request.precision, optimizer=optimizer)
    given = {"model": model, "context": layout, "precision": precision}
    return replace(request, **given)


def _machine(random: Random, world_size: int, group_size: int) -> Machine:
    if group_size == 8 and random.random() < 0.4:
        name = random.choice(("dgx-h100", "dgx-a100-roce100"))
        return find_machine(name).for_world(world_size, subject="the record")
    made = machine(intra=random.choice((200, 2000)), inter=random.choice((5, 100, 400)))
    cores = random.choice((None, None, 4))
    device = replace(DEVICE, cores=cores, piece_seconds=random.choice((0.0, 1e-5)))
    return replace(made, world_size=world_size, group_size=group_size, device=device)


def _model(random: Random) -> LlamaConfig:
    heads, groups = random.choice(((8, 8), (16, 4), (32, 32)))
    recompute = random.choice(
        (
            None,
            None,
            RecomputeConfig(granularity="selective"),
            RecomputeConfig(granularity="full"),
            RecomputeConfig(granularity="full", num_layers=random.choice((2, 3))),
            RecomputeConfig(granularity="full", method="block", num_layers=random.choice((1, 3))),
        )
    )
    lora = LoraConfig(rank=8, targets=targets_of(random.choice(("all-linear", "q_proj,v_proj"))))
    return replace(
        LLAMA_PRESETS["7B"],
        num_layers=random.choice((1, 2, 4, 7)),
        hidden_size=heads * 64,
        ffn_hidden_size=random.choice((2, 3)) * heads * 64,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=64,
        vocab_size=random.choice((1000, 32000)),
        tie_embeddings_and_output_weights=random.random() < 0.3,
        add_qkv_bias=random.random() < 0.2,
        qk_layernorm=random.random() < 0.2,
        recompute=recompute,
        lora=lora if random.random() < 0.15 else None,
    )


def _trainable(random: Random) -> Trainable:
    if random.random() < 0.7:
        return Trainable()
    if random.random() < 0.3:
        return Trainable(patterns=("*.wq", "*.mlp_norm", "head.*"))
    return Trainable(share=random.choice((0.25, 0.5)))


def _candidate(random: Random, request: PlanRequest) -> Candidate:
    strategies = [*legal_strategies(request.world_size, request.group_size)]
    named = [strategy for strategy in strategies if "," not in strategy.name]
    strategy = random.choice(random.choice((strategies, named)))
    reason = request.infeasible_reason(strategy, request.materialize)
    if reason is not None:
        raise UserError(reason)
    names = NCCL_COLLECTIVES if request.machine.is_of_gpus else ("native", "ring", "ho-ring")
    return replace(request.candidate(strategy), collective=random.choice([*names]))


if __name__ == "__main__":
    rows = [json.dumps(predicted(index)) for index in range(NUMBER)]
    RECORD.write_text("\n".join(rows) + "\n", encoding="utf-8")
