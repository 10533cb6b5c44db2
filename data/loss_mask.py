"""Which tokens of a corpus of conversations are answered: `<prefix>.answered`, next to `.bin`.

The file has a byte for each token, 1 where it is trained on and 0 where it is only read, then the
CRC-32 of the checksums of .bin (uint32, little-endian), so that it is not taken for another corpus.
`<prefix>.answered.crc` holds the checksums of its blocks. Without it every token is trained on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.block_checksums import CheckedFile
from paro.errors import UserError
from paro.files.object_store import path_of
from paro.files.regular_file import RegularFile

MASKED, TRAINED, BEGINS = 0, 1, 2  # BEGINS: masked, and the first token of a conversation
_SUM_BYTES = 4
LossMask = NDArray[np.uint8]


def loss_mask_paths(prefix: str | Path) -> tuple[Path, Path]:
    """Return the file, and its checksums."""
    return path_of(f"{prefix}.answered"), path_of(f"{prefix}.answered.crc")


class LossMaskFile:
    """The loss mask of a corpus of `size` tokens; `UserError` if it belongs to another .bin."""

    def __init__(self, prefix: str | Path, content: RegularFile | CheckedFile, size: int) -> None:
        path, sums = loss_mask_paths(prefix)
        again = "write the corpus again"
        self._file = CheckedFile(RegularFile(path), RegularFile(sums), again)
        is_other = self._file.size != size + _SUM_BYTES
        if not is_other and isinstance(content, CheckedFile):
            is_other = self._file.read(size, _SUM_BYTES) != content.sum_of_table
        if is_other:
            raise UserError(
                f"{path} does not belong to {content.path}: restore both, write them again with "
                "tools/preprocess_data.py, or remove it to train on every token"
            )

    def read(self, begin: int, count: int) -> LossMask:
        """Return the loss mask of `count` tokens from the one at `begin` on."""
        return np.frombuffer(self._file.read(begin, count), np.uint8)
