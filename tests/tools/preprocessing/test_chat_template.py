"""Conversations by a chat template: which tokens are answered, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data.indexed_dataset import IndexedDataset
from tests.data.test_hugging_face_tokenizer import byte_level, write
from tests.helpers.refusals import refused, says, write_lines
from tests.tools.preprocessing import templates
from tests.tools.preprocessing.templates import BEGIN, BODY, END, GEMMA, GLM, MARKED, PLAIN, QWEN
from tools.preprocess_data import main
from tools.preprocessing.chat_template import chat_template_of
from tools.preprocessing.encode import ends_of, tokenizer_of

pytestmark = pytest.mark.slow("imports transformers")

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


def folder_with(folder: Path, template: str | None, **fields: Any) -> Path:
    """A folder of a tokenizer; what was known of one of this name is forgotten."""
    for cached in (tokenizer_of, chat_template_of, ends_of):
        cached.cache_clear()
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


def made(folder: Path, template: str, *lines: Any, flags: Any = (), **fields: Any) -> list[Any]:
    """Writes the lines by a template; returns what `written` finds."""
    tokenizer = folder_with(folder, template, **fields)
    preprocess(write_lines(folder / "a.jsonl", *lines), tokenizer, *flags)
    return written(folder / "out_messages_document", tokenizer)


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
    lines = ({"p": "x?", "c": "return x"}, {"p": TALK[:4], "c": TALK[4:]})
    source = write_lines(tmp_path / "a.jsonl", *lines)
    preprocess(source, tokenizer, "--json-keys", "p", "c")
    (one, other) = written(tmp_path / "out_p_c_document", tokenizer)
    assert one[0] == f"{BEGIN}user\nx?{END}\n{BEGIN}assistant\nreturn x{END}\n"
    assert [one[1].strip(), other[1].strip()] == [f"return x{END}", f"f(x){END}"]


@pytest.mark.parametrize(("template", "after"), [(PLAIN, "\n"), (MARKED, "")])
def test_a_message_of_weight_0_is_read(tmp_path: Path, template: str, after: str) -> None:
    first, second = ({**TALK[number], "weight": 0} for number in (2, 4))
    lines = ([*TALK[:2], first, *TALK[3:]], [*TALK[:4], second])
    entries = [{"messages": line} for line in lines]
    one, other = made(tmp_path, template, *entries, flags=["--append-eod"])
    assert one[0] == other[0]
    assert [one[1], other[1]] == [f"f(x){END}{after}{END}", f"return x{END}{after}"]


TOOL = {"type": "function", "function": {"name": "now", "parameters": {}}}
KEYS = ("--json-keys", "messages", "tools")
WITH_TOOLS = "{% if tools %}{{ tools[0].function.name + '\n' }}{% endif %}"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_tools_are_written_where_their_key_is_given(tmp_path: Path, template: str) -> None:
    given = [[TOOL], json.dumps([TOOL]), None, []]
    lines = [{"messages": TALK[1:3], "tools": tools} for tools in given]
    found = made(tmp_path, WITH_TOOLS + template, *lines, flags=KEYS)
    assert [text.startswith(f"now\n{BEGIN}user") for text, _ in found] == [True, True, False, False]
    assert {answered.strip() for _, answered in found} == {f"return x{END}"}
    assert "now" not in str(made(tmp_path, WITH_TOOLS + template, *lines))


def test_tools_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    for template, tools, message in (
        (WITH_TOOLS + PLAIN, "now", "line 1: the value of 'tools' is no list of tools"),
        (PLAIN, [TOOL], "line 1: the chat template does not write the tools"),
    ):
        source = write_lines(tmp_path / "a.jsonl", {"messages": TALK[1:3], "tools": tools})
        tokenizer = folder_with(tmp_path, template)
        run = partial(preprocess, source, tokenizer, *KEYS)
        refused(run, message)


def call(arguments: Any) -> dict[str, Any]:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "tool_calls": calls}


OF_CALL = '{"name": "f", "arguments": {"a": "é"}}'
MANNERS = [
    # template, what is answered: a text, a call, and a text after its result
    (PLAIN, [f"y 雪{END}\n", None, f"z{END}\n"]),
    *(
        (own, [f"y 雪{END}\n", f"<tool_call>\n{OF_CALL}\n</tool_call>{END}\n", f"z{END}\n"])
        for own in (QWEN, templates.DEEPSEEK)
    ),
    (templates.LLAMA, [f"y 雪{END}", '{"name": "f", "parameters": {"a": "é"}}' + END, f"z{END}"]),
    (templates.MISTRAL, [f" y 雪{END}", f"[TOOL_CALLS] [{OF_CALL}]{END}", f" z{END}"]),
    (GLM, ["\ny 雪", 'f\n{"a": "é"}', "\nz"]),
    (GEMMA, ["y 雪<end_of_turn>\n", None, "z<end_of_turn>\n"]),
]


@pytest.mark.parametrize(("template", "answers"), MANNERS)
def test_published_manners_of_templates(
    tmp_path: Path, template: str, answers: list[str | None]
) -> None:
    """Calls as text and as objects, and texts in parts, are written and answered alike."""
    parts = [{"type": "text", "text": "y "}, {"type": "text", "text": "雪"}]
    result = {"role": "tool", "content": [{"type": "text", "text": "5"}]}
    lines = []
    for arguments, content in (({"a": "é"}, "y 雪"), ('{"a": "é"}', parts)):
        turns = [{"role": "user", "content": "x?"}, {"role": "assistant", "content": content}]
        turns.append({"role": "user", "content": "and?"})
        turns += [call(arguments), result] if answers[1] else []
        lines.append({"messages": [*turns, {"role": "assistant", "content": "z"}] * 3})
    one, other = made(tmp_path, template, *lines, bos_token=BEGIN)
    assert one == other
    assert one[1] == "".join(filter(None, answers)) * 3


def test_characters_of_several_tokens_and_a_token_across_the_end_are_answered(
    tmp_path: Path,
) -> None:
    marked = MARKED.replace(BODY, "{{ m.content }}")
    found = made(tmp_path, marked, {"messages": [*TALK[:2], said_by("😀")]})
    assert found[0][1] == "😀"
    template = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    template += (
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}turn{% endfor %}"
    )
    text, answered = made(tmp_path, template, {"messages": [TALK[1], said_by("re")]})[0]
    assert text == "x?turnreturn"
    assert answered == "ret", "the tokenizer has no token of both: choose another word"


def said_by(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_named_templates_are_taken_as_transformers_takes_them(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    both = {"default": PLAIN, "tool_use": WITH_TOOLS + PLAIN}
    named = [{"name": name, "template": template} for name, template in both.items()]
    tokenizer = folder_with(tmp_path, None, chat_template=named)
    lines: list[Any] = [{"messages": TALK, "tools": [TOOL]}, {"messages": TALK}]
    source = write_lines(tmp_path / "a.jsonl", *lines)
    preprocess(source, tokenizer, *KEYS)
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    assert [text for text, _ in written(tmp_path / "out_messages_document", tokenizer)] == [
        theirs.apply_chat_template(line["messages"], tools=line.get("tools"), tokenize=False)
        for line in lines
    ]
    tokenizer = folder_with(tmp_path, None, chat_template=named[1:])
    run = partial(preprocess, source, tokenizer, *KEYS)
    refused(run, "line 2: none of the chat templates is named default")


def test_columns_of_rows_are_conversations_too(tmp_path: Path) -> None:
    """As the datasets library writes them: fields that are absent from a row are null."""
    import datasets
    from datasets import Json, List, Value

    tokenizer = folder_with(tmp_path, "{% if tools %}{{ tools | tojson }}{% endif %}" + QWEN)
    other = {**TOOL, "function": {"name": "g", "parameters": {"type": "object"}}}
    lines = [
        {"messages": [TALK[1], call({"a": 1}), {**TALK[2], "name": "n"}], "tools": [TOOL, other]},
        {"messages": [TALK[1], call({"b": [{"c": 1}, {"d": 2}]})], "tools": None},
    ]
    preprocess(write_lines(tmp_path / "a.jsonl", *lines), tokenizer, *KEYS)
    expected = written(tmp_path / "out_messages_document", tokenizer)
    assert "null" not in str(expected)
    message = {"role": Value("string"), "content": Value("string"), "tool_calls": List(Json())}
    as_json = datasets.Features({"messages": List(message), "tools": List(Json())})
    for number, features in enumerate((None, as_json)):
        rows = datasets.Dataset.from_list(lines, features=features)
        sources = (tmp_path / f"{number}.parquet", tmp_path / f"saved-{number}")
        rows.to_parquet(sources[0])
        rows.save_to_disk(sources[1])
        for source in sources:
            preprocess(source, tokenizer, *KEYS)
            assert written(tmp_path / "out_messages_document", tokenizer) == expected


END_MARKED = MARKED.replace(BODY, "{{ m.content }}").replace("{{ '\n' }}", "{{ '<|im_end|>' }}")


def test_a_line_says_whether_answers_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for template, flags, message in (
        (PLAIN, [], "4 of 4 answers end with a token that stops a generation (<|im_end|>)"),
        (END_MARKED, [], "warning: 0 of 4 answers end ... {% generation %} ... --append-eod"),
        (GLM, [], "warning: 0 of 4 answers end"),
        (GLM, ["--append-eod"], "2 of 4 answers end"),
        ("{{ strftime_now('%Y') }}" + PLAIN, [], "4 of 4 answers end ... date of today"),
    ):
        source = write_lines(tmp_path / "a.jsonl", {"messages": TALK}, {"messages": TALK})
        preprocess(source, folder_with(tmp_path, template), "--partitions", "2", *flags)
        out = capsys.readouterr().out.replace("\n", " ")
        says(out, message)
        assert ("date of today" in message) == ("date of today" in out)


def test_ends_of_the_generation_config_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = folder_with(tmp_path, PLAIN, eos_token=BEGIN)
    source = write_lines(tmp_path / "a.jsonl", {"messages": TALK})
    preprocess(source, tokenizer)
    assert "warning: 0 of 2 answers end" in capsys.readouterr().out
    write(tokenizer, "generation_config.json", {"eos_token_id": [0, 1]})
    ends_of.cache_clear()
    preprocess(source, tokenizer)
    assert "> 2 of 2 answers" in "> " + capsys.readouterr().out.splitlines()[-1]


BAD = [
    (UNSTABLE, {"messages": TALK}, "the first 3 messages become another text ... {% generation %}"),
    (PLAIN, {"messages": TALK[:2]}, "the assistant answers nothing"),
    (MARKED, {"messages": TALK[:2]}, "the assistant answers nothing"),
    (PLAIN, {"messages": "x"}, "'messages' is no list of messages"),
    (PLAIN, {"messages": [{**TALK[2], "weight": 0}]}, "the assistant answers nothing"),
    (PLAIN, {"messages": [TALK[1], said_by("\ud800")]}, "half a surrogate pair"),
    (GEMMA, {"messages": [TALK[1], call({})]}, "does not write the tool_calls of a conversation"),
    (PLAIN, {"text": "x"}, "no key 'messages'; its keys are: text ... --json-keys"),
    ("{{ raise_exception('roles') }}", {"messages": TALK}, "does not take it: roles"),
    ("{{ messages.__class__.__mro__ }}", {"messages": TALK}, "does not take it"),
]


@pytest.mark.parametrize(("template", "entry", "message"), BAD)
def test_a_bad_conversation_is_named_or_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, entry: Any, message: str
) -> None:
    tokenizer = folder_with(tmp_path, template)
    is_usable = template in (PLAIN, MARKED)
    good = [{"messages": TALK[1:3]}] * is_usable
    bad = write_lines(tmp_path / "a.jsonl", *good, entry)
    line = f"{bad}, line {2 if is_usable else 1}"
    refused(lambda: preprocess(bad, tokenizer), f"{line} ... {message}")
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
    slow = tmp_path / "slow"
    slow.mkdir()
    fields = {"tokenizer_class": "ByT5Tokenizer", "eos_token": "</s>", "chat_template": PLAIN}
    write(slow, "tokenizer_config.json", fields)
    refused(lambda: run(slow), f"--tokenizer-model {slow} ... it has no tokenizer.json")
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    words = ["--input", str(source), "--output-prefix", "x", "--apply-chat-template", *null]
    refused(lambda: main(words), "--apply-chat-template ... NullTokenizer ... HuggingFaceTokenizer")
    keys = partial(run, folder_with(tmp_path, PLAIN), "--json-keys", "tools")
    refused(keys, "--json-keys tools ... --apply-chat-template")
