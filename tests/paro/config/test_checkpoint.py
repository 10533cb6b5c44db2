"""The values that --use-checkpoint-args takes, and the conflicts it refuses."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from paro.config.checkpoint import with_checkpoint_args
from paro.errors import UserError

COMMON: dict[str, Any] = {
    "model": {"vocab_size": 128, "num_attention_heads": 4, "num_query_groups": 2},
    "max_position_embeddings": 32,
}


def test_the_longest_sequence_is_the_checkpoints_whatever_the_flag_says() -> None:
    gpt2 = {"vocab_file": None, "merge_file": None}
    args = Namespace(
        seq_length=32, max_position_embeddings=64, tokenizer_type="NullTokenizer", **gpt2
    )
    assert with_checkpoint_args(args, COMMON).max_position_embeddings == 32
    args.seq_length = 64
    told = r"--seq-length 64 is above --max-position-embeddings 32, which --use-checkpoint-args"
    with pytest.raises(UserError, match=told):
        with_checkpoint_args(args, COMMON)
