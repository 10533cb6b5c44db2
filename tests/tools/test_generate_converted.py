"""Generation is transformers', and log-likelihoods the harness's, of folders and conversions."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from model.llama import Llama
from tests.data.test_tokenizer import train_sentencepiece
from tests.helpers.refusals import printed, refused, write_lines
from tests.model.values import SMALL
from tests.paro.checkpoint.convert.folders import own_model, save_folder
from tests.tools.conftest import convert, save_untrained
from tools.evaluate import INSTALL, table_of
from tools.evaluate import main as evaluate
from tools.evaluation.scoring import scores_of
from tools.generate import beginnings, encode, load_tokenizer, main, open_model
from tools.generation.continuing import Sampling, continuations

pytestmark = pytest.mark.slow("imports transformers")

PROMPTS = [[3, 1, 2], [7], [5, 9, 4, 4, 8, 2, 11]]
GREEDY = Sampling(temperature=0.0, seed=1)


def grown(model: Llama, prompts: list[list[int]], sampling: Sampling, count: int) -> Any:
    rows = islice(continuations(model, prompts, sampling, num_ids=model.config.vocab_size), count)
    return [list(text) for text in zip(*rows, strict=True)]


@pytest.mark.parametrize("seed", [5, 9])  # of two families; tied weights, scaled positions
def test_greedy_tokens_are_transformers(seed: int, tmp_path: Path) -> None:
    theirs = save_folder(tmp_path / "hf", seed)
    convert("hf", "paro", tmp_path / "hf", tmp_path / "paro")
    given = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    found = [theirs.generate(torch.tensor([prompt]), **given)[0].tolist() for prompt in PROMPTS]
    expected = [ids[len(prompt) :] for prompt, ids in zip(PROMPTS, found, strict=True)]
    end = theirs.config.vocab_size - 1  # NullTokenizer's
    shown = [ids[: ids.index(end)] if end in ids else ids for ids in expected]
    lines = [" ".join(map(str, p + s)) for p, s in zip(PROMPTS, shown, strict=True)]
    flags = [word for prompt in PROMPTS for word in ("--prompt", " ".join(map(str, prompt)))]
    flags += ["--temperature", "0", "--max-new-tokens", "16"]
    for folder in (tmp_path / "hf", tmp_path / "paro"):
        assert grown(own_model(open_model(folder)), PROMPTS, GREEDY, 16) == expected, folder
        assert printed(main, "--load", folder, *flags).splitlines() == lines
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"{' '.join(map(str, prompt))}\n" for prompt in PROMPTS[1:]))
    assert printed(
        main, "--load", folder, *flags[:2], "--prompt-file", file, *flags[-4:]
    ) == "".join(f"{line}\n" for line in lines)


def test_a_batch_is_what_its_texts_are_alone(tmp_path: Path) -> None:
    save_folder(tmp_path / "hf", 2)
    model = own_model(open_model(tmp_path / "hf"))
    for more in ({"temperature": 1.0}, {"temperature": 0.7, "top_k": 5, "top_p": 0.8}):
        sampling = Sampling(seed=7, **more)
        together = grown(model, PROMPTS, sampling, 24)
        assert together == [grown(model, [prompt], sampling, 24)[0] for prompt in PROMPTS]
        assert len({tuple(text) for text in together}) == len(PROMPTS)


def test_only_the_probable_are_drawn() -> None:
    # Probabilities 0.5, 0.25, 0.15 and 0.1, in another order.
    logits = torch.tensor([0.15, 0.5, 0.1, 0.25]).log()
    for top_k, top_p, expected in (
        (0, 1.0, [0.15, 0.5, 0.1, 0.25]),
        (2, 1.0, [0, 2 / 3, 0, 1 / 3]),
        (0, 0.7, [0, 2 / 3, 0, 1 / 3]),
        (0, 0.76, [0.15 / 0.9, 0.5 / 0.9, 0, 0.25 / 0.9]),
        (0, 0.1, [0, 1, 0, 0]),
        (3, 0.55, [0, 1, 0, 0]),  # 0.55 of the remaining 0.9
    ):
        sampling = Sampling(temperature=1.0, seed=3, top_k=top_k, top_p=top_p)
        generator = torch.Generator().manual_seed(sampling.seed)
        drawn = [sampling.choose(logits, generator) for _ in range(1500)]
        found = [drawn.count(token) / len(drawn) for token in range(4)]
        # More than three times 0.013, the standard deviation of 0.5 among 1500.
        assert found == pytest.approx(expected, abs=0.05), (top_k, top_p)
        assert [share > 0 for share in found] == [share > 0 for share in expected]


def beginning(folder: Path, prompt: str) -> list[int]:
    """The ids with which the model of a folder is prompted."""
    source = open_model(folder)
    tokenizer = load_tokenizer(source, None)
    (ids,) = beginnings(source, tokenizer, encode(tokenizer, [prompt]))
    return ids


NEW = {"content": "<|im_end|>", "special": True, "normalized": False}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "SentencePieceTokenizer"),
        ({"add_bos_token": True, "bos_token": None}, "SentencePieceTokenizer"),
        ({"add_bos_token": True, "add_eos_token": True, "pad_token": "<unk>"}, "Llama2Tokenizer"),
        ({"add_bos_token": True, "added_tokens_decoder": {"300": NEW}}, "HuggingFaceTokenizer"),
        ({"eos_token": "<|im_end|>", "add_eos_token": True}, "HuggingFaceTokenizer"),
        ({"add_bos_token": False, "eos_token": "<s>"}, "HuggingFaceTokenizer"),
    ],
)
def test_a_folder_of_pieces_is_read_as_transformers_reads_it(
    fields: dict[str, object], kind: str, pieces: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    save_folder(tmp_path / "hf", 4, vocab_size=320)
    shutil.copy(pieces, tmp_path / "hf" / "tokenizer.model")
    said = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False, **fields}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(said))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = "  def naïve(雪):"
    ids = theirs(prompt).input_ids
    ids = ids[: len(ids) - bool(fields.get("add_eos_token"))]
    convert("hf", "paro", tmp_path / "hf", tmp_path / "0")
    (tmp_path / "0").rename(tmp_path / "paro")  # which is complete without the other
    (tmp_path / "hf").rename(tmp_path / "moved")
    convert("paro", "hf", tmp_path / "paro", tmp_path / "back")
    for folder in (tmp_path / name for name in ("moved", "paro", "back")):
        source = open_model(folder)
        assert source.tokenizer["tokenizer_type"] == kind, folder
        assert beginning(folder, prompt) == ids, folder
        tokenizer = load_tokenizer(source, None)
        assert tokenizer.vocabulary == theirs.get_vocab()
        assert tokenizer.eod == theirs.eos_token_id
    assert AutoTokenizer.from_pretrained(tmp_path / "back").get_vocab() == theirs.get_vocab()


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer"])
def test_an_export_prompts_as_the_model_was_trained(
    kind: str, pieces: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    save_untrained(tmp_path / "saved", f"--tokenizer-type {kind} --tokenizer-model {pieces}")
    convert("paro", "hf", tmp_path / "saved", tmp_path / "hf")
    convert("hf", "paro", tmp_path / "hf", tmp_path / "paro")
    convert("paro", "hf", tmp_path / "paro", tmp_path / "back")
    prompt = "  def naïve(雪):"
    ids, again = (
        AutoTokenizer.from_pretrained(tmp_path / name)(prompt).input_ids for name in ("hf", "back")
    )
    assert (ids[0] == 1) == (kind == "Llama2Tokenizer")
    assert again == ids
    for folder in (tmp_path / name for name in ("saved", "hf", "paro", "back")):
        assert beginning(folder, prompt) == ids, folder
        assert load_tokenizer(open_model(folder), None).decode(ids) == prompt


@pytest.mark.parametrize(("said", "ends"), [(None, set()), (2, {2}), ([7, 9], {7, 9})])
def test_the_generation_config_says_what_ends_a_text(
    said: object, ends: set[int], tmp_path: Path
) -> None:
    save_folder(tmp_path / "hf", 0)
    path = tmp_path / "hf" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": said}))
    convert("hf", "paro", tmp_path / "hf", tmp_path / "paro")
    for folder in ("hf", "paro"):
        assert open_model(tmp_path / folder).ends == ends
    path.unlink()
    assert open_model(tmp_path / "hf").ends == frozenset()


PAIRS = [([1, 2], [3]), ([4], [5, 6, 7]), ([9] * 8, [8, 1]), ([2, 3, 4], [1]), ([7, 7], [5] * 6)]
LENGTH = 6


@pytest.mark.parametrize("tied", [False, True])
def test_scores_are_of_the_logits_whatever_is_in_the_batch(tied: bool) -> None:
    sizes = {"vocab_size": 11, "max_position_embeddings": LENGTH}
    model = Llama(replace(SMALL, **sizes, tie_embeddings_and_output_weights=tied))
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    wanted = []
    for context, continuation in PAIRS:
        text = [*context, *continuation][-LENGTH - 1 :]
        with torch.no_grad():
            logits_SV = model(torch.tensor([text[:-1]]))[0][-len(continuation) :]
        chosen = logits_SV.log_softmax(1)[range(len(continuation)), continuation]
        wanted += [float(chosen.sum()), logits_SV.argmax(1).tolist() == continuation]
    for size in (1, 3, 8):
        found = scores_of(model, PAIRS, max_length=LENGTH, size=size)
        assert [value for score in found for value in score] == pytest.approx(wanted, rel=1e-5)


def test_an_answer_that_has_no_likelihood_is_refused() -> None:
    with torch.device("meta"):
        model = Llama(SMALL)
    scores = partial(scores_of, model, max_length=LENGTH, size=1)
    refused(lambda: scores([*PAIRS, ([1], [])]), "an answer ... no token")
    refused(lambda: scores([*PAIRS, ([], [1])]), "a question ... no token")
    long = [*PAIRS, ([1], [1] * (LENGTH + 1))]
    refused(lambda: scores(long), f"{LENGTH + 1} tokens ... --seq-length is {LENGTH}")
    rows = SMALL.vocab_size
    refused(lambda: scores([*PAIRS, ([1], [rows])]), f"{rows} vocabulary rows")


def test_mistakes_name_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, flags, message in (
        (None, "", INSTALL),
        ("found", "--batch-size 0", "--batch-size 0 must be at least 1"),
        ("found", "--num-fewshot -1", "--num-fewshot -1 must be at least 0"),
        ("found", "--include-path nowhere", "--include-path nowhere is no folder"),
    ):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, found=installed: found)
        refused(partial(evaluate, f"--load x --tasks y {flags}".split()), message)


def test_the_table_has_every_figure_with_its_error() -> None:
    figures = {"alias": "own", "acc,none": 0.75, "acc_stderr,none": 0.25, "f1,strict": 1.0}
    table = table_of({"own": {**figures, "f1_stderr,strict": "N/A"}})
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["own", "acc", "0.7500", "0.2500"],
        ["own", "f1,strict", "1.0000", "-"],
    ]


HEAD = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: label
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
"""
QUESTIONS = [
    {"question": "def f(x):\n    return", "choices": [" x", " x # é", " def"], "label": 0},
    {"question": "", "choices": ["def f(x):", "return x"], "label": 1},
    {"question": "    return x  # é\n" * 4, "choices": ["x", "return"], "label": 0},
    {"question": "f(x): ", "choices": ["return 雪", " x"], "label": 1},
]


@pytest.mark.verify
@pytest.mark.parametrize("tokenizer_type", ["Llama2Tokenizer", "SentencePieceTokenizer"])
def test_it_is_what_the_harness_finds_of_the_exported_model(
    tokenizer_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are longer than the model's 16 positions too."""
    harness: Any = pytest.importorskip("lm_eval", reason=INSTALL)
    tasks_of: Any = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    pieces = train_sentencepiece(tmp_path / "pieces.model")
    flags = f"--tokenizer-type {tokenizer_type} --tokenizer-model {pieces}"
    save_untrained(tmp_path / "own", flags)
    convert("paro", "hf", tmp_path / "own", tmp_path / "hf")
    file = write_lines(tmp_path / "questions.jsonl", *QUESTIONS)
    tasks = {"own_choice": CHOICE, "own_text": ROLLING}
    for name, text in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(HEAD.format(name=name, file=file) + text)
    # Without lm-eval's own tasks, thousands of files.
    manager = tasks_of.TaskManager(include_path=str(tmp_path), include_defaults=False)
    theirs = harness.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tmp_path / "hf"), "dtype": "float32"},
        device="cpu",
        tasks=[*tasks],
        task_manager=manager,
        bootstrap_iters=0,
    )
    brief = partial(harness.simple_evaluate, bootstrap_iters=0)  # without standard errors
    monkeypatch.setattr("tools.evaluation.harness.simple_evaluate", brief)
    monkeypatch.setattr("tools.evaluation.harness.TaskManager", lambda include_path: manager)
    for folder in ("own", "hf"):
        out = tmp_path / f"{folder}.json"
        words = f"--load {tmp_path / folder} --device cpu --batch-size 3 --output {out}"
        evaluate([*words.split(), "--include-path", str(tmp_path), "--tasks", *tasks])
        ours = json.loads(out.read_text())
        for name in tasks:
            assert values_of(ours["samples"][name]) == pytest.approx(
                values_of(theirs["samples"][name]), abs=1e-4
            )
            figures = theirs["results"][name]
            for figure, value in ours["results"][name].items():
                if isinstance(value, float) and "stderr" not in figure:
                    assert value == pytest.approx(figures[figure], abs=1e-4), figure
    missing = ["--load", str(tmp_path / "own"), "--tasks", "no_such_task"]
    refused(lambda: evaluate(missing), "--tasks no_such_task is no task of lm-eval")


def values_of(samples: list[dict[str, Any]]) -> list[float]:
    found: list[float] = []
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        for (answer,) in sample["resps"]:
            found.append(float(answer[0] if isinstance(answer, (list, tuple)) else answer))
    return found
