"""Trains a SentencePiece tokenizer that reproduces source code and prose exactly."""

from __future__ import annotations

import argparse
import io
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.corpus import read_batches, texts_of
from data.sources import SourceChunk
from paro.distributed.user_errors import run_script
from paro.errors import UserError, check_least, importing
from paro.report.log import print_line
from tools.preprocessing.encode import Tally
from tools.preprocessing.inputs import add_source_args, chunks_of
from tools.preprocessing.progress import Progress, elapsing
from tools.shared.command_line import Parser
from tools.shared.output import output_file

CHUNK_CHARACTERS = 2000  # the trainer takes short texts; at a cut only one piece can be missed
SEED = 1234
LOG_INTERVAL = 100_000  # documents between lines of progress, where there is no terminal for a bar

# LLaMA's special ids. Decoding reproduces the text because nothing is normalized, no blank is added
# or dropped, blanks and newlines are ordinary pieces and unknown characters become bytes.
TRAINER_OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": -1,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "max_sentence_length": 4 * CHUNK_CHARACTERS,  # in bytes
    "num_threads": 1,  # reproducible: the same model every time
    "minloglevel": 2,  # errors only
}


def sampled_chunks(sources: Sequence[SourceChunk], *, key: str, sample_bytes: int) -> list[str]:
    """Yield the texts in short chunks; if larger, sampled to 1 to 2 times `sample_bytes`."""
    total = sum(source.num_bytes for source in sources)
    part = min(1.0, sample_bytes / max(1, total))
    chooser = random.Random(SEED)
    chosen: list[str] = []
    size = 0
    progress = Progress(total_bytes=total, interval=LOG_INTERVAL)
    for batch in read_batches(sources, [key]):
        documents = list(texts_of(batch, [key], flag="--json-key"))
        for text in (text for texts in documents for text in texts.by_key[0]):
            for begin in range(0, len(text), CHUNK_CHARACTERS):
                if chooser.random() < part:
                    chosen.append(text[begin : begin + CHUNK_CHARACTERS])
                    size += len(chosen[-1])
        if size > 2 * sample_bytes:  # there is more text than the file sizes suggest
            part /= 2
            chosen = [chunk for chunk in chosen if chooser.random() < 0.5]
            size = sum(map(len, chosen))
        progress.count(
            Tally(
                documents=0 if batch.unfinished else len(documents),
                num_bytes=sum(texts.num_bytes for texts in documents),
                advance=batch.advance,
            )
        )
    progress.finish()
    return chosen


def train(chunks: Sequence[str], *, vocab_size: int, character_coverage: float) -> bytes:
    """Return the content of a SentencePiece model file."""
    with importing("training a tokenizer needs the package sentencepiece"):
        from sentencepiece import SentencePieceTrainer
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(chunks),
            model_writer=model,
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            **TRAINER_OPTIONS,
        )
    except RuntimeError as error:  # "INTERNAL: file.cc(1) [condition] What is wrong."
        reason = str(error).rpartition("] ")[2].strip()
        raise UserError(
            f"--vocab-size {vocab_size} does not work with this text: {reason}"
        ) from error
    return model.getvalue()


def bytes_per_token(model: bytes, chunks: Sequence[str]) -> float:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_proto=model)
    num_tokens = sum(len(processor.encode(chunk)) for chunk in chunks)
    return sum(len(chunk.encode()) for chunk in chunks) / num_tokens


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description=(
            "Trains a SentencePiece BPE tokenizer with byte fallback and LLaMA's special ids "
            "(0 unknown, 1 begin, 2 end) and writes PREFIX.model."
        ),
        epilog=(
            "next: tools/preprocess_data.py --tokenizer-type SentencePieceTokenizer "
            "--tokenizer-model PREFIX.model"
        ),
    )
    add_source_args(parser.add_argument_group("input data"))
    parser.add_argument(
        "--json-key",
        default="text",
        help="the field of a line or row that has the text (default: %(default)s)",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="PREFIX.model is written"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=4096, help="number of pieces (default: %(default)s)"
    )
    parser.add_argument(
        "--character-coverage",
        type=float,
        default=0.99995,
        help="part of all characters that get pieces, the rest become bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--sample-bytes",
        type=int,
        default=100_000_000,
        help="train on about this much of the text, evenly chosen; 100 MB take some ten seconds "
        "(default: %(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    sources = chunks_of(args)
    if not 0 < args.character_coverage <= 1:
        raise UserError(f"--character-coverage {args.character_coverage} must be in (0, 1]")
    if not 1 <= args.vocab_size < 2**31:
        raise UserError(f"--vocab-size {args.vocab_size} must be at least 1 and below 2**31")
    check_least(1, sample_bytes=args.sample_bytes)
    begin = time.perf_counter()
    chunks = sampled_chunks(sources, key=args.json_key, sample_bytes=args.sample_bytes)
    size = sum(len(chunk.encode()) for chunk in chunks)
    if size == 0:
        raise UserError(f"--input {' '.join(args.input)} holds no text")
    with elapsing(f"training {args.vocab_size} pieces on {size / 1e6:.1f} MB of text"):
        model = train(
            chunks, vocab_size=args.vocab_size, character_coverage=args.character_coverage
        )
    path = Path(f"{args.output_prefix}.model")
    with output_file(path) as temporary:
        temporary.write_bytes(model)
    ratio = bytes_per_token(model, chunks[:: max(1, len(chunks) // 200)])
    seconds = time.perf_counter() - begin
    print_line(f"wrote {path}: {ratio:.2f} bytes of text per token, {seconds:.1f} s")


if __name__ == "__main__":
    run_script("train_tokenizer.py", main)
