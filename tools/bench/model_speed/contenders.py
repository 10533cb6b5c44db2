"""Contenders of bench_model.py: each trains the same model on the same tokens."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from data.loader import Batch
from model.hugging_face import hugging_face_config, hugging_face_name
from model.initialization import initialize_whole
from model.llama import Llama
from paro.arguments.parser import parse_args
from paro.config.run import RunConfig, configure
from paro.distributed.control import Control
from paro.distributed.process_group import device_for, keep_freed_memory
from paro.distributed.world import World
from paro.errors import importing
from paro.sharding.buffers import TORCH_TYPES
from paro.training.assembly import build_training
from paro.training.step import TrainState, train_step

LEARNING_RATE = 1e-4
SEED = 1234

Step = Callable[[], float | Tensor]  # one optimizer step; returns the loss before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The model and the data that all contenders train with.

    A step accumulates the gradients of micro-batches, all of the same `batch`.
    """

    flags: tuple[str, ...]  # of pretrain_llama.py
    run: RunConfig  # what they stand for
    device: torch.device
    batch: Batch

    @property
    def num_micro_batches(self) -> int:
        return self.run.batches.num_micro_batches_at(0)

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.batch.tokens_BS.numel() * self.num_micro_batches

    @property
    def compute_dtype(self) -> torch.dtype:
        return TORCH_TYPES[self.run.precision.compute]


def _own_model(task: Task) -> Llama:
    with task.device:
        model = Llama(task.run.model).to(task.compute_dtype)
    initialize_whole(model, task.run.model, SEED, num_threads=len(os.sched_getaffinity(0)))
    return model


def make_ours(task: Task, *, compiled: bool = False) -> Step:
    model, batch = _own_model(task), task.batch
    run: Callable[..., Tensor] = model
    if compiled:
        model.head.loss = torch.compiler.disable(model.head.loss)  # type: ignore[method-assign]
        run = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    weights_BS = batch.loss_mask_BS / task.num_tokens
    loss_of = partial(run, batch.tokens_BS, batch.labels_BS, weights_BS)
    return _plain_loop(task, model, optimizer, loss_of)


def _plain_loop(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor]
) -> Step:
    """Return a step by the losses of micro-batches; it clips as transformers' Trainer does."""

    def step() -> Tensor:
        losses = []
        for _ in range(task.num_micro_batches):
            loss = loss_of()
            loss.backward()
            losses.append(loss.detach())
        if (clip_grad := task.run.optim.clip_grad) > 0.0:
            nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    return step


def make_transformers(task: Task, *, fused: bool = False, compiled: bool = False) -> Step:
    with importing("the comparison needs transformers: pip install transformers"):
        from transformers import LlamaConfig as HuggingFaceConfig
        from transformers import LlamaForCausalLM

    sizes = HuggingFaceConfig(**hugging_face_config(task.run.model), use_cache=False)
    with task.device:
        model = LlamaForCausalLM(sizes).to(task.compute_dtype)
    own = {hugging_face_name(name): p for name, p in _own_model(task).named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(own[name])
    model.train()
    if task.run.model.recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused or None)
    tokens_BS, labels_BS = task.batch.tokens_BS, task.batch.labels_BS
    run = torch.compile(model) if compiled else model

    def loss_of() -> Tensor:
        # Labels are shifted already, so that every token has one, as in our model.
        out = run(input_ids=tokens_BS, labels=labels_BS, shift_labels=labels_BS)
        loss: Tensor = out.loss / task.num_micro_batches
        return loss

    return _plain_loop(task, model, optimizer, loss_of)


def make_trainer(task: Task, *more: str) -> Step:
    world = World()
    if task.device.type == "cpu":
        keep_freed_memory()  # as `distributed` does
    config = configure(parse_args([*task.flags, *more]), world)
    training = build_training(config, Control(world, device_for(config.runtime, world)))
    state, batches = TrainState.at_start(config.loss_scale), itertools.repeat(task.batch)

    def step() -> float:
        return train_step(training, state, batches).loss

    return step


_WITHOUT_TRITON = (
    *("--no-bias-swiglu-fusion", "--no-rope-fusion"),
    *("--adam-implementation", "torch"),
)
_FP8 = ("--fp8-format", "hybrid")
_COMPILED = ("--torch-compile", "inductor")
_MUON = ("--optimizer", "muon", "--muon-extra-scale-factor", "0.2")
REFERENCES: dict[str, Callable[[Task], Step]] = {
    "transformers": make_transformers,
    "transformers-fused": lambda task: make_transformers(task, fused=True),
    "transformers-compiled": lambda task: make_transformers(task, fused=True, compiled=True),
}
CONTENDERS: dict[str, Callable[[Task], Step]] = {
    "ours": make_ours,
    "ours-compiled": lambda task: make_ours(task, compiled=True),
    "trainer": make_trainer,
    "trainer-compiled": lambda task: make_trainer(task, *_COMPILED),
    "trainer-torch": lambda task: make_trainer(task, *_WITHOUT_TRITON),
    "trainer-fp8": lambda task: make_trainer(task, *_FP8),
    "trainer-fp8-compiled": lambda task: make_trainer(task, *_FP8, *_COMPILED),
    "trainer-muon": lambda task: make_trainer(task, *_MUON),
    **REFERENCES,
}
DEFAULT = ("ours", "trainer", "transformers", "transformers-fused")
