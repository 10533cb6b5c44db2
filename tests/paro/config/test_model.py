"""The start's lines about a model whose sizes the flags give."""

from __future__ import annotations

import pytest

from tests.paro.config.test_run import PRESET, SMALL, configure


@pytest.mark.parametrize(
    ("words", "says_it"),
    [
        (SMALL.replace("--untie-embeddings-and-output-weights ", ""), True),
        (SMALL, False),
        (SMALL.replace("--untie-", "--tie-"), False),
        (f"{PRESET} --llama-preset 7B", False),  # a preset with a separate output layer
    ],
)
def test_the_start_says_that_megatron_would_tie_the_output_layer(words: str, says_it: bool) -> None:
    notices = configure(words).notices
    assert any("an output layer of its own" in notice for notice in notices) is says_it
