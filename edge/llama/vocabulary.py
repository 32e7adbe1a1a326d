"""Tokenizing, detokenizing, and token embeddings from a model file."""

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
    """Vocabulary of an open model."""

    vocab = cached_property(library.no_vocabulary)  # for a closed model; an open model replaces this attribute
    pre_tokenizer = ""  # name of the pre-tokenizer, from `tokenizer.ggml.pre`
    _bytes = cached_property(lambda self: lru_cache(1 << 13)(partial(_token_bytes, self.vocab)))

    def forget_vocabulary(self) -> None:
        """Make all later calls raise EngineError, because the model is closed."""
        for name in ("vocab", "_bytes"):
            vars(self).pop(name, None)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of `text`.

        add_special: add the tokens that the vocabulary wants around a text, such as BOS.
        Raises ContextFull if the text has a word that is too long for llama.cpp.
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
        """Return the bytes of a token, possibly a part of a UTF-8 character. Control tokens are empty unless
        `special`."""
        return self._bytes(token, special)

    def is_end(self, token: int) -> bool:
        """Return whether the token ends a generation (end of text, turn or message)."""
        return bool(L.llama_vocab_is_eog(self.vocab, token))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Return the tokens that end a generation."""
        return tuple(token for token in range(L.llama_vocab_n_tokens(self.vocab)) if self.is_end(token))

    def is_control(self, token: int) -> bool:
        """Return whether text becomes this token only if special tokens are parsed."""
        return bool(L.llama_vocab_is_control(self.vocab, token))

    def special_token(self, name: str) -> int | None:
        """Return the id of "bos", "eos", "eot", "fim_pre" or another of llama.cpp's names, or None if there is no
        such token."""
        token = getattr(L, f"llama_vocab_{name}")(self.vocab)
        return None if token < 0 else int(token)

    def added(self, name: str) -> list[int]:
        """Return the "bos", "eos" or "sep" token that the vocabulary adds around texts; empty if it adds none."""
        token = self.special_token(name)
        is_added = getattr(L, f"llama_vocab_get_add_{name}")(self.vocab)
        return [token] if is_added and token is not None else []


def _token_bytes(vocab: Any, token: int, special: bool) -> bytes:
    """Return the bytes of a token, as `Vocabulary.piece` does."""
    size = 64
    while True:
        buffer = np.empty(size, np.uint8)
        place = buffer.ctypes.data_as(L.llama_token_to_piece.argtypes[2])
        n = L.llama_token_to_piece(vocab, token, place, size, 0, special)
        if n >= 0:
            return buffer[:n].tobytes()
        size = -n


class TokenTable:
    """Token embeddings of a model. The file stays memory-mapped, and only requested rows are read."""

    def __init__(self, file: GgufFile) -> None:
        """Raises EngineError if the file has no token table."""
        tensor = file.tensors.get("token_embd.weight")
        if tensor is None:
            raise EngineError(f"{file.path.name} has no token table, so it takes no text")
        self.n_embd, self.n_tokens = tensor.shape
        self._type = tensor.type.id
        self._rows = np.frombuffer(file.data(tensor.name), np.uint8).reshape(self.n_tokens, -1)
        self._scale = np.float32(math.sqrt(self.n_embd)) if scales_input(file.architecture) else None

    def look_up(self, tokens: Sequence[int] | NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """Write the input embeddings of `tokens` [n] to `out` [n, n_embd], bit-identical to llama.cpp's.

        Raises EngineError for ids outside the vocabulary.
        """
        ids = np.asarray(tokens, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.n_tokens:
            raise EngineError(f"token ids are from 0 to {self.n_tokens - 1}, not {ids.min()} to {ids.max()}")
        ggml.dequantize_rows(self._rows[ids], self._type, out)
        if self._scale is not None:
            out *= self._scale
