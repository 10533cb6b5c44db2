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


def loss_mask_path(prefix: str | Path) -> Path:
    return path_of(f"{prefix}.answered")


def open_loss_mask(prefix: str, content: RegularFile | CheckedFile, size: int) -> CheckedFile:
    """Open the loss mask of a corpus of `size` tokens; `UserError` if it is of another .bin."""
    file = CheckedFile(RegularFile(loss_mask_path(prefix)), "write the corpus again")
    is_other = file.size != size + _SUM_BYTES
    if not is_other and isinstance(content, CheckedFile):
        is_other = file.read(size, _SUM_BYTES) != content.sum_of_table
    if is_other:
        raise UserError(
            f"{file.path} does not belong to {content.path}: restore both, write them again with "
            "tools/preprocess_data.py, or remove it to train on every token"
        )
    return file
