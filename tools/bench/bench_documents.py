"""Time of a pass with documents kept apart, relative to the same samples read as one text each."""

# Processor time of forward and backward, on the CPU: there every document is a call of its own to
# attention's kernel. The two kinds of pass take turns; a ratio is the median over neighbours.

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from model.config import LlamaConfig
from model.initialization import initialize_whole
from model.llama import Llama
from paro.errors import UserError
from paro.report.log import print_line
from tools.shared.command_line import Parser, status_of

B = 2
HEAD = 64  # channels
VOCABULARY = 101


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--lengths", default="8,64,128", metavar="N,...", help="of documents, in tokens")
    add("--seq-length", type=int, default=512, help="a multiple of the lengths")
    add("--num-layers", type=int, default=2)
    add("--hidden-size", type=int, default=256, help=f"a multiple of {HEAD}")
    add("--rounds", type=int, default=7, help="pairs of passes")
    return parser


def ratio_of(model: Llama, seq_length: int, length: int, rounds: int) -> float:
    """Time of a pass with documents of `length` tokens, of one without documents."""
    generator = torch.Generator().manual_seed(1)
    tokens_BS, labels_BS = torch.randint(VOCABULARY, (2, B, seq_length), generator=generator)
    weights_BS = torch.full((B, seq_length), 1.0 / (B * seq_length))
    positions_BS = (torch.arange(seq_length) % length).expand(B, seq_length)
    lengths = (length,) * (B * seq_length // length)

    def plain() -> Tensor:
        return model(tokens_BS, labels_BS, weights_BS)

    def apart() -> Tensor:
        return model(
            tokens_BS, labels_BS, weights_BS, positions_BS=positions_BS, document_lengths=lengths
        )

    _seconds(plain), _seconds(apart)
    return median(_seconds(apart) / _seconds(plain) for _ in range(rounds))


def _seconds(forward: Callable[[], Tensor]) -> float:
    begin = time.process_time()
    forward().backward()
    return time.process_time() - begin


def build(args: argparse.Namespace) -> Llama:
    config = LlamaConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.hidden_size * 11 // 4,
        num_attention_heads=args.hidden_size // HEAD,
        num_query_groups=args.hidden_size // HEAD,
        kv_channels=HEAD,
        max_position_embeddings=args.seq_length,
        vocab_size=VOCABULARY,
    )
    model = Llama(config)
    initialize_whole(model, config, 1)
    return model


def read_lengths(args: argparse.Namespace) -> list[int]:
    words = args.lengths.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise UserError(f"--lengths {args.lengths!r}: give numbers of tokens, e.g. 8,64,128")
    odd = next((word for word in words if args.seq_length % int(word) != 0), None)
    if odd is not None:
        raise UserError(f"--seq-length {args.seq_length} is not a multiple of --lengths {odd}")
    return list(map(int, words))


def run(args: argparse.Namespace) -> None:
    for name in ("seq_length", "num_layers", "hidden_size", "rounds"):
        number = getattr(args, name)
        if number < 1:
            raise UserError(f"--{name.replace('_', '-')} {number} must be at least 1")
    if args.hidden_size % HEAD != 0:
        raise UserError(f"--hidden-size {args.hidden_size} is not a multiple of {HEAD}")
    lengths = read_lengths(args)
    torch.set_num_threads(1)
    model = build(args)
    for length in lengths:
        ratio = ratio_of(model, args.seq_length, length, args.rounds)
        print_line(
            f"documents of {length} of {args.seq_length} tokens: {ratio:.2f} of a pass without "
            f"(median of {args.rounds} pairs)"
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return status_of("bench_documents.py", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
