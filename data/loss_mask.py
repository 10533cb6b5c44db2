"""Which tokens of a corpus of conversations are answered: `<prefix>.answered`, next to `.bin`.

The file has a byte for each token, 1 where it is trained on and 0 where it is only read, then the
CRC-32 of the checksums of .bin (uint32, little-endian), so that it is not taken for another corpus.
`<prefix>.answered.crc` holds the checksums of its blocks. Without it every token is trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from data.atomic_file import replacing
from data.block_checksums import BlockSums, CheckedFile
from paro.errors import UserError
from paro.untrusted.regular_file import RegularFile

MASKED, TRAINED, BEGINS = 0, 1, 2  # BEGINS: masked, and the first token of a conversation
_SUM_BYTES = 4
LossMask = NDArray[np.uint8]


def loss_mask_paths(prefix: str | Path) -> tuple[Path, Path]:
    """Return the file, and its checksums."""
    return Path(f"{prefix}.answered"), Path(f"{prefix}.answered.crc")


class LossMaskFile:
    """The loss mask of a corpus of `size` tokens; `UserError` if it belongs to another .bin."""

    def __init__(self, prefix: str | Path, content: RegularFile | CheckedFile, size: int) -> None:
        path, sums = loss_mask_paths(prefix)
        again = "write the corpus again"
        self._file = CheckedFile(RegularFile(path), RegularFile(sums), again)
        is_other = self._file.size != size + _SUM_BYTES
        if not is_other and isinstance(content, CheckedFile):
            is_other = bytes(self._file.read(size, _SUM_BYTES)) != _sum_bytes(content.sum_of_table)
        if is_other:
            raise UserError(
                f"{path} does not belong to {content.path}: restore both, write them again with "
                "tools/preprocess_data.py, or remove it to train on every token"
            )

    def read(self, begin: int, count: int) -> LossMask:
        """Return the loss mask of `count` tokens from the one at `begin` on."""
        return np.frombuffer(self._file.read(begin, count), np.uint8)


class LossMaskWriter:
    """A writer that appends to the loss mask of a corpus."""

    def __init__(self, stream: BinaryIO, sums_file: Path) -> None:
        self._stream = stream
        self._sums_file = sums_file
        self._sums = BlockSums()
        self.num_trained = 0

    def write(self, loss_mask: LossMask) -> None:
        self.num_trained += int(np.count_nonzero(loss_mask))
        self._append(loss_mask.tobytes())

    def _append(self, content: bytes) -> None:
        self._stream.write(content)
        self._sums.update(content)

    def complete(self, bin_sums: BlockSums) -> None:
        """End the file for the .bin file with these checksums."""
        self._append(_sum_bytes(bin_sums.sum_of_table))
        self._stream.close()
        self._sums.write(self._sums_file)


@contextmanager
def replacing_loss_mask(prefix: str | Path, *, wanted: bool) -> Iterator[LossMaskWriter | None]:
    """Write the two files when the block succeeds; if unwanted, remove earlier ones."""
    with ExitStack() as files:
        temporary, sums_file = (
            files.enter_context(replacing(path, wanted=wanted)) for path in loss_mask_paths(prefix)
        )
        if wanted:
            yield LossMaskWriter(files.enter_context(temporary.open("wb")), sums_file)
        else:
            yield None


def _sum_bytes(number: int) -> bytes:
    return number.to_bytes(_SUM_BYTES, "little")
