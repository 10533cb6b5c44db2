"""Lines about the data sets that preprocessing wrote, with warnings."""

from __future__ import annotations

from collections.abc import Sequence

from data.indexed_dataset import IndexedDatasetWriter, bin_path
from data.tokenizer_config import TokenizerConfig
from tools.preprocessing.chat_template import chat_template_of
from tools.preprocessing.encode import EncodingPlan, Tally, ends_of, tokenizer_of


def summary_of(
    plan: EncodingPlan, writers: Sequence[IndexedDatasetWriter], tally: Tally
) -> list[str]:
    """Format a line on each data set, and its warnings."""
    lines = [*map(describe_written, writers), *describe_skipped(tally)]
    if not plan.conversations:
        return lines
    lines.append(describe_ends(plan.tokenizer, tally))
    if chat_template_of(plan.tokenizer).writes_date:
        lines.append(
            "the chat template writes the date of today (strftime_now), so that another day makes "
            "another corpus: write a date in its place in the template to have the same one"
        )
    return lines


def describe_written(writer: IndexedDatasetWriter) -> str:
    line = (
        f"wrote {bin_path(writer.prefix)} and .idx: {writer.num_documents:,} documents, "
        f"{writer.num_tokens:,} tokens as {writer.dtype.name}"
    )
    return f"{line}, {writer.num_trained:,} of them answered" if writer.has_loss_mask else line


def describe_skipped(tally: Tally) -> list[str]:
    if tally.skipped == 0:
        return []
    more = "; ..." if tally.skipped > len(tally.named) else ""
    return [f"skipped {tally.skipped:,} malformed documents: {'; '.join(tally.named)}{more}"]


def describe_ends(config: TokenizerConfig, tally: Tally) -> str:
    """Say how many answers end with a stop token; warn if none does."""
    names = {number: text for text, number in tokenizer_of(config).vocabulary.items()}
    ends = ", ".join(names.get(number, str(number)) for number in ends_of(config))
    counts = (
        f"{tally.ended:,} of {tally.answers:,} answers end with a token that stops a generation"
    )
    if tally.ended:
        return f"{counts} ({ends})"
    return (
        f"warning: {counts} ({ends}), so the model will not learn to stop: put that token between "
        "{% generation %} and {% endgeneration %} in the chat template, or give --append-eod"
    )
