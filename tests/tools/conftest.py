"""Tokenizers, checkpoints and conversions for tests of several tools; nodes that start at once."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path

import pytest
from torch import Tensor

from paro.config.run import RunConfig
from paro.training.step import Training
from tests.helpers.training import built, save_run
from tests.helpers.warm_python import warm_python
from tools.convert_checkpoint import main
from tools.train_tokenizer import main as train_tokenizer

TEXT = "def main() -> None:\n    print('naïve 雪 text')\n" * 40


@pytest.fixture(scope="session")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of 300 pieces, trained on TEXT."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    given = ["--input", str(folder / "text.txt"), "--output-prefix", str(folder / "pieces")]
    train_tokenizer([*given, "--vocab-size", "300"])
    return folder / "pieces.model"


@pytest.fixture
def warm_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's nodes and ranks do not import torch again."""
    monkeypatch.setattr(sys, "executable", str(warm_python() / "python"))


SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --init-method-std 0.3 "
    "--micro-batch-size 1 --train-iters 1 --lr 0.1 --distributed-backend gloo --mock-data"
)


def trained(folder: Path, *flags: str) -> tuple[RunConfig, Training]:
    return built([*SIZES.split(), "--save", str(folder), *flags])


def save_untrained(folder: Path, flags: str) -> Path:
    save_run(*trained(folder, *flags.split()))
    return folder


class LiveBytes:
    """The bytes of watched tensors in memory, and the most that there were at a time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def watched(self, values: Tensor) -> Tensor:
        self._add(values.nbytes)
        weakref.finalize(values, self._add, -values.nbytes)
        return values

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)


def convert(source: str, target: str, there: Path, here: Path, *words: object) -> Path:
    """Runs tools/convert_checkpoint.py; returns the folder that it has made."""
    given = ["--from", source, "--to", target, "--input", there, "--output", here, *words]
    main([*map(str, given)])
    return here
