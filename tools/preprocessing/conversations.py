"""Conversations as token ids by a tokenizer's own chat template, and which tokens are answered."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from data.answered import ANSWERED, READ, Marks
from data.hugging_face_tokenizer import load_transformers_tokenizer
from data.tokenizer_config import TokenizerConfig
from paro.errors import UserError

ASSISTANT = "assistant"
TOOLS = "tools"  # the key of what the assistant may call
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")  # how a template marks answers

Message = dict[str, Any]


class Conversation(NamedTuple):
    """Messages; those before `first_answer` are a prompt, of which nothing is answered."""

    messages: list[Message]
    first_answer: int = 0
    tools: list[dict[str, Any]] | None = None

    def is_answer(self, number: int) -> bool:
        """Whether this message is trained on; one of the assistant is not if its weight is 0."""
        message = self.messages[number]
        is_read = number < self.first_answer or message.get("weight") == 0
        return message["role"] == ASSISTANT and not is_read

    def before(self, number: int) -> Conversation:
        """Its messages before this one."""
        return self._replace(messages=self.messages[:number])


def conversation_of(keys: Sequence[str], values: Sequence[Any]) -> Conversation:
    """The messages under one key, or a prompt and a completion under two: each a text or messages.

    The key of tools may come in addition. `UserError` for anything else.
    """
    given = dict(zip(keys, values, strict=True))
    tools = _tools(given.pop(TOOLS, None))
    if len(given) == 1:
        return Conversation(_messages(*given.popitem()), tools=tools)
    prompt, completion = (
        [{"role": role, "content": value}] if isinstance(value, str) else _messages(key, value)
        for role, (key, value) in zip(("user", ASSISTANT), given.items(), strict=True)
    )
    return Conversation(prompt + completion, len(prompt), tools)


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """What the assistant may call; a text is JSON, as in columns, whose rows have equal fields."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = value
    if found in (None, []):
        return None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise UserError(
            f"the value of {TOOLS!r} is no list of tools such as "
            '{"type": "function", "function": {...}}, and no JSON of one'
        )
    return found


def _messages(key: str, value: Any) -> list[Message]:
    found = value if isinstance(value, list) else []
    if not found or not all(isinstance(each, dict) and "role" in each for each in found):
        raise UserError(
            f"the value of {key!r} is no list of messages such as "
            '{"role": "user", "content": "..."}'
        )
    for message in found:
        if message.get("weight") not in (None, 0, 1):
            raise UserError(f"the weight {message['weight']!r} of a message is neither 0 nor 1")
    # A column of rows has every field in every message.
    return [{name: part for name, part in each.items() if part is not None} for each in found]


class ChatTemplate:
    """Renders conversations in transformers' sandbox; code of a tokenizer's folder never runs."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        self._tokenizer = tokenizer
        try:
            self.text: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(
                f"{source} has no chat template: put it into chat_template.jinja in that folder, "
                "or take the folder of a model that was trained on conversations"
            ) from error
        # Marks are places in the text, of which only the tokenizers library knows the tokens.
        self._has_marks = tokenizer.is_fast and _GENERATION.search(self.text) is not None

    def encode(self, conversation: Conversation) -> tuple[list[int], Marks]:
        """The ids of a conversation, and a mark for each; `UserError` if it has no answer.

        The template says what is answered by its generation marks. Without any, it is what each
        message of the assistant adds to the prompt before it.
        """
        if conversation.tools and TOOLS not in self.text:
            raise UserError("the chat template does not write the tools of a conversation")
        ids, marks = self._marked(conversation) if self._has_marks else self._compared(conversation)
        marks[:1] = READ  # no token precedes it
        if not marks.any():
            raise UserError("the assistant answers nothing in this conversation")
        return ids, marks

    def _marked(self, conversation: Conversation) -> tuple[list[int], Marks]:
        messages, first, _ = conversation
        rendered = self._render(conversation, return_assistant_tokens_mask=True)
        ids, marks = list(rendered["input_ids"]), np.array(rendered["assistant_masks"], np.uint8)
        if any(message["role"] == ASSISTANT for message in messages[:first]):
            marks[: self._prefix(ids, conversation.before(first))] = READ
        for number in range(first, len(messages)):
            if messages[number]["role"] == ASSISTANT and not conversation.is_answer(number):
                marks[self._added(ids, conversation, number)] = READ
        return ids, marks

    def _compared(self, conversation: Conversation) -> tuple[list[int], Marks]:
        ids = list(self._render(conversation)["input_ids"])
        marks = np.full(len(ids), READ, np.uint8)
        for number in range(len(conversation.messages)):
            if conversation.is_answer(number):
                marks[self._added(ids, conversation, number, add_generation_prompt=True)] = ANSWERED
        return ids, marks

    def _added(
        self, ids: list[int], conversation: Conversation, number: int, **options: bool
    ) -> slice:
        """Where the ids are that a message adds to those before it, rendered with `options`."""
        begin = self._prefix(ids, conversation.before(number), **options)
        return slice(begin, self._prefix(ids, conversation.before(number + 1)))

    def _prefix(self, ids: list[int], first: Conversation, **options: bool) -> int:
        """How many of the ids these first messages are; `UserError` unless they are the same."""
        part = list(self._render(first, **options)["input_ids"])
        if part != ids[: len(part)]:
            raise UserError(
                f"the first {len(first.messages)} messages become other tokens when more follow, "
                "so it is not known which are answered: mark answers in the chat template with "
                "{% generation %} and {% endgeneration %}"
            )
        return len(part)

    def _render(self, conversation: Conversation, **options: bool) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                conversation.messages,
                tools=conversation.tools,
                tokenize=True,
                return_dict=True,
                tokenizer_kwargs={"verbose": False},  # no warning of long ones
                **options,
            )
        except Exception as error:  # whatever a template raises, of any type
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UserError(f"the chat template does not take it: {reason}") from error


@cache
def chat_template_of(config: TokenizerConfig) -> ChatTemplate:
    """The chat template of a tokenizer, one per process."""
    if config.tokenizer_type != "HuggingFaceTokenizer" or config.tokenizer_model is None:
        raise UserError(
            f"--apply-chat-template and --tokenizer-type {config.tokenizer_type}: only a Hugging "
            "Face folder has a chat template; give HuggingFaceTokenizer"
        )
    model = config.tokenizer_model
    return ChatTemplate(load_transformers_tokenizer(model), f"--tokenizer-model {model}")
