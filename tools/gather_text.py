"""Writes real text that every machine has, Python's own standard library, as JSON lines."""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

if not __package__:  # run as a script: the repository root is not on sys.path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paro.distributed.user_errors import run_script
from paro.errors import UserError
from paro.report.log import print_line
from tools.shared.command_line import Parser
from tools.shared.output import write_text

# Tests are excluded because they are repetitive, site-packages because it differs by machine.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
MACHINE_SPECIFIC = ("_sysconfigdata", "__phello__")


def python_sources(root: Path) -> Iterator[Path]:
    """Yield the library's sources below `root`, sorted, without tests and packages."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        skipped = SKIPPED_FOLDERS.intersection(parts) or parts[0].startswith("config-")
        if not skipped and not path.name.startswith(MACHINE_SPECIFIC):
            yield path


def read_texts(paths: Iterator[Path]) -> list[str]:
    """Return the contents of the files that are UTF-8 and not empty."""
    texts = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, PermissionError):
            continue
        if text.strip():
            texts.append(text)
    return texts


def gather(output: Path, *, min_bytes: int, seed: int) -> str:
    """Write the library to `output` in a seeded random order; return a summary."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = read_texts(python_sources(root))
    size = sum(len(text.encode()) for text in texts)
    if size < min_bytes:
        raise UserError(
            f"{root} holds {size:,} bytes of Python sources, fewer than --min-bytes {min_bytes:,}: "
            "use a complete Python, or give a smaller --min-bytes"
        )
    random.Random(seed).shuffle(texts)
    write_text(output, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return f"{len(texts):,} files, {size:,} bytes of Python sources from {root} -> {output}"


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description=(
            "Gathers real text without a network: the sources and docstrings of the Python that "
            'runs this, one JSON line {"text": ...} per file. The order is random but the same '
            "every time, so that --split of the training cuts off a representative rest."
        ),
        epilog="next: tools/train_tokenizer.py and tools/preprocess_data.py on the same file",
    )
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument(
        "--min-bytes",
        type=int,
        default=8_000_000,
        help="fail if there is less text than this (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=1234, help="of the order of the files (default: %(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    print_line(gather(args.output, min_bytes=args.min_bytes, seed=args.seed))


if __name__ == "__main__":
    run_script("gather_text.py", main)
