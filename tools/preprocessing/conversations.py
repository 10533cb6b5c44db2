"""Conversations as files have them, brought into the one form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from paro.errors import UserError, about

ASSISTANT = "assistant"
TOOLS = "tools"  # the key of what the assistant may call
CALLS = "tool_calls"  # the field of a message that calls some
# How ShareGPT's `from` names the roles.
_SPEAKERS = {"human": "user", "gpt": ASSISTANT} | {
    role: role for role in ("system", "user", ASSISTANT, "tool")
}
_TEXT_PARTS = ("text", "input_text", "output_text")  # types of parts in OpenAI's two interfaces

Message = dict[str, Any]


class Conversation(NamedTuple):
    """Messages; those before `first_answer` are a prompt, of which nothing is answered."""

    messages: list[Message]
    first_answer: int = 0
    tools: list[dict[str, Any]] | None = None

    @property
    def features(self) -> list[str]:
        """The features of a conversation that not every template writes."""
        has_calls = any(CALLS in message for message in self.messages)
        return [TOOLS] * bool(self.tools) + [CALLS] * has_calls

    def is_answer(self, number: int) -> bool:
        """Return whether this message is trained on: the assistant's, unless its weight is 0."""
        message = self.messages[number]
        is_read = number < self.first_answer or message.get("weight") == 0
        return message["role"] == ASSISTANT and not is_read

    def before(self, number: int) -> Conversation:
        """Messages before this one."""
        return self._replace(messages=self.messages[:number])


def without_nulls(value: Any) -> Any:
    """Return the value without fields that are null, at every depth; entries of lists stay."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def conversation_of(
    keys: Sequence[str], values: Sequence[Any], *, from_columns: bool = False
) -> Conversation:
    """Return the messages of one key, or of several, prompt and completion last.

    The key of tools may come in addition. A text under one key of a prompt, or the texts under
    several, are a message of the user. Values `from_columns` have every field in every entry, null
    where it was absent. `UserError` names the message that no template could write as it is meant.
    """
    by_key = dict(zip(keys, values, strict=True))
    if from_columns:
        by_key = {key: without_nulls(value) for key, value in by_key.items()}
    tools = _tools(by_key.pop(TOOLS, None))
    if len(by_key) == 1:
        return Conversation(_messages(*by_key.popitem()), tools=tools)
    *asked, (key, value) = by_key.items()
    prompt = _prompt(dict(asked))
    completion = _said_by(ASSISTANT, value) if isinstance(value, str) else _messages(key, value)
    return Conversation(prompt + completion, len(prompt), tools)


def _prompt(prompt: dict[str, Any]) -> list[Message]:
    """Return messages, or texts as one message of the user, with empty lines between them."""
    (first, value), *more = prompt.items()
    if not more and not isinstance(value, str):
        return _messages(first, value)
    for key, text in prompt.items():
        if not isinstance(text, str | None):
            raise UserError(
                f"the value of {key!r} is no text: under several keys a prompt is texts"
            )
    return _said_by("user", "\n\n".join(text for text in prompt.values() if text))


def _said_by(role: str, text: str) -> list[Message]:
    return [{"role": role, "content": text}]


def _messages(key: str, value: Any) -> list[Message]:
    entries = [_decoded(entry) for entry in _entries(value)]
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(
            f"the value of {key!r} is no list of messages such as "
            '{"role": "user", "content": "..."}'
        )
    messages = []
    for number, message in enumerate(entries, start=1):
        with about(f"message {number} "):
            messages.append(_message({k: each for k, each in message.items() if each is not None}))
    return messages


def _message(stored: Message) -> Message:
    """Return a message with its text as one text and its calls as objects."""
    message = _of_speaker(stored) if "from" in stored and "role" not in stored else dict(stored)
    keys = f"its keys: {', '.join(stored)}"
    role = message.get("role")
    if not isinstance(role, str):
        raise UserError(f"has no role; {keys}")
    with about(f"({role}) "):
        content, calls = (message.pop(name, None) for name in ("content", CALLS))
        if (text := _text(content)) is not None:
            message["content"] = text
        if called := _calls(calls):
            message[CALLS] = called
        if text is None and not called:
            raise UserError(f"has neither content nor tool_calls; {keys}")
        if message.get("weight") not in (None, 0, 1):
            raise UserError(f"has the weight {message['weight']!r}, which is neither 0 nor 1")
    return message


def _of_speaker(stored: Message) -> Message:
    """Return a message in ShareGPT's form, `from` and `value`, as one of `role` and `content`."""
    message = dict(stored)
    speaker = message.pop("from")
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise UserError(f"is from {speaker!r}, which is none of {', '.join(_SPEAKERS)}")
    return {"role": _SPEAKERS[speaker], "content": message.pop("value", None), **message}


def _text(content: Any) -> str | None:
    """Return the text of a message's content, of which parts are joined; None if it has none."""
    if isinstance(content, str | None):
        return content
    if not isinstance(content, list):
        raise UserError("has content that is neither a text nor a list of parts")
    texts = []
    for number, part in enumerate(content, start=1):
        fields = part if isinstance(part, dict) else {"text": part}
        kind, text = fields.get("type", "text"), fields.get("text")
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise UserError(f"has content of which part {number}, of type {kind!r}, is no text")
        texts.append(text)
    return "".join(texts) if texts else None


def _calls(value: Any) -> list[dict[str, Any]]:
    calls = [_as_function(call) for call in _entries(value)]
    if None in calls:
        raise UserError(
            'has tool_calls that are no list such as {"type": "function", "function": '
            '{"name": "...", "arguments": {}}}'
        )
    return [{**call, "function": _called(call["function"])} for call in calls if call]


def _called(function: dict[str, Any]) -> dict[str, Any]:
    """Return a called function with its arguments as an object, which templates write as JSON."""
    arguments = _decoded(function.get("arguments"))
    if arguments in (None, "") and function.keys() <= {"name", "arguments"}:
        arguments = {}
    if not isinstance(arguments, dict):
        raise UserError(f"calls {function['name']!r} with arguments that are no JSON object")
    return {**function, "arguments": arguments}


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the functions that the assistant may call, in OpenAI's form; None without tools."""
    tools = [_as_function(tool) for tool in _entries(value)]
    if None in tools:
        raise UserError(
            f"the value of {TOOLS!r} is no list of tools such as "
            '{"type": "function", "function": {"name": "..."}}, and no JSON of one'
        )
    for tool in tools:
        if tool and "parameters" in tool["function"]:
            parameters = _decoded(tool["function"]["parameters"])
            tool["function"] = {**tool["function"], "parameters": parameters}
    return [tool for tool in tools if tool] or None


def _entries(value: Any) -> list[Any]:
    decoded = _decoded(value)
    if decoded in (None, ""):
        return []
    return decoded if isinstance(decoded, list) else [None]


def _as_function(value: Any) -> dict[str, Any] | None:
    """Return a tool or a call in OpenAI's form, from one with or without `function`."""
    decoded = _decoded(value)
    if not isinstance(decoded, dict):
        return None
    entry = decoded if "function" in decoded else {"type": "function", "function": decoded}
    function = entry["function"]
    has_name = isinstance(function, dict) and isinstance(function.get("name"), str)
    return dict(entry) if has_name else None


def _decoded(value: Any) -> Any:
    """Decode a text of JSON, as in columns, whose rows have equal fields; else return it."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
