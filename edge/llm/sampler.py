"""From logits to a token: the sampling options people know, through llama.cpp's own samplers."""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge.errors import SamplingError
from edge.llama import sampling as native
from edge.llama.llama import Model

MAX_SEED = 2**32 - 2  # llama.cpp takes the next number for "any seed"
PENALTY_LAST_N = 64  # tokens a repetition penalty looks back


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. The filters apply in this order: penalty, top-k, top-p, min-p, temperature."""

    temperature: float = 0.7  # 0: always the most likely token
    top_k: int = 40  # keep this many of the most likely tokens; 0: all
    top_p: float = 0.95  # keep the most likely tokens that together have this probability; 1: all
    min_p: float = 0.05  # keep tokens at least this likely relative to the likeliest; 0: all
    repeat_penalty: float = 1.0  # divide the logits of the last PENALTY_LAST_N tokens by this; 1: off
    seed: int = field(default_factory=lambda: secrets.randbelow(MAX_SEED + 1))
    grammar: str | None = None  # GBNF; only text its rule `root` derives is generated
    json_schema: str | None = None  # JSON text of a schema; only JSON that fits it is generated

    def __post_init__(self) -> None:
        """SamplingError names the option that is out of its range."""
        ranges = (
            ("temperature", self.temperature, 0, math.inf),
            ("top_k", self.top_k, 0, math.inf),
            ("top_p", self.top_p, 0, 1),
            ("min_p", self.min_p, 0, 1),
            ("seed", self.seed, 0, MAX_SEED),
        )
        for name, value, low, high in ranges:
            if not (low <= value <= high) or value == math.inf:
                needed = f"{low} or more" if high == math.inf else f"from {low} to {high}"
                raise SamplingError(f"{name} must be {needed}, it is {value}")
        if not 0.0 < self.repeat_penalty < math.inf:
            raise SamplingError(f"repeat_penalty must be above 0, it is {self.repeat_penalty}")
        if self.grammar is not None and self.json_schema is not None:
            raise SamplingError("give a grammar or a JSON schema, not both")
        if self.grammar is not None and not self.grammar.strip():
            raise SamplingError("the grammar is empty")  # llama.cpp would take it for none


class TokenSampler:
    """Chooses tokens for one generation; it remembers what it accepted."""

    def __init__(self, model: Model, params: SamplingParams) -> None:
        """SamplingError where the grammar or schema cannot be used."""
        grammar = schema_to_gbnf(params.json_schema) if params.json_schema is not None else params.grammar
        self._grammar = native.Sampler.grammar(model, grammar) if grammar is not None else None
        self._plain_greedy = params.temperature == 0 and params.repeat_penalty == 1 and grammar is None
        self.needs = _needs(params)  # how many of the largest logits suffice for a choice; 0: all
        self._candidates = native.Candidates(model.n_vocab)
        self._chain = native.Sampler.chain(_parts(model, params))

    def choose(self, logits: NDArray[np.float32]) -> int:
        """A token id for logits [n_vocab]. Call `accept` with it, or with another, before the next choice."""
        if self._plain_greedy:
            return int(logits.argmax())
        candidates = self._candidates
        candidates.reset(logits)
        candidates.apply(self._chain)
        token = candidates.selected
        if self._grammar is None:
            return token
        # Asking a grammar about the whole vocabulary is slow, so it is asked about the choice first.
        candidates.reset_to(token)
        candidates.apply(self._grammar)
        if candidates.first_allowed:
            return token
        candidates.reset(logits)
        candidates.apply(self._grammar)
        candidates.apply(self._chain)
        return candidates.selected

    def accept(self, token: int, *, generated: bool = True) -> None:
        """Take note of a token: of the prompt (for the penalty only) or generated."""
        self._chain.accept(token)
        if generated and self._grammar is not None:
            self._grammar.accept(token)

    def close(self) -> None:
        """Free the samplers."""
        self._chain.close()
        if self._grammar is not None:
            self._grammar.close()


def schema_to_gbnf(schema: str) -> str:
    """The GBNF grammar of a JSON schema, given as JSON text. SamplingError where it is not one, or not supported."""
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        if not isinstance(json.loads(schema), dict):
            raise SamplingError("a JSON schema must be a JSON object")
    except (ValueError, RecursionError) as error:
        raise SamplingError(f"the JSON schema is not valid JSON: {error}") from error
    try:
        return str(json_schema_to_gbnf(schema))
    except Exception as error:  # the converter asserts, indexes and raises as it finds things
        raise SamplingError(f"this JSON schema cannot be turned into a grammar: {error}") from error


def _needs(p: SamplingParams) -> int:
    """How many of the largest logits decide the choice; 0 where it takes all.

    Top-k comes after the penalty alone. A penalty above 1 lowers at most PENALTY_LAST_N logits, so that those which are
    the k largest then were among that many more before.
    """
    if p.grammar is not None or p.json_schema is not None or p.repeat_penalty < 1:
        return 0
    largest = 1 if p.temperature == 0 else p.top_k
    return largest + (PENALTY_LAST_N if largest and p.repeat_penalty > 1 else 0)


def _parts(model: Model, p: SamplingParams) -> list[tuple[str, tuple[float, ...]]]:
    """The chain, as names of llama.cpp's samplers with their arguments."""
    parts: list[tuple[str, tuple[float, ...]]] = []
    if p.repeat_penalty != 1:
        parts.append(("penalties", (model.n_vocab, PENALTY_LAST_N, p.repeat_penalty, 0.0, 0.0)))
    if p.temperature == 0:
        return [*parts, ("greedy", ())]
    if p.top_k:
        parts.append(("top_k", (p.top_k,)))
    if p.top_p < 1:
        parts.append(("top_p", (p.top_p, 1)))
    if p.min_p > 0:
        parts.append(("min_p", (p.min_p, 1)))
    return [*parts, ("temp", (p.temperature,)), ("dist", (p.seed,))]
