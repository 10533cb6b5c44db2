"""All 27 letter strategies, degrees and names: which are legal, and the refusals."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest

from paro.strategy import (
    LETTERS,
    dominating_letters,
    effective_letters,
    is_legal,
    legal_letters,
    parse_strategy,
)
from tests.helpers.refusals import refused

LEGAL = (
    *("NNN", "NNI", "NNG", "NII", "NIG", "NGG", "INI", "ING"),
    *("III", "IIG", "IGG", "GNG", "GIG", "GGG"),
)
ALL = ["".join(letters) for letters in product(LETTERS, repeat=3)]


def test_the_fourteen_legal_ones() -> None:
    assert sorted(legal_letters()) == sorted(LEGAL)


@pytest.mark.parametrize("letters", sorted(set(ALL) - set(LEGAL)))
def test_refused_letters_name_a_legal_alternative_with_the_same_params_and_grads(
    letters: str,
) -> None:
    better = dominating_letters(letters)
    assert is_legal(better)
    assert better[:2] == letters[:2]
    parse = partial(parse_strategy, letters, world_size=8, group_size=4)
    refused(parse, f"--paro-strategy {letters} ... {better}")


@pytest.mark.parametrize("letters", LEGAL)
def test_letters_become_degrees(letters: str) -> None:
    strategy = parse_strategy(letters.lower(), world_size=8, group_size=4)
    assert strategy.name == letters
    assert strategy.degrees == tuple({"N": 1, "I": 4, "G": 8}[letter] for letter in letters)


@pytest.mark.parametrize(
    ("name", "letters"),
    [("ddp", "NNN"), ("zero1", "NNG"), ("ZeRO2", "NGG"), ("zero3", "GGG"), ("hsdp", "III")],
)
def test_known_names(name: str, letters: str) -> None:
    assert parse_strategy(name, world_size=8, group_size=2).name == letters


def test_degrees() -> None:
    strategy = parse_strategy("2, 4, 8", world_size=8, group_size=4)
    assert (strategy.name, strategy.degrees) == ("2,4,8", (2, 4, 8))


@pytest.mark.parametrize(
    ("text", "world_size", "group_size", "complaint"),
    [
        ("XYZ", 8, 4, "unknown"),
        ("NN", 8, 4, "unknown"),
        ("1,a,2", 8, 4, "unknown"),
        ("0,1,2", 8, 4, "unknown"),
        ("1,3,6", 8, 4, "3 does not divide the 8 ranks"),
        ("4,2,2", 8, 4, "not legal ... 4,2,4"),
        ("2,2,6", 6, 3, "2 does not divide 3"),
        # Letters are judged as letters where levels coincide.
        ("IIN", 8, 1, "not legal"),
        ("IIN", 8, 8, "not legal"),
        *(("IIG", 8, n, f"--paro-group-size {n} ... one of 1, 2, 4, 8") for n in (0, 3, 16, -2)),
    ],
)
def test_refused_texts(text: str, world_size: int, group_size: int, complaint: str) -> None:
    parse = partial(parse_strategy, text, world_size=world_size, group_size=group_size)
    refused(parse, complaint)


def test_effective_letters_on_one_group() -> None:
    strategy = parse_strategy("IIG", world_size=4, group_size=4)
    assert effective_letters(strategy, world_size=4, group_size=4) == "GGG"
    assert effective_letters(strategy, world_size=8, group_size=4) == "III"
    alone = parse_strategy("IIG", world_size=4, group_size=1)
    assert effective_letters(alone, world_size=4, group_size=1) == "NNG"
    assert effective_letters(alone, world_size=1, group_size=1) is None
    odd = parse_strategy("2,4,8", world_size=8, group_size=4)
    assert effective_letters(odd, world_size=8, group_size=4) is None
