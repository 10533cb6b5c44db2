"""Training speed of this LLaMA beside transformers' LlamaForCausalLM, on one device, in pairs."""

# Both train the same shape from the same weights on the same tokens with torch's fused AdamW, and
# their first losses are compared. They take turns, a few steps each, because a shared machine's
# speed drifts: every ratio is of two neighbours in time, and the medians of all turns are printed.

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

if not __package__:  # started as a script: the repository's packages lie beside tools/
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.atomic_file import replacing
from model.config import LlamaConfig, RecomputeConfig, flops_per_token, num_parameters
from model.hugging_face import hugging_face_config, hugging_face_name
from model.initialization import initialize_whole
from model.llama import Llama

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
LEARNING_RATE = 1e-4
SEED = 1234

TrainStep = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What both models are and what they train on."""

    config: LlamaConfig
    batch_size: int
    seq_length: int
    device: torch.device
    dtype: str

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Seconds of every turn, ours and theirs side by side."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    tokens_per_turn: int

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        return self.tokens_per_turn / median(self.ours), self.tokens_per_turn / median(self.theirs)

    @property
    def ratio(self) -> float:
        """How many times as fast as theirs ours is: the median over neighbouring turns."""
        return median(b / a for a, b in zip(self.ours, self.theirs, strict=True))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--num-layers", type=int, default=6)
    add("--hidden-size", type=int, default=512)
    add("--ffn-hidden-size", type=int, default=1344)
    add("--num-attention-heads", type=int, default=8)
    add("--num-query-groups", type=int, help="default: as many as --num-attention-heads")
    add("--vocab-size", type=int, default=4096)
    add("--tie-embeddings-and-output-weights", action="store_true")
    add("--recompute", action="store_true", help="full recomputation in both")
    add("--micro-batch-size", type=int, default=4)
    add("--seq-length", type=int, default=256)
    add("--dtype", choices=sorted(TYPES), default="fp32")
    add("--device", default="cpu", help="cpu, or a CUDA device such as cuda:0")
    add("--threads", type=int, default=2, help="of one process, on a CPU")
    add("--turns", type=int, default=9, help="of each model; the first of each is not counted")
    add("--steps", type=int, default=2, help="optimizer steps of a turn")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def shape_of(args: argparse.Namespace) -> Shape:
    heads = args.num_attention_heads
    if args.hidden_size % heads != 0:
        raise ValueError(
            f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads {heads}"
        )
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
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: torch sees no CUDA device")
    return Shape(
        config=config,
        batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        device=device,
        dtype=args.dtype,
    )


def make_ours(shape: Shape, tokens_BS: Tensor, labels_BS: Tensor) -> tuple[TrainStep, Llama]:
    """One optimizer step of this model, and the model for its weights."""
    with shape.device:
        model = Llama(shape.config).to(TYPES[shape.dtype])
    initialize_whole(model, shape.config, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    weights_BS = torch.full_like(labels_BS, 1.0 / shape.tokens, dtype=torch.float32)

    def step() -> Tensor:
        loss: Tensor = model(tokens_BS, labels_BS, weights_BS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, model


def make_theirs(shape: Shape, tokens_BS: Tensor, labels_BS: Tensor, weights: Llama) -> TrainStep:
    """One optimizer step of transformers' model, which starts from the same weights."""
    try:
        from transformers import LlamaConfig as HuggingFaceConfig
        from transformers import LlamaForCausalLM
    except ImportError as error:
        raise ValueError("the comparison needs transformers: pip install transformers") from error

    sizes = HuggingFaceConfig(**hugging_face_config(shape.config), use_cache=False)
    with shape.device:
        model = LlamaForCausalLM(sizes).to(TYPES[shape.dtype])
    state = {hugging_face_name(name): value for name, value in weights.state_dict().items()}
    if shape.config.tie_embeddings_and_output_weights:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    model.train()
    if shape.config.recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> Tensor:
        # Given as shifted, so that every token has a label, as in ours.
        loss: Tensor = model(input_ids=tokens_BS, labels=labels_BS, shift_labels=labels_BS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def check_losses(shape: Shape, ours: Tensor, theirs: Tensor) -> None:
    """Raises `RuntimeError` unless both first losses agree: a faster model must be the same one."""
    if not torch.isclose(ours, theirs, rtol=LOSS_TOLERANCE[shape.dtype], atol=0.0):
        raise RuntimeError(f"the losses differ: {float(ours)} here, {float(theirs)} transformers")


def compare(shape: Shape, *, turns: int, steps: int) -> Comparison:
    """Lets both models train in turns of `steps` optimizer steps."""
    generator = torch.Generator().manual_seed(SEED)
    size = (shape.batch_size, shape.seq_length + 1)
    text_BS = torch.randint(shape.config.vocab_size, size, generator=generator).to(shape.device)
    tokens_BS, labels_BS = text_BS[:, :-1].contiguous(), text_BS[:, 1:].contiguous()
    step_ours, model = make_ours(shape, tokens_BS, labels_BS)
    step_theirs = make_theirs(shape, tokens_BS, labels_BS, model)
    check_losses(shape, step_ours().float(), step_theirs().float())

    def seconds(step: TrainStep) -> float:
        _wait(shape.device)
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        _wait(shape.device)
        return time.perf_counter() - begin

    ours, theirs = [], []
    for turn in range(turns):
        if turn % 2 == 0:
            ours.append(seconds(step_ours))
            theirs.append(seconds(step_theirs))
        else:
            theirs.append(seconds(step_theirs))
            ours.append(seconds(step_ours))
        print(f"turn {turn + 1:3d}: ours {ours[-1]:.3f} s, theirs {theirs[-1]:.3f} s", flush=True)
    tokens = steps * shape.tokens
    return Comparison(ours=tuple(ours[1:]), theirs=tuple(theirs[1:]), tokens_per_turn=tokens)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(args: argparse.Namespace) -> None:
    for flag, value, least in (
        ("--turns", args.turns, 2),
        ("--steps", args.steps, 1),
        ("--threads", args.threads, 1),
    ):
        if value < least:
            raise ValueError(f"{flag} {value} must be at least {least}")
    torch.set_num_threads(args.threads)
    shape = shape_of(args)
    print(
        f"{num_parameters(shape.config) / 1e6:.2f}M parameters, batch {shape.batch_size} x "
        f"{shape.seq_length} tokens, {shape.dtype} on {shape.device}"
    )
    comparison = compare(shape, turns=args.turns, steps=args.steps)
    ours, theirs = comparison.tokens_per_second
    flops = flops_per_token(shape.config, shape.seq_length, causal=False)
    print(
        f"ours {ours:.0f} tokens/s ({ours * flops / 1e12:.3f} TFLOP/s), "
        f"transformers {theirs:.0f} tokens/s, ratio {comparison.ratio:.3f}"
    )
    if args.json is not None:
        figures = {
            "parameters": num_parameters(shape.config),
            "tokens_per_second": ours,
            "transformers_tokens_per_second": theirs,
            "ratio": comparison.ratio,
            "seconds": comparison.ours,
            "transformers_seconds": comparison.theirs,
        }
        with replacing(args.json) as temporary:
            temporary.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        run(args)
    except (OSError, ValueError) as error:
        print(f"bench_model.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
