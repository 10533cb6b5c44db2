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
from model.config import LlamaConfig
from model.hugging_face import hugging_face_config, hugging_face_name
from model.initialization import initialize_whole
from model.llama import Llama
from paro.arguments.parser import parse_args
from paro.config.run import RunConfig
from paro.distributed.control import Control
from paro.distributed.process_group import device_for, keep_freed_memory
from paro.distributed.world import World
from paro.errors import importing
from paro.training.assembly import build_training, start_state
from paro.training.step import train_step

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATE = 1e-4
SEED = 1234

Step = Callable[[], float | Tensor]  # one optimizer step; returns the loss before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The model and the data that all contenders train with.

    A step accumulates the gradients of `num_micro_batches`, all of the same `batch`, and clips
    their norm to `clip_grad`; 0: no clipping.
    """

    config: LlamaConfig
    device: torch.device
    dtype: str
    batch: Batch
    num_micro_batches: int = 1
    clip_grad: float = 1.0

    @property
    def num_tokens(self) -> int:
        """Of a step."""
        return self.batch.tokens_BS.numel() * self.num_micro_batches


def _own_model(task: Task) -> Llama:
    with task.device:
        model = Llama(task.config).to(TYPES[task.dtype])
    initialize_whole(model, task.config, SEED, num_threads=len(os.sched_getaffinity(0)))
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
    """A step by the losses of micro-batches; it clips as transformers' Trainer does."""

    def step() -> Tensor:
        losses = []
        for _ in range(task.num_micro_batches):
            loss = loss_of()
            loss.backward()
            losses.append(loss.detach())
        if task.clip_grad > 0.0:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    return step


def make_transformers(task: Task, *, fused: bool = False, compiled: bool = False) -> Step:
    with importing("the comparison needs transformers: pip install transformers"):
        from transformers import LlamaConfig as HuggingFaceConfig
        from transformers import LlamaForCausalLM

    sizes = HuggingFaceConfig(**hugging_face_config(task.config), use_cache=False)
    with task.device:
        model = LlamaForCausalLM(sizes).to(TYPES[task.dtype])
    own = {hugging_face_name(name): p for name, p in _own_model(task).named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(own[name])
    model.train()
    if task.config.recompute is not None:
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
    config = RunConfig.from_args(parse_args([*trainer_flags(task), *more]), world)
    training = build_training(config, Control(world, device_for(config.runtime, world)))
    state, batches = start_state(config), itertools.repeat(task.batch)

    def step() -> float:
        return train_step(training, state, batches).loss

    return step


def trainer_flags(task: Task) -> list[str]:
    """The arguments of pretrain_llama.py for this task."""
    config = task.config
    batch_size, seq_length = task.batch.tokens_BS.shape
    flags = {
        "distributed-backend": "nccl" if task.device.type == "cuda" else "gloo",
        "mock-data": None,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": config.vocab_size,
        "make-vocab-size-divisible-by": 1,
        "num-layers": config.num_layers,
        "hidden-size": config.hidden_size,
        "ffn-hidden-size": config.ffn_hidden_size,
        "num-attention-heads": config.num_attention_heads,
        "group-query-attention": None,
        "num-query-groups": config.num_query_groups,
        "seq-length": seq_length,
        "max-position-embeddings": config.max_position_embeddings,
        "micro-batch-size": batch_size,
        "global-batch-size": batch_size * task.num_micro_batches,
        "train-iters": 10**6,
        "lr": LEARNING_RATE,
        "clip-grad": task.clip_grad,
        "lr-decay-style": "constant",
        "seed": SEED,
    }
    if config.tie_embeddings_and_output_weights:
        flags["tie-embeddings-and-output-weights"] = None
    if config.recompute is not None:
        flags["recompute-granularity"] = config.recompute.granularity
    if task.dtype == "bf16":
        flags["bf16"] = None
    words = ((f"--{flag}", value) for flag, value in flags.items())
    return [str(word) for pair in words for word in pair if word is not None]


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
