"""Talks with a model by the chat template of its tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from data.hugging_face_tokenizer import load_transformers_tokenizer
from paro.checkpoint.convert.source import ModelSource
from paro.errors import UserError, reading
from paro.report.log import print_line
from tools.generation.continuing import Speaker, check_ids, text_of
from tools.preprocessing.chat_template import ChatTemplate
from tools.preprocessing.conversations import ASSISTANT, Conversation, Message


def chat_template(source: ModelSource, moved_to: str | None) -> ChatTemplate:
    """Return the chat template in the folder of a model's tokenizer."""
    model = moved_to or (source.tokenizer or {}).get("tokenizer_model")
    if model is None:
        raise UserError("--chat: the tokenizer of --load has no folder with a chat template")
    return ChatTemplate(load_transformers_tokenizer(model), f"--tokenizer-model {model}")


def said_by_user() -> Iterator[str]:
    """Yield the lines of standard input that are not blank; a terminal asks for each."""
    while True:
        try:
            with reading("standard input"):
                line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                print_line("")
            return
        if line.strip():
            yield line


def chat(speaker: Speaker, template: ChatTemplate, prompts: Iterable[str]) -> None:
    """Print the answer to each prompt, which the conversation of all before precedes."""
    messages: list[Message] = []
    for prompt in prompts:
        messages.append({"role": "user", "content": prompt})
        ids = template.prompt(Conversation(messages))
        check_ids(speaker.tokenizer, [ids], speaker.model.config.vocab_size)
        answer = ""
        tokens = (step[0] for step in speaker.continued([ids]))
        for text in text_of(speaker.tokenizer, ids, tokens):
            print_line(text, end="", whole=True)
            answer += text
        print_line("")
        messages.append({"role": ASSISTANT, "content": answer.strip()})
