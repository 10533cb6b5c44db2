"""Which tokens of a corpus of conversations are answered: `<prefix>.answered`, beside `.bin`.

The file has a byte for each token, 1 where it is answered and 0 where it is only read, then the
CRC-32 of the checksums of .bin (uint32, little-endian), so that it is not taken for another corpus.
`<prefix>.answered.crc` holds the checksums of its blocks. A corpus without it is answered whole.
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

READ, ANSWERED, BEGINS = 0, 1, 2  # BEGINS: read, and the first token of a conversation
_SUM_BYTES = 4
_PART_TOKENS = 2**22
Marks = NDArray[np.uint8]


def answered_paths(prefix: str | Path) -> tuple[Path, Path]:
    """Return the file, and its checksums."""
    return Path(f"{prefix}.answered"), Path(f"{prefix}.answered.crc")


class AnsweredTokens:
    """The marks of all `size` tokens of a corpus with this .bin; `UserError` if of another one."""

    def __init__(self, prefix: str | Path, content: RegularFile | CheckedFile, size: int) -> None:
        path, sums = answered_paths(prefix)
        again = "write the corpus again"
        self._file = CheckedFile(RegularFile(path), RegularFile(sums), again)
        self._size = size
        is_other = self._file.size != size + _SUM_BYTES
        if not is_other and isinstance(content, CheckedFile):
            is_other = bytes(self._file.read(size, _SUM_BYTES)) != _sum_bytes(content.sum_of_table)
        if is_other:
            raise UserError(
                f"{path} does not belong to {content.path}: restore both, write them again with "
                "tools/preprocess_data.py, or remove it to train on every token"
            )

    def read(self, begin: int, count: int) -> Marks:
        """Return the marks of `count` tokens from the one at `begin` on."""
        return np.frombuffer(self._file.read(begin, count), np.uint8)

    def parts(self) -> Iterator[Marks]:
        """Yield all marks, part by part."""
        for begin in range(0, self._size, _PART_TOKENS):
            yield self.read(begin, min(_PART_TOKENS, self._size - begin))


class AnsweredWriter:
    """Appends marks to a file."""

    def __init__(self, stream: BinaryIO, sums_file: Path) -> None:
        self._stream = stream
        self._sums_file = sums_file
        self._sums = BlockSums()
        self.num_answered = 0

    def write(self, marks: Marks) -> None:
        self.num_answered += int(np.count_nonzero(marks))
        self._append(marks.tobytes())

    def _append(self, content: bytes) -> None:
        self._stream.write(content)
        self._sums.update(content)

    def complete(self, bin_sums: BlockSums) -> None:
        """End the file for the .bin file with these checksums."""
        self._append(_sum_bytes(bin_sums.sum_of_table))
        self._stream.close()
        self._sums.write(self._sums_file)


@contextmanager
def replacing_answered(prefix: str | Path, *, wanted: bool) -> Iterator[AnsweredWriter | None]:
    """Write the two files when the block succeeds; if unwanted, remove those of before."""
    paths = answered_paths(prefix)
    if not wanted:
        yield None
        for path in paths:
            path.unlink(missing_ok=True)
        return
    with ExitStack() as files:
        temporary, sums_file = (files.enter_context(replacing(path)) for path in paths)
        stream = files.enter_context(temporary.open("wb"))
        yield AnsweredWriter(stream, sums_file)


def _sum_bytes(number: int) -> bytes:
    return number.to_bytes(_SUM_BYTES, "little")
