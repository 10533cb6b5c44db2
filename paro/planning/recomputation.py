"""How many blocks to recompute: as few as fit in memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from model.config import LlamaConfig, RecomputeConfig
from paro.planning.activations import Activations
from paro.planning.estimator import Estimator
from paro.planning.search_space import Candidate

_LARGEST_GROUP = 8  # blocks that keep one input together


def of_first(count: int, model: LlamaConfig) -> RecomputeConfig:
    """Of so many first blocks, which keep what the model's recomputed blocks do."""
    every = RecomputeConfig(granularity="full", keeps_core=model.keeps_core)
    return every if count == model.num_layers else replace(every, method="block", num_layers=count)


def least_recomputation(
    model: LlamaConfig, fits: Callable[[RecomputeConfig], bool]
) -> RecomputeConfig | None:
    """Return the fewest first blocks whose recomputation makes it fit; None if even all are too
    few."""
    given, fewest = model.recompute, 1
    if given is not None and given.granularity == "full":
        if given.method == "uniform":
            return None
        fewest = given.num_layers + 1
    counts = range(fewest, model.num_layers + 1)  # the more, the less memory
    found = bisect_left(counts, True, key=lambda count: fits(of_first(count, model)))
    return of_first(counts[found], model) if found < len(counts) else None


def recompute_flags(recompute: RecomputeConfig) -> str:
    """Return the flags that select it."""
    text = f"--recompute-granularity {recompute.granularity}"
    text += " --paro-recompute-keep core_attn" * recompute.keeps_core
    if (recompute.method, recompute.num_layers) == ("uniform", 1):
        return text
    how = f"--recompute-method {recompute.method}"
    return f"{text} {how} --recompute-num-layers {recompute.num_layers}"


def saved_bytes(estimator: Estimator, candidate: Candidate) -> float:
    """What a recomputed block takes off a peak, at most: what it keeps beside its input."""
    memory, run = estimator.memory(candidate), estimator.run_spec(candidate)
    activations = Activations(config=run.config, batch=run.batch, grad_bytes=4)
    saved = activations.of_block - activations.residual
    return saved * memory.reserved / memory.allocated


def with_fewest_blocks(estimator: Estimator, candidate: Candidate, share: float) -> Candidate:
    """With the fewest first blocks that save `share` times what one saves at most."""
    model = estimator.request.model
    frozen = max(0, estimator.first_trained - 1)
    count = min(frozen + math.ceil(share), model.num_layers)
    return replace(candidate, recompute=of_first(count, model))


def with_more_blocks(estimator: Estimator, candidate: Candidate, limit: int) -> Candidate | None:
    """With as few more recomputed blocks as fit, or all in the smallest groups; None: none fit."""
    model, given = estimator.request.model, candidate.recompute
    assert given is not None, "some blocks are recomputed"

    def fits(recompute: RecomputeConfig) -> bool:
        return estimator.memory(replace(candidate, recompute=recompute)).total <= limit

    sizes = (n for n in range(2, _LARGEST_GROUP + 1) if model.num_layers % n == 0)
    groups = (replace(of_first(model.num_layers, model), num_layers=size) for size in sizes)
    found = given if fits(given) else least_recomputation(replace(model, recompute=given), fits)
    found = found or next(filter(fits, groups), None)
    return None if found is None else replace(candidate, recompute=found)
