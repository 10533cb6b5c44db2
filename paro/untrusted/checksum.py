"""zlib's CRC-32; where `isal` is installed, by Intel's ISA-L, which is several times faster."""

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this machine: the same checksums, slower
    from zlib import crc32

__all__ = ["crc32"]
