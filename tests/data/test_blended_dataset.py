"""Blends: the words and files that make one, its order sample by sample, and the refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import blended_dataset
from data.blend import Blend, parse_blend, read_blend, read_blend_per_split, read_phases
from data.blended_dataset import BlendIndices, blend_samples
from tests.helpers.refusals import refused


def sample_by_sample(
    shares: Sequence[float], limits: Sequence[float], num_samples: int
) -> list[tuple[int, int]]:
    """The rule as a loop: the corpus of every sample, and the sample's number in the corpus."""
    counts = [0] * len(shares)
    order = []
    for sample in range(num_samples):
        lags = [
            share * max(sample, 1) - count if count < limit else -np.inf
            for share, count, limit in zip(shares, counts, limits, strict=True)
        ]
        member = lags.index(max(lags))
        order.append((member, counts[member]))
        counts[member] += 1
    return order


def as_pairs(indices: BlendIndices) -> list[tuple[int, int]]:
    return list(zip(*(index.tolist() for index in indices), strict=True))


@settings(deadline=None)
@given(
    weights=st.lists(
        st.floats(0.001, 100.0) | st.integers(1, 90).map(float), min_size=1, max_size=6
    ),
    num_samples=st.integers(0, 500),
    stretch=st.integers(1, 60),
    are_sizes=st.booleans(),
)
def test_many_lanes_give_what_one_loop_gives(
    weights: list[float], num_samples: int, stretch: int, are_sizes: bool
) -> None:
    """By weights for ever, or until all corpora of these sizes are exhausted."""
    sizes = [int(weight) for weight in weights] if are_sizes and any(map(int, weights)) else None
    shares = [float(share) for share in np.array(sizes or weights) / np.sum(sizes or weights)]
    count = sum(sizes) if sizes else num_samples
    with mock.patch.object(blended_dataset, "_LEAST_STRETCH", stretch):
        found = as_pairs(blend_samples(shares, count, sizes))
    assert found == sample_by_sample(shares, sizes or [np.inf] * len(shares), count)


def test_a_wrong_beginning_is_run_again() -> None:
    """From any initial counts of the stretches, the order is that of the loop."""
    shares = [0.5, 0.3, 0.2]

    def unlikely(_shares: object, times: np.ndarray) -> np.ndarray:
        return np.stack([np.zeros_like(times), np.zeros_like(times), times])

    with (
        mock.patch.object(blended_dataset, "_LEAST_STRETCH", 7),
        mock.patch.object(blended_dataset, "_likely_counts", unlikely),
    ):
        found = as_pairs(blend_samples(shares, 200))
    assert found == sample_by_sample(shares, [np.inf] * 3, 200)


@pytest.mark.filterwarnings("error")
def test_a_share_near_zero_is_no_overflow() -> None:
    order = blend_samples([1.0, 3e-309], 1000)
    assert np.flatnonzero(order.dataset_index).tolist() == [1]


MISMATCHES = ("1", "1 2", "x 1", "1 x 2", "1 x y", "x 1 y 2", "1 x y z", "1 2 x y", "x y 3")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        *((words, "--f ... do not match") for words in MISMATCHES),
        *((f"{w} x 1 y", "--f the weight ... is no share") for w in ("-1", "-0.5", "inf", "nan")),
    ],
)
def test_weights_that_match_no_paths_or_are_no_shares_are_refused(words: str, told: str) -> None:
    refused(lambda: parse_blend(words.split(), "--f"), told)


def test_a_file_of_words(tmp_path: Path) -> None:
    (tmp_path / "blend").write_text("0.5 x\n0.25 y\n0.25 z\n")
    blend = read_blend(str(tmp_path / "blend"), "--f")
    assert (blend.prefixes, blend.shares()) == (("x", "y", "z"), [0.5, 0.25, 0.25])
    assert blend.flag == f"--f {tmp_path / 'blend'}:"
    refused(lambda: read_blend(str(tmp_path / "none"), "--f"), f"--f {tmp_path / 'none'}")


@pytest.mark.parametrize(
    ("content", "prefixes", "weights"),
    [
        ("x", "x", None),
        ("x y z", "xyz", None),
        ("30 x 70 y", "xy", (30.0, 70.0)),
        ("1 x 0 y 3 z", "xz", (1.0, 3.0)),
        (["x", "y"], "xy", None),
        ([1, "x", 3, "y"], "xy", (1.0, 3.0)),
        ([2, [1, "x", 3, "y"], 6, "z"], "xyz", (0.5, 1.5, 6.0)),
        ([2, [1, [1, "w", 1, "x"], 3, "y"], 6, "z"], "wxyz", (0.25, 0.25, 1.5, 6.0)),
        (["x", ["y", ["z"]]], "xyz", None),
        ([2, [0, "x", 3, "y"], 6, "z"], "yz", (2.0, 6.0)),
    ],
)
def test_weights_come_before_their_paths_or_lists_and_zero_is_no_corpus(
    tmp_path: Path, content: str | list[object], prefixes: str, weights: tuple[float, ...] | None
) -> None:
    """Words after a flag or in a file, or nested lists in a file."""
    path = tmp_path / "blend"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    blend = read_blend(str(path), "--f")
    assert (blend.prefixes, blend.weights) == (tuple(prefixes), weights)
    if isinstance(content, str):
        given = Blend(flag="--f", prefixes=tuple(prefixes), weights=weights)
        assert parse_blend(content.split(), "--f") == given


@pytest.mark.parametrize(
    ("read", "content", "told"),
    [
        (read_blend, '[1, ["x", "y"], 2, "z"]', "a list inside a list has weights where"),
        (read_blend, '["x", [1, "y"]]', "a list inside a list has weights where"),
        (read_blend, '[1, {"x": 2}]', "is neither a path nor a weight"),
        (read_blend, "[1, true]", "true is neither a path nor a weight"),
        (read_blend, '["x"', "is not valid JSON"),
        (read_blend, "[]", "names no corpus"),
        (read_blend, "", "names no corpus"),
        (read_blend, "1 x 2", "do not match"),
        (read_blend, "0 x", "all weights are 0"),
        *((read_blend, f'["{path}"]', "") for path in (r"a\u0000b", r"\ud83d")),
        *(
            (read_blend_per_split, content, 'give ... "train":')
            for content in ('["x"]', '{"training": ["x"]}', "3", '{"train": 3}')
        ),
    ],
)
def test_a_senseless_file_is_refused(
    tmp_path: Path, read: Callable[[str, str], object], content: str, told: str
) -> None:
    path = tmp_path / "blend"
    path.write_text(content)
    refused(lambda: read(str(path), "--f"), f"--f {path} ... {told}")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", "has no phase"),
        ('{"name": "a"}', 'give [{"name": "web"'),
        ('[{"name": "a", "data": ["x"], "tokens": 5}]', "tokens"),
        ('[{"name": "a", "data": ["x"]}, {"name": "b", "data": ["y"]}]', "phase 1 ... samples"),
        ('[{"name": "a", "data": ["x"], "samples": 0}]', "phase 1 ... 0 samples"),
        ('[{"name": "a", "data": [1, "x", "y"]}]', ", a: ... do not match"),
        ('[{"name": "", "data": ["x"]}]', "phase 1 ... ''"),
        ('[{"name": "a | b", "data": ["x"]}]', "phase 1 ... 'a | b'"),
        ('[{"name": "a ", "data": ["x"]}]', "phase 1 ... 'a '"),
        ('[{"name": "a", "data": [1e308, "x", 1e308, "y"]}]', ", a: ... too large"),
        ('[{"name": "a", "data": [1, "x", 1, [1e308, "y", 1e308, "z"]]}]', ", a: ... too large"),
        ('[{"name": "a", "data": "x", "samples": 1}, {"name": "a", "data": "x"}]', "1 ... 'a'"),
    ],
)
def test_senseless_phases_are_refused(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "phases.json"
    path.write_text(content)
    refused(lambda: read_phases(str(path)), f"--data-phases {path} ... {told}")


def test_a_blend_for_each_split(tmp_path: Path) -> None:
    path = tmp_path / "splits.json"
    path.write_text(json.dumps({"train": "1 x 3 y", "valid": ["v"], "test": []}))
    blends = read_blend_per_split(str(path), "--f")
    assert set(blends) == {"train", "valid"}
    assert blends["train"].shares() == [0.25, 0.75]
    assert blends["valid"].flag == f"--f {path}, valid:"
