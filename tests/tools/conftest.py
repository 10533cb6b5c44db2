"""A tokenizer for tests of several tools, and nodes of clusters that start at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.warm_python import warm_python
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
