"""The optimizer in Megatron-core's distributed checkpoints: masters, moments, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from model.config import LlamaConfig
from model.units import parameter_shapes
from paro.checkpoint.convert.megatron_names import MegatronModel, megatron_name, unfused
from paro.checkpoint.convert.source import LazyTensor, Source, checked_tensors
from paro.errors import UserError
from paro.spec.states import MOMENTS

PREFIX = "optimizer.state."
MASTERS = ("fp32_param", "param")  # of an optimizer without and with sharding over replicas
KINDS = (*MASTERS, *MOMENTS)
FORM = "fully_reshardable"  # the form in which states are whole tensors like the parameters


def with_optimizer(source: Source, config: LlamaConfig, model: MegatronModel) -> Source:
    """Return a source with masters for parameters, with moments, and with a run's progress.

    `config` has the padded vocabulary, whose rows stay: they have trained. `UserError` if the
    states are in another form than whole tensors, or not all there.
    """
    optimizer = model.common.get("optimizer")
    if not isinstance(optimizer, dict):
        raise UserError(f"--with-optimizer: {model.path} has no optimizer: leave the flag out")
    form = str(optimizer.get("param_state_sharding_type", FORM))
    if form != FORM:
        raise UserError(
            f"--with-optimizer: the optimizer of {model.path} is in the form {form:.40}, which "
            "depends on its ranks: save it with --dist-ckpt-optim-fully-reshardable"
        )
    progress = _progress(model, optimizer)
    masters = {**model.tensors}
    for kind in MASTERS:
        masters |= model.states[kind]
    tensors = _checked(config, replace(model, tensors=masters), "")
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.float32:
            raise UserError(f"--with-optimizer: {model.path} has no fp32 master of {name}")
    moments = {
        kind: _checked(config, replace(model, tensors=model.states[kind]), f"{PREFIX}{kind}.")
        for kind in MOMENTS
    }
    return replace(source, config=config, tensors=tensors, moments=moments, progress=progress)


def _checked(config: LlamaConfig, model: MegatronModel, prefix: str) -> dict[str, LazyTensor]:
    found = unfused(config, model)
    shapes = parameter_shapes(config)
    return checked_tensors(shapes, found, model.path, lambda name: prefix + megatron_name(name))


def _progress(model: MegatronModel, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of common.json from which a run continues."""
    inner = _dict(optimizer.get("optimizer", optimizer))
    given_groups = inner.get("param_groups")
    groups = given_groups if isinstance(given_groups, list) else []
    steps = [_count(_dict(group).get("step")) for group in groups]
    steps.append(_count(_dict(inner.get("state")).get("common_step")))
    num_steps = max((step for step in steps if step is not None), default=None)
    if num_steps is None:
        raise UserError(f"--with-optimizer: the optimizer of {model.path} has no step")
    given: Mapping[str, Any] = {**model.args}
    consumed = _count(given.get("consumed_train_samples")) or 0
    scheduler = _dict(model.common.get("opt_param_scheduler"))
    batch_size = _count(given.get("global_batch_size"))
    return {
        "num_optimizer_steps": num_steps,
        "state": {
            "loss_scale": {"scale": 1.0, "growth_tracker": 0, "hysteresis_tracker": 0},
            "iteration": _count(model.common.get("iteration")) or 0,
            "consumed_train_samples": consumed,
            "consumed_valid_samples": _count(given.get("consumed_valid_samples")) or 0,
            "scheduled_samples": _count(scheduler.get("num_steps")) or consumed,
        },
        "dynamic_loss_scale": False,  # with fp16 the scale begins anew
        **({"global_batch_size": batch_size} if batch_size else {}),
    }


def _dict(value: object) -> Mapping[str, Any]:
    """Return a dict in an untrusted file; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    """Return a whole number, which may be a tensor; None if it is none."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value < 2**63 else None
