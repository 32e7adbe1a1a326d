"""Tokens of a model: texts become tokens and tokens bytes, and a file's table gives their hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama import ggml, library
from edge.llama.deep_stack import SHORT, check_unbroken, with_deep_stack, without_rows_of_spaces
from edge.llama.library import llama_cpp as L
from partition.slices.rules import scales_input
from quant.gguf.file import GgufFile


class Vocabulary:
    """The vocabulary of an open model."""

    vocab = cached_property(library.no_vocabulary)  # of a closed model: an open one has its own in this place
    pre_tokenizer = ""  # name of what cuts texts into words, as `tokenizer.ggml.pre` says it
    _bytes = cached_property(lambda self: lru_cache(1 << 13)(partial(_token_bytes, self.vocab)))

    def forget_vocabulary(self) -> None:
        """Refuse all from now on, as the model is closed."""
        for name in ("vocab", "_bytes"):
            vars(self).pop(name, None)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`. add_special: put in what the vocabulary wants around a text (BOS).

        ContextFull for a text with a word that is too long for llama.cpp to find its end.
        """
        vocab = self.vocab
        if self.pre_tokenizer == "whitespace":
            text = without_rows_of_spaces(text)
        if len(text) <= SHORT or L.llama_vocab_type(vocab) != L.LLAMA_VOCAB_TYPE_BPE:
            return self._tokenized(vocab, text, add_special, parse_special)
        check_unbroken(text, self.pre_tokenizer)
        return with_deep_stack(lambda: self._tokenized(vocab, text, add_special, parse_special), len(text))

    def _tokenized(self, vocab: Any, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode(errors="replace")
        size = len(data) + 16
        while True:
            tokens = (L.llama_token * size)()
            n = L.llama_tokenize(vocab, data, len(data), tokens, size, add_special, parse_special)
            if n >= 0:
                return list(tokens[:n])
            if n == -(2**31) or -n <= size:
                raise EngineError("llama.cpp cannot tokenize this text: it is too long, or the model has no vocabulary")
            size = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token; control tokens are empty unless `special`. May be part of a UTF-8 character."""
        return self._bytes(token, special)

    def is_end(self, token: int) -> bool:
        """Return whether the token ends a generation (end of text, of turn, of message)."""
        return bool(L.llama_vocab_is_eog(self.vocab, token))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a generation."""
        return tuple(token for token in range(L.llama_vocab_n_tokens(self.vocab)) if self.is_end(token))

    def is_control(self, token: int) -> bool:
        """Return whether text is this token only where special tokens are parsed."""
        return bool(L.llama_vocab_is_control(self.vocab, token))

    def special_token(self, name: str) -> int | None:
        """Id of "bos", "eos", "eot", "fim_pre" or another by llama.cpp's names; None if the vocabulary has none."""
        token = getattr(L, f"llama_vocab_{name}")(self.vocab)
        return None if token < 0 else int(token)

    def added(self, name: str) -> list[int]:
        """The "bos", "eos" or "sep" that the vocabulary wants around texts; empty if it wants none, or has none."""
        token = self.special_token(name)
        is_added = getattr(L, f"llama_vocab_get_add_{name}")(self.vocab)
        return [token] if is_added and token is not None else []


def _token_bytes(vocab: Any, token: int, special: bool) -> bytes:
    """As `Vocabulary.piece`."""
    size = 64
    while True:
        buffer = np.empty(size, np.uint8)
        place = buffer.ctypes.data_as(L.llama_token_to_piece.argtypes[2])
        n = L.llama_token_to_piece(vocab, token, place, size, 0, special)
        if n >= 0:
            return buffer[:n].tobytes()
        size = -n


class TokenTable:
    """Token embeddings of a model. The file stays mapped; only the requested rows are read."""

    def __init__(self, file: GgufFile) -> None:
        """EngineError where the file has no token table."""
        tensor = file.tensors.get("token_embd.weight")
        if tensor is None:
            raise EngineError(f"{file.path.name} has no token table, so it takes no text")
        self.n_embd, self.n_tokens = tensor.shape
        self._type = tensor.type.id
        self._rows = np.frombuffer(file.data(tensor.name), np.uint8).reshape(self.n_tokens, -1)
        self._scale = np.float32(math.sqrt(self.n_embd)) if scales_input(file.architecture) else None

    def look_up(self, tokens: Sequence[int] | NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """Write the hidden states of `tokens` [n] to `out` [n, n_embd], with the bits llama.cpp would compute.

        EngineError for ids that are no tokens.
        """
        ids = np.asarray(tokens, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.n_tokens:
            raise EngineError(f"token ids are from 0 to {self.n_tokens - 1}, not {ids.min()} to {ids.max()}")
        ggml.dequantize_rows(self._rows[ids], self._type, out)
        if self._scale is not None:
            out *= self._scale
