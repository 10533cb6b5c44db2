"""Answers are found in a conversation's text with a few renderings, as with one for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.refusals import refused
from tools.preprocessing import answers as module
from tools.preprocessing.answers import added_by_answers
from tools.preprocessing.conversations import Conversation, Message

Template = Callable[[list[Message], bool], str]


def chat_ml(messages: list[Message], prompt: bool) -> str:
    return "".join(map(turn, messages)) + "<assistant>" * prompt


def turn(message: Message) -> str:
    calls = message.get("tool_calls")
    written = json.dumps(calls, ensure_ascii=False) if calls else ""
    return f"<{message['role']}>{message['content'].strip()}{written};"


def mistral(messages: list[Message], prompt: bool) -> str:
    return "".join(
        f" {m['content']};" if m["role"] == "assistant" else f"[{m['content']}]" for m in messages
    )


def thinking(messages: list[Message], prompt: bool) -> str:
    """Writes the thoughts of the last message alone."""
    thoughts = messages[-1].get("reasoning_content", "")
    return chat_ml(
        [*messages[:-1], messages[-1] | {"content": thoughts + messages[-1]["content"]}], prompt
    )


def wordy(messages: list[Message], prompt: bool) -> str:
    return chat_ml(messages, prompt) + "(think)" * prompt


def talk(count: int, **more: Any) -> list[Message]:
    """Messages of which no two are equal, some with blanks around."""
    return [
        {
            "role": "user" if n % 2 == 0 else "assistant",
            "content": f"{n}" + " " * (n % 4 == 3),
            **more,
        }
        for n in range(2 * count)
    ]


def found(template: Template, messages: list[Message], first: int = 0) -> tuple[list[str], int]:
    """The texts of answers, and how many renderings they took in addition to the whole text."""
    renderings = 0

    def render(conversation: Conversation, *, prompt: bool = False) -> str:
        nonlocal renderings
        renderings += 1
        return template(conversation.messages, prompt)

    text = template(messages, False)
    spans = added_by_answers(Conversation(messages, first), text, render)
    return [text[begin:end] for begin, end in spans], renderings


CALL = {"function": {"name": "f", "arguments": {"a": 1, "b": ["c"]}}}


@pytest.mark.parametrize("template", [chat_ml, mistral])
def test_answers_are_what_they_add_to_the_prompt(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = talk(40)
    messages[9:9] = [{"role": "assistant", "content": "5"}, {"role": "tool", "content": "5"}]
    messages[3]["weight"] = 0
    messages[7] |= {"tool_calls": [CALL]}
    fast, few = found(template, messages, 2)
    monkeypatch.setattr(module, "_FEW", 99)
    slow, many = found(template, messages, 2)
    assert fast == slow
    assert len(fast) == 39
    assert few < 20 < many


def test_the_number_of_renderings_does_not_grow_with_the_answers() -> None:
    assert found(chat_ml, talk(10))[1] == found(chat_ml, talk(300))[1] < 10


def test_texts_with_marks_of_our_own_are_found_too() -> None:
    messages = talk(4)
    messages[2]["content"] = "\ue0003\ue002"
    assert found(chat_ml, messages)[0] == ["1;", "3;", "5;", "7;"]


@pytest.mark.parametrize("count", [1, 4])
def test_the_assistant_may_begin(count: int) -> None:
    messages = talk(count)[1:]
    assert found(chat_ml, messages)[0] == [f"{m['content'].strip()};" for m in messages[::2]]
    refused(lambda: found(mistral, messages), "the assistant begins ... {% generation %}")


def test_texts_that_change_when_more_follow_are_refused() -> None:
    messages = talk(6)
    assert len(found(thinking, messages)[0]) == 6
    messages[7]["reasoning_content"] = "hm"
    refused(lambda: found(thinking, messages), "the first 8 messages become another text")


def test_a_prompt_that_answers_do_not_begin_with_is_refused() -> None:
    told = "message 2, an answer, with its own prompt ... {% generation %}"
    refused(lambda: found(wordy, talk(4)), told)
