"""Conversations by a chat template: which tokens are answered, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data.indexed_dataset import IndexedDataset
from tests.data.test_hugging_face_tokenizer import byte_level, write
from tests.helpers.commands import write_lines
from tests.helpers.refusals import refused
from tools.preprocess_data import main
from tools.preprocessing.conversations import chat_template_of
from tools.preprocessing.encode import tokenizer_of

pytestmark = pytest.mark.slow("imports transformers")

BEGIN, END = "<|im_start|>", "<|im_end|>"
HEAD = "{{ '<|im_start|>' + m.role + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = f"{{% for m in messages %}}{HEAD}{{{{ m.content + '<|im_end|>\n' }}}}{{% endfor %}}{PROMPT}"
BODY = "{{ m.content + '<|im_end|>' }}"
MARKED = (
    f"{{% for m in messages %}}{HEAD}{{% if m.role == 'assistant' %}}{{%- generation -%}}{BODY}"
    f"{{%- endgeneration -%}}{{% else %}}{BODY}{{% endif %}}{{{{ '\n' }}}}{{% endfor %}}{PROMPT}"
)
# The last answer alone has its thoughts, as those of several published models.
UNSTABLE = PLAIN.replace(
    "m.content", "(m.content if not (loop.last and m.role == 'assistant') else 'hm ' + m.content)"
)

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "x?"},
    {"role": "assistant", "content": "return x"},
    {"role": "user", "content": "and f?"},
    {"role": "assistant", "content": "f(x)"},
]


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Tests write other folders under one name."""
    tokenizer_of.cache_clear()
    chat_template_of.cache_clear()


def folder_with(folder: Path, template: str | None, **fields: Any) -> Path:
    path = folder / "tokenizer"
    path.mkdir(exist_ok=True)
    byte_level([BEGIN, END]).save(str(path / "tokenizer.json"))
    write(path, "tokenizer_config.json", {"eos_token": END, **fields})
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def preprocess(source: Path, tokenizer: Path, *more: str) -> None:
    words = ["--input", str(source), "--output-prefix", str(source.parent / "out"), "--workers"]
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
    main([*words, "1", "--apply-chat-template", *kind, *more])


def written(prefix: Path, tokenizer: Path) -> list[tuple[str, str]]:
    """The text of each conversation, and of its answered tokens."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer)
    corpus = IndexedDataset(prefix)
    pairs = [(corpus.get(i), corpus.marks(i)) for i in range(len(corpus))]
    return [(theirs.decode(ids), theirs.decode(ids[marks == 1])) for ids, marks in pairs]


@pytest.mark.parametrize(("template", "after"), [(PLAIN, "\n"), (MARKED, "")])
def test_answers_are_what_the_template_says(tmp_path: Path, template: str, after: str) -> None:
    tokenizer = folder_with(tmp_path, template)
    source = write_lines(tmp_path / "a.jsonl", {"messages": TALK}, {"messages": TALK[1:3], "id": 5})
    preprocess(source, tokenizer, "--partitions", "2")
    turns = [f"{BEGIN}{m['role']}\n{m['content']}{END}\n" for m in TALK]
    assert written(tmp_path / "out_messages_document", tokenizer) == [
        ("".join(turns), f"return x{END}{after}f(x){END}{after}"),
        ("".join(turns[1:3]), f"return x{END}{after}"),
    ]
    preprocess(source, tokenizer / "tokenizer.json", "--append-eod")
    texts = written(tmp_path / "out_messages_document", tokenizer)
    assert texts[1] == ("".join(turns[1:3]) + END, f"return x{END}{after}{END}")


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_of_a_prompt_nothing_is_answered(tmp_path: Path, template: str) -> None:
    tokenizer = folder_with(tmp_path, template)
    source = write_lines(
        tmp_path / "a.jsonl", {"p": "x?", "c": "return x"}, {"p": TALK[:4], "c": TALK[4:]}
    )
    preprocess(source, tokenizer, "--json-keys", "p", "c")
    (one, other) = written(tmp_path / "out_p_c_document", tokenizer)
    assert one[0] == f"{BEGIN}user\nx?{END}\n{BEGIN}assistant\nreturn x{END}\n"
    assert [one[1].strip(), other[1].strip()] == [f"return x{END}", f"f(x){END}"]


@pytest.mark.parametrize(("template", "after"), [(PLAIN, "\n"), (MARKED, "")])
def test_a_message_of_weight_0_is_read(tmp_path: Path, template: str, after: str) -> None:
    tokenizer = folder_with(tmp_path, template)
    first, second = ({**TALK[number], "weight": 0} for number in (2, 4))
    lines = ([*TALK[:2], first, *TALK[3:]], [*TALK[:4], second])
    source = write_lines(tmp_path / "a.jsonl", *({"messages": line} for line in lines))
    preprocess(source, tokenizer, "--append-eod")
    (one, other) = written(tmp_path / "out_messages_document", tokenizer)
    assert one[0] == other[0]
    assert [one[1], other[1]] == [f"f(x){END}{after}{END}", f"return x{END}{after}"]


TOOL = {"type": "function", "function": {"name": "now", "parameters": {}}}
WITH_TOOLS = "{% if tools %}{{ tools[0].function.name + '\n' }}{% endif %}"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_tools_are_written_where_their_key_is_given(tmp_path: Path, template: str) -> None:
    tokenizer = folder_with(tmp_path, WITH_TOOLS + template)
    given = [[TOOL], json.dumps([TOOL]), None, []]
    lines = [{"messages": TALK[1:3], "tools": tools} for tools in given]
    source = write_lines(tmp_path / "a.jsonl", *lines)
    preprocess(source, tokenizer, "--json-keys", "messages", "tools")
    found = written(tmp_path / "out_messages_document", tokenizer)
    assert [text.startswith(f"now\n{BEGIN}user") for text, _ in found] == [True, True, False, False]
    assert {answered.strip() for _, answered in found} == {f"return x{END}"}
    preprocess(source, tokenizer)
    assert not any(
        "now" in text for text, _ in written(tmp_path / "out_messages_document", tokenizer)
    )


@pytest.mark.parametrize(
    ("template", "tools", "told"),
    [
        (WITH_TOOLS + PLAIN, "now", "line 1: the value of 'tools' is no list of tools"),
        (WITH_TOOLS + PLAIN, [5], "line 1: the value of 'tools' is no list of tools"),
        (PLAIN, [TOOL], "line 1: the chat template does not write the tools"),
    ],
)
def test_tools_that_cannot_be_written_are_refused(
    tmp_path: Path, template: str, tools: Any, told: str
) -> None:
    source = write_lines(tmp_path / "a.jsonl", {"messages": TALK[1:3], "tools": tools})
    run = partial(preprocess, source, folder_with(tmp_path, template), "--json-keys")
    refused(lambda: run("messages", "tools"), told)
    refused(lambda: run("tools"), "--json-keys tools: with")


def test_columns_of_rows_are_conversations_too(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    tokenizer = folder_with(tmp_path, PLAIN)
    rows = [{**TALK[1], "name": None}, {**TALK[2], "name": "a"}]
    parquet.write_table(pyarrow.table({"messages": [rows]}), tmp_path / "a.parquet")
    preprocess(tmp_path / "a.parquet", tokenizer)
    ((_, answered),) = written(tmp_path / "out_messages_document", tokenizer)
    assert answered == f"return x{END}\n"


BAD = [
    (UNSTABLE, {"messages": TALK}, "the first 3 messages become other tokens ... {% generation %}"),
    (PLAIN, {"messages": TALK[:2]}, "the assistant answers nothing"),
    (MARKED, {"messages": TALK[:2]}, "the assistant answers nothing"),
    (PLAIN, {"messages": "x"}, "'messages' is no list of messages"),
    (PLAIN, {"messages": [{"from": "human", "value": "x"}]}, "'messages' is no list of messages"),
    (PLAIN, {"messages": [{**TALK[2], "weight": 0.5}]}, "the weight 0.5 ... neither 0 nor 1"),
    (PLAIN, {"messages": [{**TALK[2], "weight": 0}]}, "the assistant answers nothing"),
    (PLAIN, {"messages": [{"role": "user", "content": 5}]}, "the chat template does not take it"),
    (PLAIN, {"text": "x"}, "no key 'messages'; its keys are: text"),
    ("{{ raise_exception('roles') }}", {"messages": TALK}, "does not take it: roles"),
    ("{{ messages.__class__.__mro__ }}", {"messages": TALK}, "does not take it"),
]


@pytest.mark.parametrize(("template", "entry", "told"), BAD)
def test_a_bad_conversation_is_named_or_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, entry: Any, told: str
) -> None:
    tokenizer = folder_with(tmp_path, template)
    is_usable = template in (PLAIN, MARKED)
    good = [{"messages": TALK[1:3]}] * is_usable
    bad = write_lines(tmp_path / "a.jsonl", *good, entry)
    line = f"{bad}, line {2 if is_usable else 1}"
    refused(lambda: preprocess(bad, tokenizer), f"{line} ... {told}")
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "tokenizer"}
    if is_usable:
        preprocess(bad, tokenizer, "--skip-malformed")
        assert f"skipped 1 malformed documents: {line}" in capsys.readouterr().out
        assert len(written(tmp_path / "out_messages_document", tokenizer)) == 1


def test_tokenizers_without_a_template_or_with_code_are_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", {"messages": TALK})
    run = partial(preprocess, source)
    refused(lambda: run(folder_with(tmp_path, None)), "--tokenizer-model ... chat_template.jinja")
    code = folder_with(tmp_path, PLAIN, auto_map={"AutoTokenizer": ["own.Tokenizer", None]})
    (code / "own.py").write_text("raise SystemExit('it ran')")
    refused(lambda: run(code), f"--tokenizer-model {code} needs code ... never runs")
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    words = ["--input", str(source), "--output-prefix", "x", "--apply-chat-template", *null]
    refused(lambda: main(words), "--apply-chat-template ... NullTokenizer ... HuggingFaceTokenizer")
    keys = partial(run, folder_with(tmp_path, PLAIN), "--json-keys", "a", "b", "c")
    refused(keys, "--json-keys a b c ... --apply-chat-template")
