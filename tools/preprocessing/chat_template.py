"""Conversations as token ids by a tokenizer's own chat template, and which tokens are answered."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any

import numpy as np

from data.hugging_face_tokenizer import load_transformers_tokenizer
from data.loss_mask import MASKED, TRAINED, LossMask
from data.tokenizer_config import TokenizerConfig
from paro.errors import UserError
from paro.files.object_cache import local_copy
from tools.preprocessing.answers import Span, added_by_answers
from tools.preprocessing.conversations import ASSISTANT, CALLS, Conversation, Message

_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")  # how a template marks answers
_PROBE = {"probe": "x"}  # arguments of a call, which Python writes in another way than JSON


class ChatTemplate:
    """The chat template of a tokenizer, or several by their names: `default` and `tool_use`."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        self._tokenizer = tokenizer
        self._renderers: dict[str, _Renderer] = {}
        found = tokenizer.chat_template
        if not found:
            raise UserError(
                f"{source} has no chat template: put it into chat_template.jinja in that folder, "
                "or take the folder of a model that was trained on conversations"
            )
        if not tokenizer.is_fast:
            raise UserError(
                f"{source} does not say which part of a text a token is: it has no tokenizer.json, "
                "and transformers makes none of its files"
            )
        self.text: str = found if isinstance(found, str) else json.dumps(found)

    @property
    def writes_date(self) -> bool:
        """True if the template may write the day on which it is rendered."""
        return "strftime_now" in self.text

    def encode(self, conversation: Conversation) -> tuple[list[int], LossMask]:
        """Return the ids of a conversation, and a mark for each; `UserError` if it has no answer.

        The template says what is answered by its generation marks. Without any, it is what each
        message of the assistant adds to the prompt before it. A token is answered if any of its
        characters is, or a part of one.
        """
        renderer = self._renderer_for(conversation)
        for name in conversation.features:
            if name not in renderer.template:
                raise UserError(f"the chat template does not write the {name} of a conversation")
        text, spans = renderer.answered(conversation)
        ids, places = self._tokens(text)
        begins, ends = places[:, 0], np.maximum(places[:, 1], places[:, 0] + 1)
        loss_mask = np.full(len(ids), MASKED, np.uint8)
        for begin, end in spans:
            if begin < end:
                loss_mask[(begins < end) & (ends > begin)] = TRAINED
        loss_mask[:1] = MASKED  # no token precedes it
        if not loss_mask.any():
            raise UserError("the assistant answers nothing in this conversation")
        return ids, loss_mask

    def prompt(self, conversation: Conversation) -> list[int]:
        """Return the ids of a conversation and of the generation prompt for the next answer."""
        return self._tokens(self._renderer_for(conversation).text(conversation, prompt=True))[0]

    def _renderer_for(self, conversation: Conversation) -> _Renderer:
        try:
            template = self._tokenizer.get_chat_template(tools=conversation.tools)
        except ValueError as error:
            raise UserError(f"none of the chat templates is named default: {error}") from error
        if template not in self._renderers:
            self._renderers[template] = _Renderer(template, self._tokenizer.special_tokens_map)
        return self._renderers[template]

    def _tokens(self, text: str) -> tuple[list[int], np.ndarray[Any, Any]]:
        """Return the ids of a text, and from where to where each is in it."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON escapes can encode invalid text
            raise UserError("a text holds half a surrogate pair") from error
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return list(encoded["input_ids"]), np.array(encoded["offset_mapping"], int).reshape(-1, 2)


class _Renderer:
    """Renderer of conversations by one template, in transformers' sandbox.

    Calls have their arguments as objects, or as JSON where the template takes them for a text.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, Any]) -> None:
        self.template = template
        self._special_tokens = special_tokens

    def text(self, conversation: Conversation, *, prompt: bool = False) -> str:
        """Return the text of a conversation, with `prompt` also the generation prompt."""
        return self._write(conversation, add_generation_prompt=prompt)[0]

    def answered(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the parts of it that are answered."""
        if _GENERATION.search(self.template) is None:
            text = self.text(conversation)
            return text, added_by_answers(conversation, text, self.text)
        text, spans = self._write(conversation, return_assistant_tokens_mask=True)
        return text, self._of_answers(conversation, spans)

    def _of_answers(self, conversation: Conversation, spans: list[Span]) -> list[Span]:
        """Return the marked parts of messages that are answers."""
        messages = conversation.messages
        spoken = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]

        def count(first: int) -> int:
            """Count the marked parts of the first messages."""
            if len(spans) == len(spoken):
                return sum(number < first for number in spoken)
            part = conversation.before(first)
            return len(self._write(part, return_assistant_tokens_mask=True)[1]) if first else 0

        read = {
            number
            for message in spoken
            if not conversation.is_answer(message)
            for number in range(count(message), count(message + 1))
        }
        return [span for number, span in enumerate(spans) if number not in read]

    def _write(self, conversation: Conversation, **options: bool) -> tuple[str, list[Span]]:
        messages = conversation.messages
        if CALLS in conversation.features and self._wants_text:
            conversation = conversation._replace(messages=[*map(_with_text, messages)])
        return self._rendered(conversation, **options)

    def _rendered(self, conversation: Conversation, **options: bool) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[conversation.messages],
                tools=conversation.tools,
                chat_template=self.template,
                **options,
                **self._special_tokens,
            )
        except Exception as error:  # whatever a template raises, of any type
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UserError(f"the chat template does not take it: {reason}") from error
        return texts[0], spans[0] if spans else []

    @cached_property
    def _wants_text(self) -> bool:
        """Tell whether the template writes JSON of a call if it gets a text, and only then."""
        call = {"function": {"name": "probe", "arguments": _PROBE}}
        calls = [{"type": "function", "id": "probe0000", **call}]
        asked: Message = {"role": "user", "content": "x"}
        called: Message = {"role": ASSISTANT, CALLS: calls}

        def writes_json(message: Message) -> bool:
            try:
                text, _ = self._rendered(Conversation([asked, message]))
            except UserError:
                return False
            return json.dumps(_PROBE) in text

        return not writes_json(called) and writes_json(_with_text(called))


def _with_text(message: Message) -> Message:
    """Return a message whose calls have their arguments as JSON."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _json(call["function"])}}
        for call in message.get(CALLS, ())
    ]
    return {**message, CALLS: calls} if calls else message


def _json(function: Mapping[str, Any]) -> str:
    return json.dumps(function["arguments"], ensure_ascii=False)


@cache
def chat_template_of(config: TokenizerConfig) -> ChatTemplate:
    """Return the chat template of a tokenizer, one per process."""
    if config.tokenizer_type != "HuggingFaceTokenizer" or config.tokenizer_model is None:
        raise UserError(
            f"--apply-chat-template and --tokenizer-type {config.tokenizer_type}: only a Hugging "
            "Face folder has a chat template; give HuggingFaceTokenizer"
        )
    model = config.tokenizer_model
    return ChatTemplate(
        load_transformers_tokenizer(local_copy(model)), f"--tokenizer-model {model}"
    )
