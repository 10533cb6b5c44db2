"""DeepSpeed's ZeRO stages 1 to 3 and hpZ (ZeRO++), where DeepSpeed is installed."""

# DeepSpeed is optional (requirements-peers.txt) and is imported where it is used. On CPU ranks
# DS_ACCELERATOR selects the CPU, and its shared-memory operator is declared incompatible: it is for
# inference only, would be compiled at the first start, and assumes all ranks are on one machine.

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from data.loader import Batch
from paro.distributed.control import Control
from tools.bench.peers.task import (
    Contender,
    Outcome,
    Task,
    fused_adamw,
    trained_parameters,
    whole_model,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """The options that a contender's name selects."""

    stage: int
    secondary_copy: bool = False  # hpZ: parameters are also stored sharded inside each group
    kept: bool = False  # DeepSpeed's default thresholds, which keep small models whole


MODES = {
    "deepspeed-1": Mode(stage=1),
    "deepspeed-2": Mode(stage=2),
    "deepspeed-3": Mode(stage=3),
    "deepspeed-3-kept": Mode(stage=3, kept=True),
    "deepspeed-hpz": Mode(stage=3, secondary_copy=True),
}


def lacks_deepspeed() -> str | None:
    """Say why DeepSpeed's contenders cannot run here, or None."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed (pip install -r requirements-peers.txt)"
    return None


def import_deepspeed(backend: str) -> Any:
    """Return the deepspeed package, set up for CPU ranks or GPUs, without its log output."""
    if backend == "gloo":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    importlib.import_module("torch._inductor.compile_fx")  # the first engine would import it
    # It calls functions of torch by names that newer versions deprecate with a warning every time.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    return deepspeed


def zero_config(task: Task, mode: Mode) -> dict[str, Any]:
    """Return DeepSpeed's defaults, but for sizes that presume billions of parameters.

    Buckets and the prefetch size are those of the largest unit. Stage 3 partitions everything but
    vectors and frees parameters after use, as its memory figure and its peers here assume; `kept`
    leaves its thresholds at their defaults.
    """
    unit = task.largest_unit
    zero: dict[str, Any] = {
        "stage": mode.stage,
        "reduce_bucket_size": unit,
        "allgather_bucket_size": unit,
        "overlap_comm": True,
    }
    if mode.stage == 3 and not mode.kept:
        zero |= {
            "stage3_prefetch_bucket_size": unit,
            "stage3_max_live_parameters": 2 * unit,
            "stage3_max_reuse_distance": unit,
            "stage3_param_persistence_threshold": task.model.hidden_size + 1,
        }
    if mode.secondary_copy:
        zero["zero_hpz_partition_size"] = task.group_size
    return {
        "train_micro_batch_size_per_gpu": task.run.batches.micro_batch_size,
        "gradient_accumulation_steps": task.num_micro_batches,
        "gradient_clipping": task.run.optim.clip_grad,
        "bf16": {"enabled": task.compute_dtype == torch.bfloat16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }


class Zero(Contender):
    """A DeepSpeed engine around the whole model and torch's fused AdamW."""

    def __init__(self, task: Task, control: Control, *, mode: Mode) -> None:
        self.task, self.mode = task, mode
        deepspeed = import_deepspeed(task.run.runtime.distributed_backend)
        model = whole_model(task, control.device)
        optimizer = fused_adamw(task, trained_parameters(model))
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=zero_config(task, mode)
        )

    def step(self, batches: Iterator[Batch], observe: Callable[[], None]) -> Outcome:
        losses = []
        for _ in range(self.task.num_micro_batches):
            batch = next(batches)
            # The engine divides by the number of micro-batches and averages over ranks.
            weights_BS = batch.loss_mask_BS / batch.loss_mask_BS.sum()
            loss = self.engine(batch.tokens_BS, batch.labels_BS, weights_BS)
            self.engine.backward(loss)
            losses.append(loss.detach())
            observe()
            self.engine.step()  # updates only after the last micro-batch
        return Outcome(torch.stack(losses).mean(), self.engine.get_global_grad_norm())

    def held(self) -> Iterable[Tensor]:
        optimizer = self.engine.optimizer
        for parameter in self.engine.module.parameters():
            yield from _tensors((parameter.data, parameter.grad))
            for partition in ("ds_tensor", "ds_secondary_tensor"):
                yield from _tensors(getattr(parameter, partition, None))
        yield from _tensors(optimizer.averaged_gradients)
        masters = (
            optimizer.fp32_partitioned_groups_flat
            if self.mode.stage == 3
            else optimizer.single_partition_of_fp32_groups
        )
        yield from _tensors(masters)
        yield from _tensors([master.grad for master in masters])
        yield from _tensors(dict(optimizer.optimizer.state))


def _tensors(held: object) -> Iterator[Tensor]:
    """Return all tensors in nested dictionaries and sequences."""
    return (leaf for leaf in tree_leaves(held) if isinstance(leaf, Tensor))
