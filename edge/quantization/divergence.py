"""Divergence of a model's predictions from another's: text cut into chunks, log-probabilities, KL divergence.

Perplexity is defined as in llama.cpp's perplexity tool. A text is cut into chunks of equal length, and each chunk is
computed with an empty cache. If the vocabulary uses BOS, it replaces the first token of a chunk. Only the second half
of a chunk is scored, so that every prediction has at least half a chunk as context.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError, TextError

if TYPE_CHECKING:
    from edge.llama.llama import Model
    from edge.llm.engine import Engine
    from edge.llm.options import EngineOptions

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Tokens = NDArray[np.int32]

CHUNK_TOKENS = 512
MIN_CHUNK_TOKENS = 16

_OUTPUT_BYTES = 64 << 20  # bytes of logits in llama.cpp's output buffer
_MIN_OUTPUTS = 16
_BLOCK_VALUES = 1 << 20  # values computed together: 4 MiB for each float32 array
_BLOCKS_AT_ONCE = 3  # temporary arrays of float64, or twice this number of float32
_FAR = np.float32(-10)


@dataclass(frozen=True)
class Chunks:
    """A text cut into chunks of the same number of tokens. A shorter rest at the end is dropped."""

    tokens: Tokens  # token IDs [chunks, chunk tokens], in the order of the text
    bos: int | None  # BOS, which replaces each chunk's first token in the computation; None: no replacement

    @classmethod
    def cut(cls, model: Model, text: str, size: int = CHUNK_TOKENS, most: int | None = None) -> Chunks:
        """Cut `text` into chunks of `size` tokens of the model's vocabulary.

        most: maximum number of chunks; None: all

        Raises TextError if the text is too short for one chunk, or if `size` is below MIN_CHUNK_TOKENS.
        """
        if size < MIN_CHUNK_TOKENS:
            raise TextError(f"a chunk has {MIN_CHUNK_TOKENS} tokens or more, {size} were requested")
        tokens = np.array(model.tokenize(text, add_special=True, parse_special=False), np.int32)
        count = len(tokens) // size
        if count == 0:
            raise TextError(
                f"a text of at least {size} tokens is needed, this one has {len(tokens)}; use a longer text"
            )
        count = min(count, most or count)
        first = model.tokenize("", add_special=True, parse_special=False)[:1]
        bos = model.special_token("bos")
        return cls(tokens[: count * size].reshape(count, size), bos if first == [bos] else None)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def size(self) -> int:
        """Number of tokens of a chunk."""
        return int(self.tokens.shape[1])

    @property
    def scored(self) -> int:
        """Number of scored predictions of a chunk."""
        return self.size - 1 - self.size // 2

    def inputs(self, i: int) -> Tokens:
        """Return the tokens to compute for chunk `i`: int32 [size]."""
        tokens: Tokens = self.tokens[i].copy()
        if self.bos is not None:
            tokens[0] = self.bos
        return tokens

    def targets(self, i: int) -> Tokens:
        """Return the tokens of chunk `i` whose predictions are scored: int32 [scored]."""
        targets: Tokens = self.tokens[i, self.size // 2 + 1 :]
        return targets

    def same(self, other: Chunks) -> bool:
        """Return whether both have the same tokens, so that their predictions can be compared."""
        return self.bos == other.bos and np.array_equal(self.tokens, other.tokens)


def options_for(options: EngineOptions, chunk_tokens: int, n_vocab: int) -> EngineOptions:
    """Return `options` for an engine that computes chunks of this size.

    The division of a chunk into decode calls depends only on `options` and the vocabulary. All compared models
    therefore use the same division.
    """
    batch = min(options.rows, chunk_tokens)
    outputs = min(batch, max(_MIN_OUTPUTS, _OUTPUT_BYTES // (4 * max(n_vocab, 1))))
    return dataclasses.replace(options, context=chunk_tokens, batch=batch, sequences=1, outputs=outputs)


def log_probabilities(engine: Engine, tokens: Tokens) -> Floats:
    """Return the log-probabilities (nats) of all tokens at one chunk's scored positions: float32 [scored, n_vocab].

    tokens: the chunk's `inputs`

    The engine's cache is cleared first; its context must hold a chunk. Raises EngineError if logits are NaN.
    """
    return np.concatenate(list(blocks_of_log_probabilities(engine, tokens)))


def blocks_of_log_probabilities(engine: Engine, tokens: Tokens) -> Iterator[Floats]:
    """Yield the log-probabilities of a chunk in blocks of rows. One decode call computes each block.

    Raises EngineError if logits are NaN.
    """
    first, end = len(tokens) // 2, len(tokens) - 1
    engine.kv_clear()
    for start in range(0, first, engine.batch):
        stop = min(first, start + engine.batch)
        engine.decode(tokens[start:stop], start, outputs="none")
    step = min(engine.batch, engine.outputs)
    for start in range(first, end, step):
        stop = min(end, start + step)
        block = log_softmax(engine.decode(tokens[start:stop], start, outputs="all"))
        if np.isnan(block[:, 0]).any():
            raise EngineError(f"{engine.path.name} computes logits that are not numbers; its weights are damaged")
        yield block


def results_bytes(options: EngineOptions, n_vocab: int) -> int:
    """Return the bytes of memory that blocks of log-probabilities need in addition to an engine of `options_for`.

    These are the blocks of two models and of the reference, and temporary arrays.
    """
    rows = min(options.outputs or 1, (options.context or 1) // 2)
    return 3 * 4 * n_vocab * rows + _BLOCKS_AT_ONCE * 8 * _BLOCK_VALUES


def log_softmax(logits: Floats) -> Floats:
    """Return log(softmax) of each row [rows, n_vocab].

    Sums are float64. A row with a NaN logit becomes NaN.
    """
    out = np.empty_like(logits)
    with np.errstate(invalid="ignore"):  # infinity minus infinity is invalid
        for rows in _blocks(logits):
            shifted = np.subtract(logits[rows], logits[rows].max(axis=1, keepdims=True), out=out[rows])
            shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return out


def divergence(reference: Floats, other: Floats) -> Doubles:
    """Return KL(reference || other) of each row, in nats: float64 [rows]. Both are log-probabilities [rows, n_vocab].

    The result is the sum over tokens of p (d + exp(-d) - 1) with d = log p - log q. It equals the sum of p d, because p
    and q both sum to 1. In this form no term is negative, and errors of the logarithms, such as rounding, cancel to
    first order. Equal rows give exactly 0. A token that only `other` has at probability 0 gives infinity.
    """
    result = np.empty(len(reference), np.float64)
    for rows in _blocks(reference):
        log_p, log_q = reference[rows], other[rows]
        with np.errstate(invalid="ignore", over="ignore"):  # such values are replaced below
            d = log_p - log_q
            terms = np.expm1(-d)
            terms += d
            p = np.exp(log_p)
            terms *= p
        far = ~(d >= _FAR)  # exp(-d) may be infinite, or d may be NaN
        if far.any():
            p, d = p[far], d[far]
            terms[far] = np.exp(log_q[far]) + np.where(p > 0, p * (np.where(p > 0, d, 0) - 1), 0)
        result[rows] = terms.sum(axis=1, dtype=np.float64)
    return result


@dataclass(frozen=True)
class Summary:
    """Summary of the scored predictions of a model. Divergences are in nats, from a reference."""

    tokens: int  # number of scored tokens
    perplexity: float
    perplexity_error: float  # standard error
    mean_divergence: float
    median_divergence: float
    divergence_99: float  # 99th percentile
    max_divergence: float
    top_1_agreement: float  # fraction of predictions whose most likely token is the reference's


def summarize(nll: Doubles, divergences: Doubles, agree: NDArray[np.bool_]) -> Summary:
    """Summarize all scored predictions. Each array has the shape [tokens].

    nll: -log p of the token in the text
    divergences: divergence from the reference, in nats
    agree: true if model and reference have the same most likely token
    """
    n = len(nll)
    mean = float(nll.mean())
    perplexity = float(np.exp(mean))
    # As in llama.cpp, this is the standard error of the mean, carried through exp to first order.
    error = perplexity * float(nll.std()) / max(n - 1, 1) ** 0.5
    return Summary(
        tokens=n,
        perplexity=perplexity,
        perplexity_error=error,
        mean_divergence=float(divergences.mean()),
        median_divergence=float(np.median(divergences)),
        divergence_99=float(np.percentile(divergences, 99)),
        max_divergence=float(divergences.max()),
        top_1_agreement=float(agree.mean()),
    )


class Scores:
    """Scores of all predictions of one model, compared with predictions of `n_others` other models."""

    def __init__(self, n: int, n_others: int = 1) -> None:
        self._nll = np.full(n, np.nan)
        self._divergence = np.full((n_others, n), np.nan)
        self._agree = np.zeros((n_others, n), np.bool_)

    def add(self, at: int, targets: Tokens, log_p: Floats, *others: Floats) -> None:
        """Add predictions [rows, n_vocab]. The first row has the number `at`.

        others: log-probabilities of each other model; none if the model is compared with itself
        """
        rows = slice(at, at + len(targets))
        self._nll[rows] = -log_p[np.arange(len(targets)), targets]
        if not others:
            self._divergence[:, rows], self._agree[:, rows] = 0, True
        for i, other in enumerate(others):
            self._divergence[i, rows] = divergence(other, log_p)
            self._agree[i, rows] = other.argmax(axis=1) == log_p.argmax(axis=1)

    def summaries(self) -> list[Summary]:
        """Return a summary for each other model. Figures are NaN if a row is missing."""
        return [summarize(self._nll, *scores) for scores in zip(self._divergence, self._agree, strict=True)]


def _blocks(values: Floats) -> list[slice]:
    """Return slices of rows that are computed together. They are short, so that temporary arrays stay small."""
    step = max(1, _BLOCK_VALUES // max(values.shape[1], 1))
    return [slice(start, start + step) for start in range(0, len(values), step)]
