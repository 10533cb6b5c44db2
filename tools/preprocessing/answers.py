"""Where the answers of a conversation are in its text, found with a few renderings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, Protocol

from paro.errors import UserError
from tools.preprocessing.conversations import CALLS, Conversation, Message

Span = tuple[int, int]


class Render(Protocol):
    """A chat template that writes messages, and with `prompt` the generation prompt."""

    def __call__(self, conversation: Conversation, *, prompt: bool = False) -> str: ...


REMEDY = "mark answers in the chat template with {% generation %} and {% endgeneration %}"
# Characters for private use, around the number of a message: before its text, and after it.
_OPENS, _CLOSES, _NUMBER = "\ue000", "\ue001", "\ue002"
_MARKS = re.compile(f"([{_OPENS}{_CLOSES}])(\\d+){_NUMBER}")
_PLAIN = {"role", "content", "weight", CALLS, "tool_call_id", "name"}
_FEW = 2  # answers that are found without marks around texts


def added_by_answers(conversation: Conversation, text: str, render: Render) -> list[Span]:
    """Return the part of `text` that each answer adds to earlier messages and its prompt.

    `text` is the whole conversation. `UserError` if the messages before one are written in another
    way when it follows.
    """
    places = _Places(conversation, text, render)
    answers = filter(conversation.is_answer, range(len(conversation.messages)))
    return [(places.find(n, prompt=True), places.find(n + 1, prompt=False)) for n in answers]


class _Places:
    """The offsets at which messages end in a text.

    That is as long as the text of these messages alone. What stands between the texts of two
    messages, such as the end of one turn and the header of the next, mostly repeats: where it is
    equal and the roles are, it is divided at an equal place, which one rendering finds.
    """

    def __init__(self, conversation: Conversation, text: str, render: Render) -> None:
        self._conversation = conversation
        self._text = text
        self._render = render
        self._texts = self._find_texts()
        self._known: dict[tuple[bool, str, str, str], int] = {}

    def find(self, count: int, *, prompt: bool) -> int:
        """Find where the first `count` messages end, or the prompt for an answer after them."""
        if count == len(self._conversation.messages):
            return len(self._text)
        before, after = self._texts.get(count - 1), self._texts.get(count)
        if before is None or after is None:
            return self._measure(count, prompt)
        roles = [message["role"] for message in self._conversation.messages[count - 1 : count + 1]]
        between = (prompt, roles[0], roles[1], self._text[before[1] : after[0]])
        if between not in self._known:
            self._known[between] = self._measure(count, prompt) - before[1]
        return before[1] + self._known[between]

    def _measure(self, count: int, prompt: bool) -> int:
        if count == 0:
            return self._end_of_first_prompt()
        part = self._render(self._conversation.before(count), prompt=prompt)
        if self._text.startswith(part):
            return len(part)
        if prompt and self._text.startswith(self._render(self._conversation.before(count))):
            raise UserError(
                f"the chat template does not begin message {count + 1}, an answer, with its own "
                f"prompt for an answer: {REMEDY}"
            )
        raise UserError(
            f"the first {count} messages become another text when more follow, so it is not known "
            f"which tokens are answered: {REMEDY}"
        )

    def _end_of_first_prompt(self) -> int:
        """Find where an answer begins that nothing precedes: after its prompt."""
        first = self._conversation.before(1)
        prompt = self._render(first, prompt=True).removeprefix(self._render(first))
        if not prompt or prompt not in self._text:
            raise UserError(
                "the assistant begins, and the chat template does not say where its first answer "
                f"does (add_generation_prompt): {REMEDY}, or leave that message out"
            )
        return self._text.index(prompt) + len(prompt)

    def _find_texts(self) -> dict[int, Span]:
        """Find where the texts of messages are, by number, if marks around them show it."""
        messages = self._conversation.messages
        answers = sum(map(self._conversation.is_answer, range(len(messages))))
        if answers <= _FEW or any(mark in self._text for mark in (_OPENS, _CLOSES, _NUMBER)):
            return {}
        marked = [_marked(message, number) for number, message in enumerate(messages)]
        try:
            rendered = self._render(self._conversation._replace(messages=marked))
        except UserError:  # the template takes no marks, such as in a name
            return {}
        pieces = _MARKS.split(rendered)
        if "".join(pieces[::3]) != self._text:
            return {}
        marks_of: dict[int, list[tuple[str, int]]] = {}
        position = 0
        for passed, mark, number in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=False):
            position += len(passed)
            marks_of.setdefault(int(number), []).append((mark, position))
        return {
            number: (places[0][1], places[1][1])
            for number, places in marks_of.items()
            if [mark for mark, _ in places] == [_OPENS, _CLOSES]
        }


def _marked(message: Message, number: int) -> Message:
    """Mark a message before its first text and after its last, if templates can be trusted.

    A template may treat another field, or the blanks around a text, in its own way.
    """
    marked = deepcopy(message)
    texts = [(holder, key) for holder, key in _texts(marked) if holder[key].strip()]
    if not texts or not message.keys() <= _PLAIN:
        return message
    (first, begin), (last, end) = texts[0], texts[-1]
    text = first[begin].lstrip()
    first[begin] = first[begin].removesuffix(text) + _OPENS + str(number) + _NUMBER + text
    text = last[end].rstrip()
    last[end] = text + _CLOSES + str(number) + _NUMBER + last[end].removeprefix(text)
    return marked


def _texts(message: Message) -> Iterator[tuple[Any, Any]]:
    """Yield each text that a message says, in order, as an object or a list and the key in it."""
    if "content" in message:
        yield message, "content"
    for call in message.get(CALLS, ()):
        yield call["function"], "name"
        yield from _texts_in(call["function"]["arguments"])


def _texts_in(holder: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
        if isinstance(value, str):
            yield holder, key
        elif isinstance(value, dict | list):
            yield from _texts_in(value)
