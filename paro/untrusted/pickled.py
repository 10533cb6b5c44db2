"""Unpickles untrusted data: plain values and chosen classes, in bounded memory."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, ClassVar

# Opcodes that a pickle of plain records needs. Left out: sets, byte arrays, out-of-band buffers,
# and the old ways to make an instance.
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINBYTES, pickle.SHORT_BINBYTES),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
    pickle.BINPERSID,
)
_Load = Callable[["CheckedUnpickler"], None]


class _Dispatch(dict[int, _Load]):
    def __missing__(self, code: int) -> _Load:
        raise pickle.UnpicklingError(f"it holds the opcode {code}")


class CheckedUnpickler(pickle._Unpickler):
    """An unpickler that makes only the `classes` of a subclass, and changes nothing that exists.

    It is Python's unpickler in Python, of half the speed. In the one in C a file of 8 bytes takes
    64 GB for its memo, and a key nested a million times overflows the stack as it is hashed.
    """

    dispatch: ClassVar[Any] = _Dispatch()  # filled below
    classes: ClassVar[Mapping[tuple[str, str], Any]] = {}  # by module and name
    stack: list[Any]

    def __init__(self, content: bytes | memoryview) -> None:
        super().__init__(io.BytesIO(content))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.classes:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return self.classes[module, name]

    def is_key(self, key: object) -> bool:
        """Return whether a dict may have this key, which is then hashed."""
        return type(key) is str


_BUILTIN: dict[int, Any] = pickle._Unpickler.dispatch


def _with_checked_keys(opcode: bytes, keys: slice) -> _Load:
    """Return what an opcode does, after a check of the keys at `keys` of the stack."""

    def load(unpickler: CheckedUnpickler) -> None:
        if not all(map(unpickler.is_key, unpickler.stack[keys])):
            raise pickle.UnpicklingError("it holds a dict with keys of other types")
        _BUILTIN[opcode[0]](unpickler)

    return load


def _build(unpickler: CheckedUnpickler) -> None:
    """Set the fields of a record; on a class or a constant it would change the whole process."""
    record = unpickler.stack[-2]
    if isinstance(record, type) or not is_dataclass(record):
        raise pickle.UnpicklingError(f"it sets fields of {type(record).__name__}")
    _BUILTIN[pickle.BUILD[0]](unpickler)


CheckedUnpickler.dispatch.update({code[0]: _BUILTIN[code[0]] for code in _OPCODES})
CheckedUnpickler.dispatch.update(
    {
        pickle.SETITEM[0]: _with_checked_keys(pickle.SETITEM, slice(-2, -1)),
        pickle.SETITEMS[0]: _with_checked_keys(pickle.SETITEMS, slice(None, None, 2)),
        pickle.BUILD[0]: _build,
    }
)
