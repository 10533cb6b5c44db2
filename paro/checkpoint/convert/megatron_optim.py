"""The optimizer in Megatron-core's distributed checkpoints: masters, moments, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from model.config import LlamaConfig
from paro.checkpoint.convert.megatron_names import MegatronArgs, fused
from paro.checkpoint.convert.source import LazyTensor, ModelSource, with_vocabulary
from paro.errors import UserError

PREFIX = "optimizer.state."
MASTERS = ("fp32_param", "param")  # of an optimizer without and with sharding over replicas
_SCHEDULE = {  # fields of Megatron-LM's scheduler: those of a run here
    "max_lr": "lr",
    "min_lr": "min_lr",
    "lr_warmup_steps": "lr_warmup_samples",
    "lr_decay_style": "lr_decay_style",
    "lr_decay_steps": "lr_decay_samples",
    "start_wd": "start_weight_decay",
    "end_wd": "end_weight_decay",
    "wd_incr_style": "weight_decay_incr_style",
    "wd_incr_steps": "weight_decay_incr_samples",
}
_FORM_DETAILS = {
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
FORM = "fully_reshardable"  # the form in which states are whole tensors like the parameters


def written_optimizer(
    source: ModelSource, config: LlamaConfig
) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    """Return optimizer and progress as entries of Megatron-LM's common.pt, and as DCP tensors.

    `config` has the padded vocabulary.
    """
    tensors = {
        f"{PREFIX}{kind}.{name}": tensor
        for kind, of_kind in {"param": source.tensors, **source.moments}.items()
        for name, tensor in fused(config, with_vocabulary(of_kind, config.vocab_size)).items()
    }
    state, schedule, args = (source.progress[each] for each in ("state", "schedule", "arguments"))
    wd = schedule["start_weight_decay"]
    group = {
        **{"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False},
        **{"lr": schedule["lr"], "max_lr": schedule["lr"], "min_lr": schedule["min_lr"]},
        "betas": (args.get("adam_beta1", 0.9), args.get("adam_beta2", 0.999)),
        **{"eps": args.get("adam_eps", 1e-8), "bias_correction": True},
        "step": source.progress["num_optimizer_steps"],
    }
    groups = [{**group, "wd_mult": mult, "weight_decay": wd * mult} for mult in (1.0, 0.0)]
    names = {there: schedule[here] for there, here in _SCHEDULE.items()}
    common = {
        "iteration": state["iteration"],
        "optimizer": {"optimizer": {"param_groups": groups}, "param_state_sharding_type": FORM},
        "opt_param_scheduler": {"num_steps": state["scheduled_samples"], **names},
        # The form in which Megatron-core asks for the states when it loads them.
        "content_metadata": {"distrib_optim_sharding_type": FORM, **_FORM_DETAILS},
    }
    return common, tensors


def progress_of(common: Mapping[str, Any], args: MegatronArgs, path: Path) -> dict[str, Any]:
    """Return the fields of common.json from which a run continues, by the content of a file.

    `UserError` without an optimizer, or if its states are in another form than whole tensors.
    """
    optimizer = common.get("optimizer")
    if not isinstance(optimizer, dict):
        raise UserError(f"--with-optimizer: {path} has no optimizer: leave the flag out")
    form = str(optimizer.get("param_state_sharding_type", FORM))
    if form != FORM:
        raise UserError(
            f"--with-optimizer: the optimizer of {path} is in the form {form:.40}, which "
            "depends on its ranks: save it with --dist-ckpt-optim-fully-reshardable"
        )
    inner = _dict(optimizer.get("optimizer", optimizer))
    given_groups = inner.get("param_groups")
    groups = given_groups if isinstance(given_groups, list) else []
    steps = [_count(_dict(group).get("step")) for group in groups]
    steps.append(_count(_dict(inner.get("state")).get("common_step")))
    num_steps = max((step for step in steps if step is not None), default=None)
    if num_steps is None:
        raise UserError(f"--with-optimizer: the optimizer of {path} has no step")
    flags: Mapping[str, Any] = {**args}
    consumed = _count(flags.get("consumed_train_samples")) or 0
    scheduler = _dict(common.get("opt_param_scheduler"))
    batch_size = _count(flags.get("global_batch_size"))
    return {
        "num_optimizer_steps": num_steps,
        "state": {
            "loss_scale": {"scale": 1.0, "growth_tracker": 0, "hysteresis_tracker": 0},
            "iteration": _count(common.get("iteration")) or 0,
            "consumed_train_samples": consumed,
            "consumed_valid_samples": _count(flags.get("consumed_valid_samples")) or 0,
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
