"""A corpus for tests of loading."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.corpora import write_corpus


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """100 documents, each of 20 ids in sequence."""
    documents = ([range(begin, begin + 20)] for begin in range(100))
    return str(write_corpus(tmp_path / "corpus", documents))
