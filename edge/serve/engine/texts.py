"""Tokenization with a limit: texts that cannot fit are refused by length, before native code takes a second a
megabyte."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from edge.errors import ContextFull
from edge.llama.llama import Model
from quant.gguf.file import GgufFile
from quant.gguf.header import GgufArray

_USUAL_BYTES = 8  # of a token in prose, at most: the beginning of a longer text is tokenized first, and may be too much
_CUT_TOKENS = 64  # extra tokens that the beginning may have because it was cut in the middle of a word


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
