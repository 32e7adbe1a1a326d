"""Tokenization with a limit: texts that cannot fit are refused by length, before native code takes a second a
megabyte; and the prompts that a reranker scores documents by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from edge.errors import ContextFull
from edge.llama.llama import Model
from quant.gguf.file import GgufFile
from quant.gguf.header import GgufArray

_USUAL_BYTES = 8  # of a token in prose, at most: the beginning of a longer text is tokenized first, and may be too much
_CUT_TOKENS = 64  # extra tokens that the beginning may have because it was cut in the middle of a word
_TEMPLATE = "tokenizer.chat_template.rerank"
_PLACES = re.compile(r"\{(query|document)\}")


class Tokenizer:
    """Tokenizer for texts that must fit. Any thread may use it."""

    def __init__(self, model: Model, file: GgufFile) -> None:
        """file: of the model."""
        self._model = model
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        vocabulary = map(str, tokens) if isinstance(tokens, GgufArray) else ()
        self._longest = max((len(token.encode(errors="replace")) for token in vocabulary), default=1)  # bytes, or more

    def tokenize(self, text: str, most: int, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the tokens of a text that may have `most`; slightly more are returned if it is hardly longer.
        ContextFull for a text that certainly has more."""
        self._check(len(text.encode(errors="replace")), most)
        beginning = text[: most * _USUAL_BYTES]
        if len(beginning) < len(text):
            tokens = self._model.tokenize(beginning, add_special=add_special, parse_special=parse_special)
            if len(tokens) > most + _CUT_TOKENS:
                raise _too_long(f"it has more than {len(tokens) - _CUT_TOKENS} tokens", most)
        return self._model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def check_messages(self, messages: Iterable[Mapping[str, Any]], most: int) -> None:
        """Raise ContextFull for messages with more text than so many tokens can have."""
        contents = (message.get("content") for message in messages)
        self._check(sum(len(content) for content in contents if isinstance(content, str)), most)

    def _check(self, n_bytes: int, most: int) -> None:
        if n_bytes > most * self._longest:
            raise _too_long(f"its {n_bytes} bytes are more than {n_bytes // self._longest} tokens", most)


def _too_long(reason: str, most: int) -> ContextFull:
    return ContextFull(
        f"the text is too long: {reason}, and {most} is all that there may be; send less of it, or serve with a larger"
        " --context where the model was trained for more"
    )


class RankingPrompts:
    """Makes such prompts for one model. Any thread may use it."""

    def __init__(self, model: Model, file: GgufFile, tokenizer: Tokenizer) -> None:
        """file: of the model."""
        self._tokenizer = tokenizer
        template = file.metadata.get(_TEMPLATE)
        self._parts = _parts(model, template) if isinstance(template, str) else _plain_parts(model)

    def tokens(self, query: str, document: str, most: int) -> list[int]:
        """Return the token ids of a prompt of at most `most`; nothing in the texts becomes a control token.
        ContextFull."""
        texts = {"query": query, "document": document}
        tokens: list[int] = []
        for part in self._parts:
            if isinstance(part, int):
                tokens.append(part)
            elif text := _PLACES.sub(lambda place: texts[place[1]], part):
                tokens += self._tokenizer.tokenize(text, most, add_special=False)
        if len(tokens) > most:
            raise ContextFull(f"{len(tokens)} tokens, and {most} are the most; send shorter parts of it")
        return tokens


def _plain_parts(model: Model) -> list[int | str]:
    """Return both texts, each with the tokens that the vocabulary wants around it."""
    end = model.added("eos")
    return [*model.added("bos"), "{query}", *end, *model.added("sep"), "{document}", *end]


def _parts(model: Model, template: str) -> list[int | str]:
    """Return the control tokens in a template, and the text between them."""
    parts: list[int | str] = []
    rest = template
    for token in model.tokenize(template, add_special=False, parse_special=True):
        if model.is_control(token):
            text, _, rest = rest.partition(model.piece(token, special=True).decode(errors="replace"))
            parts += [text, token]
    return [*parts, rest]
