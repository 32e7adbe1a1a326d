"""Input processing: converts the server's generations to requests of the scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from edge.api.config import EngineConfig
from edge.errors import ContextFull, EmptyPrompt, SamplingError
from edge.llm.continuation import Request
from edge.llm.interface import TextEngine
from edge.llm.sampler import SamplingParams
from edge.llm.slot import check_prompt, common_prefix
from edge.media.encoder import MediaEncoder
from edge.media.marks import without_marks
from edge.media.media import EmbeddingRows
from edge.media.prompt import encoded, tokens_with
from edge.serve.engine.downloads import files_of
from edge.serve.engine.grammars import with_control_tokens
from edge.serve.engine.infill import InfillPrompts
from edge.serve.engine.ranking import RankingPrompts
from edge.serve.engine.texts import Tokenizer
from edge.text.constraints.constraint import never_given_up
from edge.text.templates.process import TemplateProcess
from edge.text.templates.template import CONTINUES, ChatTemplate
from edge.text.thinking_tracker import Thinking
from partition.model.generation import generates

_ANSWER_PART = 4  # share of the context reserved for an infill answer without max_tokens
_MOST_PIECES = 32 << 20  # maximum bytes of one answer, whose JSON may take six characters for each
_MOST_WINDOWED = 1 << 20  # maximum tokens of a prompt with windowed attention; they take about a second to tokenize


class InputProcessor:
    """Renders chats, tokenizes texts, and checks both. Any thread may use it."""

    def __init__(self, config: EngineConfig, engine: TextEngine, encoder: MediaEncoder | None = None) -> None:
        """config: configuration of the engine. encoder: encoder of pictures and sounds; None: unsupported."""
        self._config, self._engine, self._encoder = config, engine, encoder
        # Limits of a request, and of an answer without max_tokens. With windowed attention, prompts may exceed the
        # context.
        self._most_answer = min(engine.context, engine.shape.context_length or engine.context)
        self._most_tokens = self._most_answer if engine.attention_window is None else _MOST_WINDOWED
        self._tokenizer = Tokenizer(engine.model, engine.file)
        self._renderer_lock, self._renderer = threading.Lock(), TemplateProcess()
        self._infill = InfillPrompts(engine.model, engine.path.name, spm=config.spm_infill)
        self._ranking = RankingPrompts(engine.model, engine.file, self._tokenizer)
        self._bos = self._special("bos")
        self.template = ChatTemplate.for_model(engine.file.metadata, self._bos, self._special("eos"), self._renderer)

    def close(self) -> None:
        """End the process that renders templates."""
        self._renderer.close()

    def request(self, generation: Mapping[str, Any], given_up: Callable[[], bool] = never_given_up) -> Request:
        """Return the scheduler's request for a generation.

        given_up: returns True if the client has disconnected. Raises all errors that a request can have.
        """
        if not generates(self._engine.file):
            raise SamplingError(f"{self._engine.path.name} generates no text; use it for embeddings or reranking")
        prompt, thinking, media = self._prompt(generation, given_up)
        room = self._most_tokens - len(prompt)
        if room <= 0:
            raise ContextFull(
                f"the prompt has {len(prompt)} tokens, but prompt and answer together may have {self._most_tokens};"
                " use a shorter prompt, or serve with a larger --context if the model was trained for it"
            )
        most = self._most_answer if generation["max_tokens"] is None else generation["max_tokens"]
        sampling = generation["sampling"]
        # The template's stop strings replace the end token that the model lacks.
        stops = () if generation["messages"] is None or sampling.get("ignore_eos") else self.template.stops
        if sampling.get("lark") and generation["marks"]:
            sampling = {**sampling, "lark": with_control_tokens(sampling["lark"], self._engine.model)}
        if least := sampling.get("min_tokens"):
            sampling = {**sampling, "min_tokens": min(least, room)}
        biases = {int(token): bias for token, bias in sampling.get("logit_bias", {}).items()}
        # Each of several answers to one prompt has its own seed.
        seed = {"seed": generation["place"]} if self._config.reproducible else {}
        return Request(
            prompt,
            min(room, most),
            SamplingParams(**{**seed, **sampling, "logit_bias": biases}),
            stops,
            thinking=thinking,
            marks=generation["marks"],
            logprobs=generation["logprobs"],
            generated=generation["generated"],
            namespace=generation["namespace"],
            adapters=None if generation["adapters"] is None else tuple(generation["adapters"]),
            media=media,
            order=(generation["priority"], generation["tag"]),
            client=generation["client"],
        )

    def _prompt(
        self, generation: Mapping[str, Any], given_up: Callable[[], bool]
    ) -> tuple[list[int], Thinking | None, tuple[EmbeddingRows, ...]]:
        """Return the token ids of the prompt, the thinking settings of its answer, and its pictures and sounds."""
        messages, most = generation["messages"], self._most_tokens
        if messages is not None:
            self._tokenizer.check_messages(messages, most)
            think = self._config.think if generation["think"] is None else generation["think"]
            text, tokens, media = self._chat(
                messages,
                generation["tools"],
                generation["variables"],
                think,
                generation["media"],
                generation["stand_ins"],
                given_up,
                generation["namespace"],
            )
            form = self.template.thinking
            if form is not None:
                answers = (generation["answer"],) if generation["answer"] else ()
                form = replace(form, calls=tuple(generation["ends_thought"]), answers=answers)
            thinking = Thinking.from_prompt(text, form, think)
            if thinking is not None and messages[-1].get(CONTINUES):
                thinking = replace(thinking, state="answer")
            return tokens, thinking, media
        if (infill := generation["infill"]) is not None:
            if not isinstance(infill["prefix"], str):
                self.tokens(infill["prefix"], most)  # raises an error for an invalid id
            answer = min(generation["max_tokens"] or most // _ANSWER_PART, most // 2)
            return self._infill.tokens(infill, most - answer), None, ()
        tokens = self.tokens(generation["prompt"], most)
        if not tokens:
            raise EmptyPrompt("the prompt is empty: there is nothing to continue")
        return tokens, None, ()

    def _chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        think: int | None,
        media: Mapping[str, str] = MappingProxyType({}),
        stand_ins: Mapping[str, str] = MappingProxyType({}),
        given_up: Callable[[], bool] = never_given_up,
        namespace: str = "",
    ) -> tuple[str, list[int], tuple[EmbeddingRows, ...]]:
        """Return the text and token ids of a chat's prompt, and its media. media, stand_ins: see `Generation`."""
        text = self.render(messages, tools, variables, think)
        adds_bos = not (self._bos and text.startswith(self._bos))

        def tokenize(part: str, is_first: bool) -> list[int]:
            add_special = is_first and adds_bos
            return self._tokenizer.tokenize(part, self._most_tokens, add_special=add_special, parse_special=True)

        if self._encoder is None:
            media = {mark: file for mark, file in media.items() if mark not in stand_ins}
        files = files_of(media, self._config.media_urls, given_up)
        own = encoded(self._encoder, files, len(media), self._most_tokens, given_up, namespace, stand_ins)
        text = without_marks(text, {mark: line for mark, line in stand_ins.items() if mark not in own})
        return text, *tokens_with(text, own, tokenize)

    def shared_prefix(
        self,
        chats: Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = MappingProxyType({}),
        think: int | None = None,
    ) -> list[int]:
        """Return the common first token ids of two chats' prompts. Raises ContextFull if they leave no room."""
        for messages in chats:
            self._tokenizer.check_messages(messages, self._most_tokens)
        first, second = (self._chat(messages, tools, variables, think)[1] for messages in chats)
        return self._checked_prefix(first[: common_prefix(first, second)])

    def tokens_before(self, text: str) -> list[int]:
        """Return the token ids with which all continuations of a text begin.

        The last token is left out, because it may merge with the text after it. Raises ContextFull if the tokens leave
        no room for more.
        """
        return self._checked_prefix(self.tokens(text, self._most_tokens)[:-1])

    def _checked_prefix(self, tokens: list[int]) -> list[int]:
        check_prompt(tokens, self._engine)
        return tokens

    def tokens(self, text: str | Sequence[int], most: int) -> list[int]:
        """Return the token ids of a text, or the given ids if they are valid.

        most: maximum tokens. Raises SamplingError for an invalid id, and ContextFull for a text that is far too long.
        """
        if isinstance(text, str):
            return self._tokenizer.tokenize(text, most)
        n_vocab = self._engine.model.n_vocab
        if bad := [token for token in text if not 0 <= token < n_vocab]:
            raise SamplingError(f"{bad[0]} is not a token: ids are from 0 to {n_vocab - 1}")
        return list(text)

    def ranked(self, query: str, documents: Sequence[str], most: int) -> list[list[int]]:
        """Return the token ids of the prompt that scores each document.

        most: maximum tokens of each prompt. Raises ContextFull for a document that is too long together with the query.
        """
        ranked = []
        for number, document in enumerate(documents):
            try:
                tokens = self._ranking.tokens(query, document, most)
            except ContextFull as error:
                raise ContextFull(f"documents.{number}, with the query: {error}") from None
            ranked.append(tokens)
        return ranked

    def pieces(self, tokens: list[int]) -> list[str]:
        """Return the bytes of each token, as Latin-1. Raises SamplingError for an invalid id, or too many bytes."""
        model = self._engine.model
        ids = self.tokens(tokens, len(tokens))
        by_id = {token: model.piece(token, special=True).decode("latin-1") for token in set(ids)}
        pieces = [by_id[token] for token in ids]
        if (n_bytes := sum(map(len, pieces))) > _MOST_PIECES:
            raise SamplingError(f"these tokens have {n_bytes} bytes of text, at most {_MOST_PIECES} are allowed")
        return pieces

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        think: int | None = None,
    ) -> str:
        """Return the text of a chat's prompt.

        think: thinking budget in tokens; None: the default.

        Raises TemplateError.
        """
        think = self._config.think if think is None else think
        messages = with_system(messages, self._config.system)
        with self._renderer_lock:
            return self.template.render(messages, tools=tools, variables=variables, think=think)

    def _special(self, name: str) -> str:
        token = self._engine.model.special_token(name)
        return "" if token is None else self._engine.model.piece(token, special=True).decode(errors="replace")


def with_system(messages: Sequence[Mapping[str, Any]], system: str) -> Sequence[Mapping[str, Any]]:
    """Return messages with a system prompt prepended, unless they begin with one."""
    if not system or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]
