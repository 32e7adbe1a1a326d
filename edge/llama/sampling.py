"""llama.cpp's samplers and their candidates as Python objects. One of the files with ctypes.

`native_stderr` captures text that native code prints directly to file descriptor 2.
"""

from __future__ import annotations

import ctypes as C
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import SamplingError
from edge.llama.library import llama_cpp as L
from edge.llama.llama import Model

_Candidate = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Candidates:
    """Candidate tokens of a sampler: one row (id, logit, p) per token, reset from the logits for each sampled token."""

    def __init__(self, n_vocab: int) -> None:
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._rows = np.empty(n_vocab, _Candidate)
        self._data = self._rows.ctypes.data_as(L.llama_token_data_p)  # samplers may change the array's pointer
        self._array = L.llama_token_data_array()

    def reset(self, logits: NDArray[np.float32]) -> None:
        """Make all tokens candidates, with these logits [n_vocab]."""
        self._rows["id"], self._rows["logit"], self._rows["p"] = self._ids, logits, 0.0
        self._point_at(len(self._ids))

    def drop_impossible(self) -> None:
        """Remove tokens with a logit of -inf, because typical-p would compute NaN from a probability of 0."""
        possible = self._rows[self._rows["logit"] > -np.inf]
        self._rows[: len(possible)] = possible
        self._point_at(len(possible))

    def reset_to(self, token: int) -> None:
        """Make one token the only candidate, to check it against a grammar."""
        self._rows[0] = (token, 0.0, 0.0)
        self._point_at(1)

    def _point_at(self, n: int) -> None:
        a = self._array
        a.data = self._data
        a.size, a.selected, a.sorted = n, -1, False

    def apply(self, sampler: Sampler) -> None:
        L.llama_sampler_apply(sampler.handle, C.byref(self._array))

    @property
    def selected(self) -> int:
        """Return the id of the chosen token."""
        return int(self._array.data[self._array.selected].id)

    @property
    def logits(self) -> NDArray[np.float32]:
        """Return the logits [n_vocab] after samplers that do not reorder the candidates."""
        return np.array(self._rows["logit"], np.float32)

    @property
    def first_allowed(self) -> bool:
        """Return whether the first candidate still has a finite logit."""
        return bool(np.isfinite(self._array.data[0].logit))


MAX_GRAMMAR_DEPTH = 500


class Sampler:
    """Handle of a llama.cpp sampler or a chain of samplers. It remembers the accepted tokens."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    @classmethod
    def chain(cls, parts: Sequence[tuple[str, tuple[Any, ...]]]) -> Sampler:
        """Return a chain of llama.cpp's samplers, each given as (name, arguments): ("top_k", (40,))."""
        chain = L.llama_sampler_chain_init(L.llama_sampler_chain_default_params())
        for name, arguments in parts:
            if name == "logit_bias":
                n_vocab, *flat = arguments
                biases = [
                    L.llama_logit_bias(int(token), bias) for token, bias in zip(flat[::2], flat[1::2], strict=True)
                ]
                arguments = (n_vocab, len(biases), (L.llama_logit_bias * len(biases))(*biases))
            elif name == "dry":
                *numbers, breakers = arguments
                texts = [breaker.encode(errors="replace") for breaker in breakers]
                arguments = (*numbers, (C.c_char_p * len(texts))(*texts), len(texts))
            L.llama_sampler_chain_add(chain, getattr(L, f"llama_sampler_init_{name}")(*arguments))
        return cls(chain)

    @classmethod
    def grammar(cls, model: Model, gbnf: str) -> Sampler:
        """Return a sampler that allows only text derived from rule `root` of the GBNF grammar.

        Raises SamplingError if the grammar is not valid.
        """
        if _depth(gbnf) > MAX_GRAMMAR_DEPTH:  # llama.cpp's recursive parser would overflow the stack
            raise SamplingError(f"the grammar nests more than {MAX_GRAMMAR_DEPTH} parentheses")
        with native_stderr() as complaints:
            handle = L.llama_sampler_init_grammar(model.vocab, gbnf.encode(), b"root")
        if not handle:
            reason = next((line for line in complaints if line.startswith("parse: ")), "parse: it does not parse")
            raise SamplingError(f"not a valid GBNF grammar with a rule 'root': {reason.removeprefix('parse: ')}")
        return cls(handle)

    def accept(self, token: int) -> None:
        L.llama_sampler_accept(self.handle, token)

    def close(self) -> None:
        if self.handle:
            L.llama_sampler_free(self.handle)
            self.handle = None


def _depth(gbnf: str) -> int:
    return max(itertools.accumulate((c == "(") - (c == ")") for c in gbnf), default=0)


@contextmanager
def native_stderr() -> Iterator[list[str]]:
    """Capture the lines that native code prints inside the block. No other thread may print meanwhile.

    llama.cpp's grammar parser reports errors only there.
    """
    lines: list[str] = []
    with tempfile.TemporaryFile() as sink:
        sys.stderr.flush()
        original = os.dup(2)
        try:
            os.dup2(sink.fileno(), 2)
            yield lines
        finally:
            os.dup2(original, 2)
            os.close(original)
            sink.seek(0)
            lines.extend(sink.read().decode(errors="replace").splitlines())
