"""Continues a prompt with a trained model, printing the text as it is produced."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if not __package__:  # started as a script: the repository's packages lie beside tools/
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer
from model.config import LlamaConfig
from model.llama import Llama
from paro.checkpoint.directory import read_common
from paro.checkpoint.load import load_parameters
from paro.runtime import run_script, user_mistakes

UNFINISHED = "\ufffd"  # how the bytes of a character decode that is not complete yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the model's probabilities."""

    temperature: float  # 0: always the most probable
    seed: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature {self.temperature} must be 0 (greedy) or positive")


@torch.no_grad()
def continuation(
    model: Llama, prompt: Sequence[int], sampling: Sampling, *, num_ids: int
) -> Iterator[int]:
    """Token after token behind `prompt`, endlessly.

    Only ids below `num_ids` are drawn: rows of the output layer above are padding.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens_BS = torch.tensor([prompt])
    while True:
        logits_V = model(tokens_BS)[0, -1, :num_ids].float()
        if sampling.temperature == 0.0:
            token_B = logits_V.argmax(keepdim=True)
        else:
            # In fp64, so that a tiny temperature gives the greedy choice and no overflow.
            shifted_V = (logits_V - logits_V.max()).double() / sampling.temperature
            token_B = torch.multinomial(shifted_V.softmax(0), 1, generator=generator)
        yield int(token_B)
        tokens_BS = torch.cat([tokens_BS, token_B[None]], dim=1)


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterator[int]) -> Iterator[str]:
    """The text that `tokens` add to `prompt`, in pieces that end with whole characters."""
    ids = list(prompt)
    shown = len(tokenizer.decode(ids))
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith(UNFINISHED):
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(ids)[shown:]


def until_end(tokens: Iterator[int], *, end: int, at_most: int) -> Iterator[int]:
    """The first `at_most` tokens, or those before `end`."""
    for _, token in zip(range(at_most), tokens, strict=False):
        if token == end:
            return
        yield token


def load_common(directory: str) -> dict[str, Any]:
    """What the latest checkpoint says of its run."""
    common = read_common(directory)
    if common is None:
        raise ValueError(f"--load {directory} holds no checkpoint: give the --save of a training")
    return common


def load_tokenizer(saved: Mapping[str, Any], moved_to: str | None) -> Tokenizer:
    """The tokenizer of a run, from where it lay then or from where it lies now."""
    if moved_to is not None:
        return build_tokenizer(TokenizerConfig(**{**saved, "tokenizer_model": moved_to}))
    try:
        return build_tokenizer(TokenizerConfig(**saved))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"the tokenizer is not where it was while training ({error}): say where it is with "
            "--tokenizer-model"
        ) from error


def load_model(directory: str, fields: Mapping[str, Any], tokenizer: Tokenizer) -> Llama:
    """The model with its trained parameters, in fp32 on the CPU."""
    # Lengths are the caller's affair; nothing in the model depends on this field.
    config = LlamaConfig(**fields, max_position_embeddings=1)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"--tokenizer-model has {tokenizer.vocab_size} entries and the model "
            f"{config.vocab_size}: give the tokenizer that it was trained with"
        )
    with torch.device("meta"):
        model = Llama(config)
    parameters: dict[str, Tensor] = load_parameters(directory)
    model.load_state_dict(parameters, assign=True)
    return model.requires_grad_(False)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(
            "Continues a prompt with the latest checkpoint of a training, on the CPU in fp32. "
            "Every token runs the model over the whole text so far."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--load", required=True, metavar="DIR", help="the --save of a training")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="below 1 more probable tokens are preferred, 0 takes the most probable one always "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="stop after N tokens, or at the end of the document (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=1234, metavar="N", help="of the choices (default: %(default)s)"
    )
    parser.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="where the tokenizer lies now; default: where it lay while training",
    )
    return parser


def generate(args: argparse.Namespace) -> None:
    sampling = Sampling(temperature=args.temperature, seed=args.seed)
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens} must be at least 1")
    common = load_common(args.load)
    tokenizer = load_tokenizer(common["tokenizer"], args.tokenizer_model)
    prompt = tokenizer.encode(args.prompt)
    if not prompt:
        raise ValueError("--prompt is empty: give some text to continue")
    prompt = [*tokenizer.text_prefix, *prompt]  # as the texts of its training began
    model = load_model(args.load, common["model"], tokenizer)
    tokens = until_end(
        continuation(model, prompt, sampling, num_ids=tokenizer.vocab_size),
        end=tokenizer.eod,
        at_most=args.max_new_tokens,
    )
    print(args.prompt, end="", flush=True)
    for text in text_of(tokenizer, prompt, tokens):
        print(text, end="", flush=True)
    print()


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    with user_mistakes():
        generate(args)


if __name__ == "__main__":
    run_script("generate.py", main)
