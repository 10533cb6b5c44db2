"""Training speed of this LLaMA and its trainer against transformers' LlamaForCausalLM, in pairs."""

# All contenders train the same shape from the same weights on the same tokens with AdamW, and their
# first losses are compared. They take turns of a few steps each, because a shared machine's speed
# drifts: a ratio is the median over rounds, each comparing neighbours in time.
#
#   ours                this model, torch's fused AdamW
#   trainer             pretrain_llama.py's training step, clipping and bookkeeping included
#   transformers        LlamaForCausalLM and AdamW as a user gets them
#   transformers-fused  the same with AdamW(fused=True)

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.loader import Batch
from model.config import LlamaConfig, RecomputeConfig, flops_per_token, num_parameters
from model.hugging_face import hugging_face_config, hugging_face_name
from model.initialization import initialize_whole
from model.llama import Llama
from paro.arguments.parser import parse_args
from paro.config.run import RunConfig
from paro.distributed.control import Control
from paro.distributed.process_group import device_for
from paro.distributed.world import World
from paro.errors import UserError
from paro.training.assembly import build_training, start_state
from paro.training.step import train_step
from tools.shared.command_line import status_of
from tools.shared.output import write_text

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
LEARNING_RATE = 1e-4
SEED = 1234

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Step = Callable[[], float | Tensor]  # one optimizer step; returns the loss before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The model and the data that all contenders train with."""

    config: LlamaConfig
    device: torch.device
    dtype: str
    batch: Batch

    @property
    def num_tokens(self) -> int:
        return self.batch.tokens_BS.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Seconds of every turn of each contender, in the order of rounds, and its first loss."""

    seconds: dict[str, list[float]]
    first_losses: dict[str, float]
    tokens_per_turn: int

    def tokens_per_second(self, name: str) -> float:
        return self.tokens_per_turn / median(self.seconds[name])

    def ratio(self, name: str, other: str) -> float:
        """Speed relative to `other`: the median over rounds."""
        rounds = zip(self.seconds[name], self.seconds[other], strict=True)
        return median(theirs / own for own, theirs in rounds)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--contenders", default="ours,trainer,transformers,transformers-fused", metavar="NAMES")
    add("--num-layers", type=int, default=8)
    add("--hidden-size", type=int, default=384)
    add("--ffn-hidden-size", type=int, default=1280)
    add("--num-attention-heads", type=int, default=6)
    add("--num-query-groups", type=int, help="default: as many as --num-attention-heads")
    add("--vocab-size", type=int, default=8192, help="rows of the embedding")
    add("--tie-embeddings-and-output-weights", action="store_true")
    add("--recompute", action="store_true", help="every block, in all contenders")
    add("--micro-batch-size", type=int, default=4)
    add("--seq-length", type=int, default=256)
    add("--dtype", choices=sorted(TYPES), default="fp32")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=int, default=2, help="on a CPU")
    add(
        "--clock",
        choices=sorted(CLOCKS),
        default="wall",
        help="cpu: time of all threads, for a machine that others keep busy; use --threads 1",
    )
    add("--rounds", type=int, default=9, help="turns of each contender that are timed")
    add("--steps", type=int, default=2, help="optimizer steps in a turn")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def task_of(args: argparse.Namespace) -> Task:
    heads = args.num_attention_heads
    if heads < 1 or args.hidden_size % heads != 0:
        raise UserError(
            f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads {heads}"
        )
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device")
    config = LlamaConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=heads,
        num_query_groups=args.num_query_groups or heads,
        kv_channels=args.hidden_size // heads,
        max_position_embeddings=args.seq_length,
        vocab_size=args.vocab_size,
        tie_embeddings_and_output_weights=args.tie_embeddings_and_output_weights,
        recompute=RecomputeConfig(granularity="full") if args.recompute else None,
    )
    size = (args.micro_batch_size, args.seq_length + 1)
    text_BS = torch.randint(args.vocab_size, size, generator=torch.Generator().manual_seed(SEED))
    tokens_BS, labels_BS = text_BS[:, :-1].contiguous(), text_BS[:, 1:].contiguous()
    device = torch.device(args.device)
    batch = Batch(tokens_BS, labels_BS, torch.ones(tokens_BS.shape)).to(device)
    return Task(config=config, device=device, dtype=args.dtype, batch=batch)


def _own_model(task: Task) -> Llama:
    with task.device:
        model = Llama(task.config).to(TYPES[task.dtype])
    initialize_whole(model, task.config, SEED)
    return model


def make_ours(task: Task) -> Step:
    model, batch = _own_model(task), task.batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    weights_BS = batch.loss_mask_BS / task.num_tokens

    def step() -> Tensor:
        loss: Tensor = model(batch.tokens_BS, batch.labels_BS, weights_BS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def make_transformers(task: Task, *, fused: bool) -> Step:
    try:
        from transformers import LlamaConfig as HuggingFaceConfig
        from transformers import LlamaForCausalLM
    except ImportError as error:
        raise UserError("the comparison needs transformers: pip install transformers") from error

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

    def step() -> Tensor:
        # Labels are shifted already, so that every token has one, as in our model.
        loss: Tensor = model(input_ids=tokens_BS, labels=labels_BS, shift_labels=labels_BS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def make_trainer(task: Task) -> Step:
    world = World()
    config = RunConfig.from_args(parse_args(trainer_flags(task)), world)
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
        "train-iters": 10**6,
        "lr": LEARNING_RATE,
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


REFERENCES: dict[str, Callable[[Task], Step]] = {
    "transformers": lambda task: make_transformers(task, fused=False),
    "transformers-fused": lambda task: make_transformers(task, fused=True),
}
CONTENDERS = {"ours": make_ours, "trainer": make_trainer, **REFERENCES}


def check_losses(losses: dict[str, float], tolerance: float) -> None:
    """Raises `RuntimeError` unless all agree: a faster model must be the same one."""
    first, *others = losses.values()
    if not all(abs(loss - first) <= tolerance * first for loss in (first, *others)):
        raise RuntimeError(f"the first losses differ: {losses}")


def race(
    task: Task, names: Sequence[str], *, rounds: int, steps: int, clock: Callable[[], float]
) -> Result:
    """Lets the contenders train in turns, in an order that rotates from round to round."""
    contenders = {name: CONTENDERS[name](task) for name in names}
    first_losses = {name: float(step()) for name, step in contenders.items()}
    check_losses(first_losses, LOSS_TOLERANCE[task.dtype])
    for step in contenders.values():
        step()  # may allocate what stays allocated
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def turn(step: Step) -> float:
        _wait(task.device)
        begin = clock()
        for _ in range(steps):
            step()
        _wait(task.device)
        return clock() - begin

    for index in range(rounds):
        start = index % len(names)
        for name in (*names[start:], *names[:start]):
            seconds[name].append(turn(contenders[name]))
        last = ", ".join(f"{name} {turns[-1]:.3f}" for name, turns in seconds.items())
        print(f"round {index + 1:3d}, seconds: {last}", flush=True)
    return Result(
        seconds=seconds, first_losses=first_losses, tokens_per_turn=steps * task.num_tokens
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(task: Task, result: Result) -> list[dict[str, object]]:
    """Prints a line per contender and returns the same as rows."""
    flops = flops_per_token(task.config, task.batch.tokens_BS.shape[1], causal=False)
    references = [name for name in result.seconds if name in REFERENCES]
    rows: list[dict[str, object]] = []
    for name, seconds in result.seconds.items():
        speed = result.tokens_per_second(name)
        ratios = {other: result.ratio(name, other) for other in references if other != name}
        compared = "".join(f", {ratio:.3f} of {other}" for other, ratio in ratios.items())
        print(f"{name:20s}{speed:10.0f} tokens/s, {speed * flops / 1e12:.3f} TFLOP/s{compared}")
        rows.append(
            {
                "contender": name,
                "first_loss": result.first_losses[name],
                "tokens_per_second": speed,
                "tflops": speed * flops / 1e12,
                "ratios": ratios,
                "seconds": seconds,
            }
        )
    return rows


def run(args: argparse.Namespace) -> None:
    """Races, prints and writes the files that `args` name."""
    for flag in ("rounds", "steps", "threads", "micro_batch_size", "seq_length", "vocab_size"):
        if getattr(args, flag) < 1:
            shown = flag.replace("_", "-")
            raise UserError(f"--{shown} {getattr(args, flag)} must be at least 1")
    names = args.contenders.split(",")
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise UserError(f"--contenders knows {', '.join(CONTENDERS)}, not {', '.join(unknown)}")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UserError(f"--json {args.json}: there is no folder {args.json.absolute().parent}")
    torch.set_num_threads(args.threads)
    task = task_of(args)
    batch_size, seq_length = task.batch.tokens_BS.shape
    title = (
        f"{num_parameters(task.config) / 1e6:.2f}M parameters, batch {batch_size} x {seq_length} "
        f"tokens, {task.dtype} on {task.device}"
    )
    print(title)
    clock = CLOCKS[args.clock]
    result = race(task, names, rounds=args.rounds, steps=args.steps, clock=clock)
    rows = report(task, result)
    if args.json is not None:
        shape = {"task": title, "clock": args.clock, "parameters": num_parameters(task.config)}
        write_text(args.json, json.dumps({**shape, "rows": rows}, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return status_of("bench_model.py", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
