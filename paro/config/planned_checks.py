"""Checks between flags that tools/plan.py has too: of the model, its batches and its sharding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature

from data.config import DataConfig
from model.config import FP8_MULTIPLE, LlamaConfig
from model.trainable import Trainable
from model.units import parameter_shapes
from paro.collectives.schedule import NCCL_COLLECTIVES
from paro.config.sharding import ShardingConfig, TrainingTask
from paro.errors import UserError, contradiction
from paro.precision import PrecisionConfig
from paro.schedule.batch_schedule import BatchSchedule
from paro.spec.states import is_for_muon
from paro.spec.strategy_limits import MUON_CONFLICT


def check_sequence(model: LlamaConfig, data: DataConfig) -> None:
    most, seq_length = model.max_position_embeddings, data.seq_length
    if seq_length > most:
        raise UserError(
            f"--seq-length {seq_length} is above --max-position-embeddings {most}: give "
            f"--max-position-embeddings {seq_length}, or --seq-length {most}"
        )


def check_fp8(
    model: LlamaConfig, data: DataConfig, batches: BatchSchedule, sharding: ShardingConfig
) -> None:
    """Raise `UserError` for sizes that a GPU's matmuls in fp8 do not take."""
    if model.fp8_format is None:
        return
    context_size = sharding.context.context_parallel_size
    tokens = "--micro-batch-size x --seq-length"
    if context_size > 1:
        tokens += " / --context-parallel-size"
    for flags, size in (
        ("--hidden-size", model.hidden_size),
        ("--ffn-hidden-size", model.ffn_hidden_size),
        ("--num-attention-heads x --kv-channels", model.num_attention_heads * model.kv_channels),
        ("--num-query-groups x --kv-channels", model.num_query_groups * model.kv_channels),
        (tokens, batches.micro_batch_size * data.seq_length // context_size),
    ):
        if size % FP8_MULTIPLE != 0:
            raise UserError(
                f"--fp8-format {model.fp8_format} needs multiples of {FP8_MULTIPLE}: change "
                f"{flags}, which is {size}, or leave fp8 out"
            )


def check_context(task: TrainingTask, sharding: ShardingConfig) -> None:
    """Raise `UserError` if ranks cannot share samples of this model and length.

    Also if flags need attention's log-sum-exp and no kernel returns one.
    """
    limits = task.context_limits(sharding)
    sharding.context.check(limits)
    if task.model.keeps_core and limits.no_log_sum_exp is not None:
        raise UserError(f"{limits.no_log_sum_exp}, or leave --paro-recompute-keep out")


def check_muon(
    precision: PrecisionConfig, sharding: ShardingConfig, trainable: Trainable, model: LlamaConfig
) -> None:
    """Raise `UserError` if Muon would have no unsharded matrix to update."""
    if precision.optimizer != "muon":
        return
    if sharding.materialize == "rotate":
        raise UserError(MUON_CONFLICT)
    shapes = parameter_shapes(model)
    if not any(is_for_muon(name, shapes[name]) for name in trainable.names(model)):
        raise UserError(
            f"--optimizer muon updates matrices of blocks, and --trainable {trainable} has none: "
            "leave it out"
        )


def check_collective(sharding: ShardingConfig, device_type: str) -> None:
    """Raise `UserError` under NCCL for a collective made of point-to-point messages."""
    name = sharding.collective
    if device_type == "cuda" and name not in (*NCCL_COLLECTIVES, "auto"):
        raise UserError(
            f"--paro-collective {name} sends a gather as hundreds of messages from point to point, "
            "which take longer to launch than to send under nccl: give native or ho-ring"
        )


def check_feedback(flag: str, precision: PrecisionConfig) -> None:
    """Raise `UserError` if losing a rank would lose gradient errors that error feedback holds."""
    if precision.inter_grad_error_feedback:
        reason = "what a rank remembers of its gradients nobody else holds"
        raise contradiction("--paro-inter-grad-error-feedback", flag, reason)


# A check's parameters name fields of RunConfig.
PLANNED_CHECKS: tuple[Callable[..., None], ...] = (
    check_collective,
    check_sequence,
    check_context,
    check_muon,
    check_fp8,
)


@cache
def needs_of(make: Callable[..., object]) -> tuple[str, ...]:
    """Return the parts of the configuration that a check or a maker needs, by its parameters."""
    parameters = signature(make).parameters.values()
    return tuple(each.name for each in parameters if each.default is each.empty)
