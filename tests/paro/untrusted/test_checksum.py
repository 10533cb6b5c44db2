"""Checksums equal zlib's, with or without isal."""

from __future__ import annotations

import importlib
import random
import sys
import zlib

import pytest

from paro.untrusted import checksum


def test_sums_are_those_of_zlib_piece_by_piece() -> None:
    assert "isal" in checksum.crc32.__module__
    content = random.Random(0).randbytes(100_003)
    for cuts in ((), (1,), (7, 4096, 65_536)):
        total = 0
        for begin, end in zip((0, *cuts), (*cuts, len(content)), strict=True):
            total = checksum.crc32(memoryview(content)[begin:end], total)
        assert total == zlib.crc32(content)
    assert checksum.crc32(b"") == zlib.crc32(b"")


def test_without_isal_zlib_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "isal.isal_zlib", None)
        assert importlib.reload(checksum).crc32 is zlib.crc32
    assert importlib.reload(checksum).crc32 is not zlib.crc32
