"""Conversations have one form, answers are found; texts are encoded in order by workers."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data.corpus import read_batches
from data.sources import find_chunks
from data.tokenizer import NullTokenizer
from data.tokenizer_config import TokenizerConfig
from tests.helpers.refusals import refused
from tools.preprocessing import answers
from tools.preprocessing import encode as encode_module
from tools.preprocessing.answers import added_by_answers
from tools.preprocessing.conversations import Conversation, Message, conversation_of
from tools.preprocessing.encode import EncodingPlan, encode, tasks_of
from tools.preprocessing.workers import TASKS_PER_WORKER, worker_processes

ASK = {"role": "user", "content": "x?"}
PARAMETERS = {"type": "object", "properties": {"a": {"enum": ["b", None]}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}, **more}


def said(content: Any, role: str = "assistant", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [*calls], **more}


PART = {"type": "text", "text": "y"}


def test_a_message_has_one_form() -> None:
    for written, taken in (
        # as it is written, as it is taken
        (said("y", name="n", weight=1), said("y", name="n", weight=1)),
        (said("", refusal=None), said("")),
        (said([PART, {"type": "output_text", "text": ""}, "z"]), said("yz")),
        (said([PART], role="tool", tool_call_id="1"), said("y", role="tool", tool_call_id="1")),
        (called(call({"a": None}), content=None), called(call({"a": None}))),
        (
            called(call('{"a": {"b": null}}'), content=""),
            called(call({"a": {"b": None}}), content=""),
        ),
        (called(json.dumps(call("{}", id="1"))), called(call({}, id="1"))),
        (called({"name": "f", "arguments": {"a": 1}}), called(call({"a": 1}))),
        (called(call(None), call("")), called(call({}), call({}))),
        (said("y", tool_calls=[]), said("y")),
        ({"from": "gpt", "value": "y", "weight": 0}, said("y", weight=0)),
        ({"from": "human", "value": "y"}, said("y", role="user")),
    ):
        for value in ([ASK, written], json.dumps([ASK, written]), [ASK, json.dumps(written)]):
            assert conversation_of(["messages"], [value]).messages == [ASK, taken]


def test_columns_have_nulls_where_a_field_was_absent() -> None:
    padded = [
        {**said("x?", role="user"), "tool_calls": None, "parts": [{"text": None}]},
        {**called(call({"a": 1, "b": None}), call('{"b": null}')), "content": None},
    ]
    tool = {"type": "function", "function": {**TOOL["function"], "strict": None}}  # type: ignore[dict-item]
    found = conversation_of(["messages", "tools"], [padded, [tool]], from_columns=True)
    asked = {**ASK, "parts": [{}]}
    assert found.messages == [asked, called(call({"a": 1}), call({"b": None}))]
    assert found.tools == [TOOL]
    assert conversation_of(["m", "tools"], [padded, None], from_columns=True).tools is None


def test_tools_have_one_form() -> None:
    as_text = {"name": "f", "parameters": json.dumps(PARAMETERS)}
    of_one = ([each] for each in (TOOL, json.dumps(TOOL), TOOL["function"], as_text))
    for written in (json.dumps([TOOL]), *of_one):
        assert conversation_of(["messages", "tools"], [[ASK], written]).tools == [TOOL]
    for none in (None, [], "", "[]", "null"):
        assert conversation_of(["tools", "messages"], [none, [ASK]]).tools is None


def test_the_last_of_several_keys_is_the_completion() -> None:
    talk = [ASK, said("y")]
    for values in (
        ["x?", "y"],
        [[ASK], "y"],
        ["x?", [said("y")]],
        ["x?", "", "y"],
        ["x?", None, "y"],
    ):
        keys = ["instruction", "input", "output"][-len(values) :]
        assert conversation_of(keys, values) == (talk, 1, None)
    of_two = [said("x\n\n?", role="user"), said("y")]
    assert conversation_of(["a", "b", "c"], ["x", "?", "y"]) == (of_two, 1, None)
    several = [[ASK], "x", "y"]
    refused(lambda: conversation_of(["a", "b", "c"], several), "the value of 'a' is no text")


CALL = "has tool_calls that are no list"


def test_what_no_template_writes_as_it_is_meant_is_refused() -> None:
    for value, message in (
        # messages, what is told
        ("x", "the value of 'messages' is no list of messages"),
        (["x"], "the value of 'messages' is no list of messages"),
        ([{"content": "x"}], "message 1 has no role; its keys: content"),
        (
            [{"role": "user", "value": "x"}],
            "message 1 (user) ... content ... its keys: role, value",
        ),
        ([ASK, {"role": "system", "content": None}], "message 2 (system) has neither content nor"),
        ([said([])], "message 1 (assistant) has neither content nor"),
        ([said(5)], "message 1 (assistant) has content that is neither"),
        (
            [said([PART, {"type": "image_url", "image_url": {}}])],
            "part 2, of type 'image_url', is no",
        ),
        ([said([{"type": "text", "text": None}])], "part 1, of type 'text', is no text"),
        ([said("x", weight=0.5)], "message 1 (assistant) has the weight 0.5"),
        ([called(call("[1]"))], "message 1 (assistant) calls 'f' with arguments that are no JSON"),
        ([called({"name": "f", "parameters": {"a": 1}})], "calls 'f' with arguments that are no"),
        ([called({"function": {"arguments": {}}})], CALL),
        ([said("x", tool_calls=call({}))], CALL),
        ([{"from": "bot", "value": "x"}], "message 1 is from 'bot', which is none of human, gpt"),
        (
            [{"from": ["gpt"], "value": "x"}],
            "message 1 is from ['gpt'], which is none of human, gpt",
        ),
        ([{"from": "gpt", "text": "x"}], "message 1 (assistant) ... its keys: from, text"),
    ):
        refused(partial(conversation_of, ["messages"], [value]), message)


def test_what_is_no_tool_is_refused() -> None:
    for written in ("now", [5], {"a": 1}, [{"type": "search"}], [{"function": 1}]):
        message = "the value of 'tools' is no list of tools"
        refused(partial(conversation_of, ["messages", "tools"], [[ASK], written]), message)


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
    *before, last = messages
    spoken = last.get("reasoning_content", "") + last["content"]
    return chat_ml([*before, last | {"content": spoken}], prompt)


def talk(count: int) -> list[Message]:
    """Messages of which no two are equal, some with blanks around."""
    contents = [f"{n}" + " " * (n % 4 == 3) for n in range(2 * count)]
    return [said(text, ("user", "assistant")[n % 2]) for n, text in enumerate(contents)]


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


OWN_CALL = {"function": {"name": "f", "arguments": {"a": 1, "b": ["c"]}}}


@pytest.mark.parametrize("template", [chat_ml, mistral])
def test_answers_are_what_they_add_to_the_prompt(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = talk(40)
    messages[9:9] = [{"role": "assistant", "content": "5"}, {"role": "tool", "content": "5"}]
    messages[3]["weight"] = 0
    messages[7] |= {"tool_calls": [OWN_CALL]}
    fast, few = found(template, messages, 2)
    monkeypatch.setattr(answers, "_FEW", 99)
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


def test_the_assistant_may_begin() -> None:
    for count in (1, 4):
        messages = talk(count)[1:]
        assert found(chat_ml, messages)[0] == [f"{m['content'].strip()};" for m in messages[::2]]
        refused(partial(found, mistral, messages), "the assistant begins ... {% generation %}")


def test_texts_that_change_when_more_follow_or_are_prompted_are_refused() -> None:
    messages = talk(6)
    assert len(found(thinking, messages)[0]) == 6
    messages[7]["reasoning_content"] = "hm"
    refused(lambda: found(thinking, messages), "the first 8 messages become another text")
    message = "message 2, an answer, with its own prompt ... {% generation %}"
    refused(
        lambda: found(lambda m, prompt: chat_ml(m, prompt) + "(think)" * prompt, talk(4)), message
    )


CONFIG = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=11)
PLAN = EncodingPlan(tokenizer=CONFIG, keys=("text",), append_eod=True)


class Wrong(NullTokenizer):
    """Returns an id outside its vocabulary."""

    def __init__(self, token: int) -> None:
        super().__init__(11)
        self.token = token

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[1, self.token] for _ in texts]


def test_ids_outside_the_vocabulary_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1"}\n')
    (batch,) = read_batches(find_chunks([path]), PLAN.keys)
    for token in (11, 65536, 2**31, 2**40, -1):
        monkeypatch.setattr(encode_module, "tokenizer_of", lambda _, own=token: Wrong(own))
        refused(lambda: encode(PLAN, batch), f"{path}, line 1 ... token id {token},")
    monkeypatch.setattr(encode_module, "tokenizer_of", lambda config: Wrong(10))  # the last one
    assert encode(PLAN, batch).by_key[0].ids.tolist() == [1, 10, 10]


def test_small_texts_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("12345")
    monkeypatch.setattr(encode_module, "BATCH_BYTES", 15)
    tasks = list(tasks_of(read_batches(find_chunks([tmp_path]), PLAN.keys)))
    assert [len(task) for task in tasks] == [3, 3, 3, 1]
    assert [Path(batch.chunk.path).stem for task in tasks for batch in task] == list("0123456789")


def slow_if_even(number: int) -> int:
    time.sleep(0.02 * (number % 2 == 0))
    return number * number


@pytest.mark.process
def test_order_and_how_far_ahead_tasks_are_taken() -> None:
    taken = 0

    def tasks() -> Iterator[int]:
        nonlocal taken
        for number in range(60):
            taken += 1
            yield number

    with worker_processes(2, int) as workers:
        ahead = []
        for number, result in enumerate(workers.map(slow_if_even, tasks())):
            assert result == number * number
            ahead.append(taken - number)
    assert len(ahead) == 60
    assert max(ahead) <= 2 * TASKS_PER_WORKER
    with worker_processes(1, int) as workers:
        assert list(workers.map(slow_if_even, range(3))) == [0, 1, 4]


def is_killed_while_it_answers(number: int) -> int:
    if number == 3:
        os.write(sys._getframe(1).f_locals["pipe"].fileno(), struct.pack("!i", 1000) + b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.process
def test_a_worker_that_is_killed_while_it_answers_is_one_line() -> None:
    with worker_processes(2, int) as workers:
        results = workers.map(is_killed_while_it_answers, range(60))
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        refused(lambda: next(results), "a worker process was killed")


def fails(number: int) -> int:
    raise KeyError(number)


@pytest.mark.process
def test_an_error_of_a_worker_has_its_traceback() -> None:
    with worker_processes(2, int) as workers, pytest.raises(KeyError) as caught:
        list(workers.map(fails, range(9)))
    assert "in fails" in "".join(caught.value.__notes__)
