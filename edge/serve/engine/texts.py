"""Tokenization with a limit. Texts that are too long are refused by their length, because tokenization takes about a
second per megabyte."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from edge.errors import ContextFull
from edge.llama.llama import Model
from quant.gguf.file import GgufFile
from quant.gguf.header import GgufArray

# Maximum bytes per token in prose. The beginning of a longer text is tokenized first, to refuse it early.
_USUAL_BYTES = 8
# Extra tokens that the beginning may have because it was cut in the middle of a word.
_CUT_TOKENS = 64


class Tokenizer:
    """Tokenizer of texts with a maximum length. Any thread may use it."""

    def __init__(self, model: Model, file: GgufFile) -> None:
        """file: GGUF file of the model."""
        self._model = model
        tokens = file.metadata.get("tokenizer.ggml.tokens")
        vocabulary = map(str, tokens) if isinstance(tokens, GgufArray) else ()
        # Upper bound of the bytes of a token.
        self._longest = max((len(token.encode(errors="replace")) for token in vocabulary), default=1)

    def tokenize(self, text: str, most: int, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the tokens of a text. Slightly more than `most` are returned if the text is only slightly too long.

        most: maximum tokens. Raises ContextFull for a text that certainly has more.
        """
        self._check(len(text.encode(errors="replace")), most)
        beginning = text[: most * _USUAL_BYTES]
        if len(beginning) < len(text):
            tokens = self._model.tokenize(beginning, add_special=add_special, parse_special=parse_special)
            if len(tokens) > most + _CUT_TOKENS:
                raise _too_long(f"it has more than {len(tokens) - _CUT_TOKENS} tokens", most)
        return self._model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def check_messages(self, messages: Iterable[Mapping[str, Any]], most: int) -> None:
        """Raise ContextFull if the messages have more text than `most` tokens can represent."""
        contents = (message.get("content") for message in messages)
        self._check(sum(len(content) for content in contents if isinstance(content, str)), most)

    def _check(self, n_bytes: int, most: int) -> None:
        if n_bytes > most * self._longest:
            raise _too_long(f"its {n_bytes} bytes are more than {n_bytes // self._longest} tokens", most)


def _too_long(reason: str, most: int) -> ContextFull:
    return ContextFull(
        f"the text is too long: {reason}, and at most {most} are allowed; send less text, or serve with a larger"
        " --context if the model was trained for it"
    )
