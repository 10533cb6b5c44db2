"""Continues prompts with a trained or a converted model, or talks by its chat template."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.tokenizer import Tokenizer, build_tokenizer
from data.tokenizer_config import GPT2_TYPE, TokenizerConfig
from model.llama import Llama
from paro.checkpoint.convert.conversion import OPENERS, format_of
from paro.checkpoint.convert.native import open_native
from paro.checkpoint.convert.source import ModelSource
from paro.distributed.user_errors import run_script
from paro.errors import UserError, about, check_least, reading
from paro.files.object_store import path_of
from paro.files.regular_file import read_text
from paro.report.log import print_line
from tools.generation.chat import chat, chat_template, said_by_user
from tools.generation.continuing import Sampling, Speaker, check_ids, text_of
from tools.shared.command_line import Parser
from tools.shared.device import device_of

LENGTHS = {False: 64, True: 512}  # tokens at most, of a continuation and of an answer in a chat


def open_model(
    directory: Path, iteration: int | None = None, base: str | None = None
) -> ModelSource:
    """Open a folder of any format: a training's newest checkpoint, or one iteration, or a model."""
    kind = format_of(directory)
    if kind == "paro":
        return open_native(directory, iteration, base)
    for flag, value in (("--ckpt-step", iteration), ("--base", base)):
        if value is not None:
            raise UserError(f"{flag} {value} is for trainings, and {directory} is in format {kind}")
    return OPENERS[kind](directory)


def load_tokenizer(source: ModelSource, moved_to: str | None) -> Tokenizer:
    """Return the tokenizer of a model, from its original location or from `moved_to`."""
    saved: Mapping[str, Any] = source.tokenizer or {
        "tokenizer_type": "NullTokenizer",
        "vocab_size": source.config.vocab_size,
    }
    if moved_to is not None:
        tokenizer = build_tokenizer(moved_tokenizer(saved, moved_to))
        if tokenizer.vocab_size > source.config.vocab_size:
            raise UserError(
                f"--tokenizer-model has {tokenizer.vocab_size} entries and the model "
                f"{source.config.vocab_size}: give the tokenizer that it was trained with"
            )
        return tokenizer
    lost = "the tokenizer is not where it was while training ("
    with about(lost, "): say where it is with --tokenizer-model"):
        return build_tokenizer(TokenizerConfig(**saved))


def moved_tokenizer(saved: Mapping[str, Any], moved_to: str) -> TokenizerConfig:
    """Return the tokenizer at another location; GPT-2's two files keep their names."""
    kind = saved["tokenizer_type"]
    if kind == GPT2_TYPE and Path(moved_to).is_dir():
        files: dict[str, Any] = {
            name: str(Path(moved_to) / Path(saved[name]).name)
            for name in ("vocab_file", "merge_file")
        }
        return TokenizerConfig(tokenizer_type=kind, **files)
    # A single file is not GPT-2's pair, and NullTokenizer has no file: choose by the name.
    if kind in (GPT2_TYPE, "NullTokenizer"):
        kind = "Llama2Tokenizer" if moved_to.endswith(".model") else "HuggingFaceTokenizer"
    return TokenizerConfig(tokenizer_type=kind, tokenizer_model=moved_to)


def load_model(source: ModelSource, device: torch.device, dtype: torch.dtype) -> Llama:
    """Return the model with its trained parameters; `UserError` if one is not finite."""
    with torch.device("meta"):
        model = Llama(source.config)
    parameters = {
        name: tensor.cast(dtype).whole(dtype).to(device) for name, tensor in source.tensors.items()
    }
    model.load_state_dict(parameters, assign=True)
    return model.requires_grad_(False)


def add_model_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which model a tool reads, and where and how it computes."""
    add = parser.add_argument
    add("--load", required=True, type=path_of, metavar="DIR", help="the model")
    add("--ckpt-step", type=int, metavar="N", help="which iteration; default: the latest one")
    add("--base", metavar="DIR", help="where the base of --load is, if it moved")
    add(
        "--device",
        metavar="NAME",
        help="cpu, cuda or cuda:N; default: the first GPU, or the CPU without one",
    )
    dtype = parser.add_mutually_exclusive_group().add_argument
    for flag, name in (("--bf16", "bfloat16"), ("--fp16", "float16")):
        dtype(flag, action="store_true", help=f"hold the model and compute in {name}")
    add(
        "--tokenizer-model",
        metavar="PATH",
        help="the tokenizer's path now; default: its path during training",
    )


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description=(
            "Continues prompts with the latest checkpoint of a training, or a model in any format, "
            "in fp32 unless --bf16 or --fp16 is given."
        ),
    )
    add_model_args(parser)
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated")
    add("--prompt-file", type=Path, metavar="FILE", help="more prompts, one a line")
    add(
        "--chat",
        action="store_true",
        help="prompts are what a user says in one conversation, written by the chat template of "
        "the tokenizer's folder; without any they are read from standard input, one a line, until "
        "it ends",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="below 1 more probable tokens are preferred, 0 takes the most probable one always "
        "(default: %(default)s)",
    )
    add(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="draw among the K most probable tokens; 0: all (default: %(default)s)",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw among the fewest tokens that are P of the probability (default: %(default)s)",
    )
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="stop after N tokens, or at the end of the document or answer (default: "
        f"{LENGTHS[False]}; with --chat {LENGTHS[True]})",
    )
    add("--seed", type=int, default=1234, metavar="N", help="of the choices (default: %(default)s)")
    return parser


def read_prompts(args: argparse.Namespace) -> list[str]:
    prompts: list[str] = list(args.prompt or ())
    if args.prompt_file is not None:
        prompts += read_text(args.prompt_file, f"--prompt-file {args.prompt_file}").splitlines()
    if not prompts and not args.chat:
        raise UserError("there is nothing to continue: give --prompt, --prompt-file or --chat")
    return prompts


def encode(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    texts = [tokenizer.encode(prompt) for prompt in prompts]
    if not all(texts):
        raise UserError("--prompt is empty: give some text to continue")
    return texts


def prefix_of(source: ModelSource, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids with which the training samples of a model began."""
    prefix = tokenizer.text_prefix
    if not prefix and source.begins_with_bos and tokenizer.bos is not None:
        prefix = (tokenizer.bos,)
    return prefix


def beginnings(
    source: ModelSource, tokenizer: Tokenizer, texts: Sequence[list[int]]
) -> list[list[int]]:
    """Return the model's input: the prompts, each started as the training samples were."""
    begun = [[*prefix_of(source, tokenizer), *text] for text in texts]
    check_ids(tokenizer, begun, source.config.vocab_size)
    return begun


def continue_all(
    speaker: Speaker, prompts: Sequence[str], texts: Sequence[list[int]], begun: list[list[int]]
) -> None:
    """Print every prompt with its continuation, a single one token by token."""
    steps = speaker.continued(begun)
    if len(prompts) == 1:
        print_line(prompts[0], end="", whole=True)
        for text in text_of(speaker.tokenizer, texts[0], (step[0] for step in steps)):
            print_line(text, end="", whole=True)
        print_line("")
        return
    added: list[list[int]] = [[] for _ in prompts]
    for step in steps:
        for row, token in step.items():
            added[row].append(token)
    for prompt, ids, more in zip(prompts, texts, added, strict=True):
        print_line(prompt + "".join(text_of(speaker.tokenizer, ids, iter(more))), whole=True)


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    sampling = Sampling(
        temperature=args.temperature, seed=args.seed, top_k=args.top_k, top_p=args.top_p
    )
    check_least(1, max_new_tokens=args.max_new_tokens)
    device = device_of(args.device)
    prompts = read_prompts(args)
    with reading(f"--load {args.load}"):
        source = open_model(args.load, args.ckpt_step, args.base)
    tokenizer = load_tokenizer(source, args.tokenizer_model)
    if args.chat:
        template = chat_template(source, args.tokenizer_model)
    else:
        texts = encode(tokenizer, prompts)
        begun = beginnings(source, tokenizer, texts)
    speaker = Speaker(
        model=load_model(source, device, dtype_of(args)),
        tokenizer=tokenizer,
        sampling=sampling,
        ends=source.ends | {tokenizer.eod},
        at_most=args.max_new_tokens or LENGTHS[args.chat],
    )
    if args.chat:
        chat(speaker, template, prompts or said_by_user())
    else:
        continue_all(speaker, prompts, texts, begun)


if __name__ == "__main__":
    run_script("generate.py", main)
