"""CRC-32 as zlib has it: by Intel's ISA-L where `isal` is installed, at several times the speed."""

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this machine: the same sums, slower
    from zlib import crc32

__all__ = ["crc32"]
