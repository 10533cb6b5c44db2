"""Log-likelihoods equal the model's logits, and the harness's own of the exported model."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from model.llama import Llama
from tests.data.test_tokenizer import train_sentencepiece
from tests.helpers.commands import write_lines
from tests.helpers.refusals import refused
from tests.model.values import SMALL
from tests.tools.untrained import convert, save_untrained
from tools.evaluate import INSTALL, main, table_of
from tools.evaluation.scoring import scores_of

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


@pytest.mark.parametrize(
    ("pair", "told"),
    [
        (([1], []), "an answer ... no token"),
        (([], [1]), "a question ... no token"),
        (([1], [1] * (LENGTH + 1)), f"{LENGTH + 1} tokens ... --seq-length is {LENGTH}"),
        (([1], [SMALL.vocab_size]), f"{SMALL.vocab_size} vocabulary rows"),
    ],
)
def test_an_answer_that_has_no_likelihood_is_refused(
    pair: tuple[list[int], list[int]], told: str
) -> None:
    with torch.device("meta"):
        model = Llama(SMALL)
    refused(lambda: scores_of(model, [*PAIRS, pair], max_length=LENGTH, size=1), told)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--batch-size 0", "--batch-size 0 must be at least 1"),
        ("--num-fewshot -1", "--num-fewshot -1 must be at least 0"),
        ("--include-path nowhere", "--include-path nowhere is no folder"),
    ],
)
def test_mistakes_name_the_flag(flags: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"--load x --tasks y {flags}".split()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    refused(lambda: main(words), INSTALL)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: "found")
    refused(lambda: main(words), told)


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
        main([*words.split(), "--include-path", str(tmp_path), "--tasks", *tasks])
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
    refused(lambda: main(missing), "--tasks no_such_task is no task of lm-eval")


def values_of(samples: list[dict[str, Any]]) -> list[float]:
    """The log-likelihoods of all answers."""
    found: list[float] = []
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        for (answer,) in sample["resps"]:
            found.append(float(answer[0] if isinstance(answer, (list, tuple)) else answer))
    return found
