"""A hostile pickle runs nothing, changes nothing and takes no more memory than its size allows."""

from __future__ import annotations

import pickle
import resource
from dataclasses import dataclass
from typing import Any

import pytest

from paro.untrusted.pickled import CheckedUnpickler


@dataclass
class Record:
    """A class that the unpickler of these tests trusts."""

    name: str = ""


class Trusting(CheckedUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Record if name == "Record" else super().find_class(module, name)


def load(content: bytes) -> Any:
    return Trusting(content).load()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_and_records_are_read(protocol: int) -> None:
    value = {"a": [1, 2**40, -1, 0.5, True, None, "ä"], "b": (1, (2, 3), ()), "c": {}}
    value["d"] = [Record("x"), value["b"], value["b"]]
    assert load(pickle.dumps(value, protocol)) == value


def test_a_memo_of_a_billion_places_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert load(b"\x80\x02]r\xff\xff\xff\x0f.") == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**10  # KiB


NESTED = b"\x80\x02}))" + b"\x85" * 150_000  # {}, (), (((...)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(print), "it refers to builtins.print"),
        (NESTED[:3] + NESTED[4:] + b"Ns.", "keys of other types"),
        (NESTED[:3] + b"(" + NESTED[4:] + b"Nu.", "keys of other types"),
        (b"\x80\x02}(K\x01Nu.", "keys of other types"),
        (b"\x80\x02ctests\nRecord\n}b.", "it sets fields of type"),
        (b"\x80\x02]}b.", "it sets fields of list"),
        (pickle.dumps({1}), "it holds the opcode 143"),
        (pickle.dumps(bytearray(1), 5), "it holds the opcode 150"),
    ],
    ids=[
        "code",
        "a nested key",
        "nested keys",
        "a number as key",
        "a class",
        "a list",
        "a set",
        "a byte array",
    ],
)
def test_what_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=message):
        load(content)
