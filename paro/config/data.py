"""Takes corpora and tokenizer from flags; apart, since a plan has neither and starts at once."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from data.config import DataConfig
from data.tokenizer import Tokenizer, build_tokenizer
from data.tokenizer_config import TokenizerConfig, tokenizer_config
from paro.arguments.needed import VOCABULARY
from paro.arguments.parser import take
from paro.config.model import vocab_size_given
from paro.errors import UserError


def take_data(args: Namespace) -> DataConfig:
    """Return the corpora, their blend and their splits that flags give."""
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    words = {name: tuple(getattr(args, name)) for name in names}
    return take(DataConfig, args, **words)


def take_tokenizer(args: Namespace) -> tuple[TokenizerConfig, Tokenizer]:
    """Build the tokenizer; for synthetic tokens without one, a vocabulary without pieces.

    A dry run needs only the number of ids: the vocabulary that flags give stands for a tokenizer
    that is not on this machine.
    """
    flags = dict(vars(args))
    if not any((args.tokenizer_type, args.vocab_file, args.merge_file)):
        assert args.mock_data or args.dry_run, "a missing --tokenizer-type was refused before"
        flags["tokenizer_type"] = "NullTokenizer"
    size = vocab_size_given(args)
    if flags["tokenizer_type"] == "NullTokenizer":
        flags["vocab_size"] = size
    config = tokenizer_config(flags)
    assert config is not None, "there is a type"
    try:
        return config, build_tokenizer(config)
    except UserError as error:
        if not args.dry_run or all(Path(file).exists() for file in config.files):
            raise
        if size is None:
            *lines, last = error.args
            raise UserError(*lines, f"{last}; {VOCABULARY}") from error
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=size)
    return config, build_tokenizer(config)
