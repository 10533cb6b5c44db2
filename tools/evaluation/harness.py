"""A model of ours as lm-eval, which this file needs, asks for log-likelihoods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval import simple_evaluate as simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from data.tokenizer import Tokenizer
from model.llama import Llama
from paro.errors import UserError
from tools.evaluation.scoring import Score, scores_of


class HarnessModel(TemplateLM):
    """A model that the harness asks; `prefix` are the ids that begin every text, maybe none."""

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        *,
        prefix: Sequence[int],
        max_length: int,
        batch_size: int,
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self._model = model
        self._own = tokenizer
        self._prefix = list(prefix)
        self._batch_size = batch_size

    @property
    def eot_token_id(self) -> int:
        return self._own.eod

    @property
    def prefix_token_id(self) -> int:
        """The token of an empty context."""
        return self._own.eod if self._own.bos is None else self._own.bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text; with a prefix unless that is refused, or the text has it."""
        ids, prefix = self._own.encode(string), self._prefix
        if add_special_tokens is False or ids[: len(prefix)] == prefix:
            return ids
        return prefix + ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[Score]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return scores_of(self._model, pairs, max_length=self.max_length, size=self._batch_size)

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Return the log-likelihood of whole texts, cut into windows of the model's length."""
        windows = [
            (number, make_disjoint_window(window))
            for number, request in enumerate(requests)
            for window in get_rolling_token_windows(
                self.tok_encode(*request.args),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
        ]
        scores = self._loglikelihood_tokens([(None, *window) for _, window in windows])
        sums = [0.0] * len(requests)
        for (number, _), score in zip(windows, scores, strict=True):
            sums[number] += score.log_likelihood
        return sums

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        names = ", ".join(sorted({str(request.task_name) for request in requests}))
        raise UserError(
            f"--tasks {names} generates text, and only log-likelihoods are computed here: convert "
            "the model with tools/convert_checkpoint.py --to hf, and give the folder to lm_eval"
        )


def task_manager(names: Sequence[str], folder: str | None) -> TaskManager:
    """Return the harness's tasks with those of a folder; `UserError` for an unknown name."""
    manager = TaskManager(include_path=folder)
    for name in names:
        if not manager.match_tasks([name]):
            raise UserError(
                f"--tasks {name} is no task of lm-eval or of --include-path: lm_eval ls tasks "
                "lists them"
            )
    return manager
