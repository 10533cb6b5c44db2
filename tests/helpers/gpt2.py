"""A small tokenizer in GPT-2's two files: vocabulary and merges."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from data.tokenizer import END

TEXT = "The fox's tail: it'll jump 123 times!\n\n  def f(x):\n\treturn x  # naïve 雪 🙂\r\n"


def write_gpt2(folder: Path) -> tuple[Path, Path]:
    """A vocabulary of 256 bytes, 44 merges and the end token, in the format of GPT-2's 50,257."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator([TEXT] * 3, trainer)
    vocabulary = trained.get_vocab()
    vocabulary[END] = len(vocabulary)
    vocab_file, merge_file = folder / "gpt2-vocab.json", folder / "gpt2-merges.txt"
    vocab_file.write_text(json.dumps(vocabulary), encoding="utf-8")
    merges = json.loads(trained.to_str())["model"]["merges"]
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    merge_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return vocab_file, merge_file
