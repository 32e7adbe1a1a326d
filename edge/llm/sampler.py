"""From logits to a token: the sampling options people know, through llama.cpp's own samplers."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.errors import SamplingError
from edge.llama import sampling as native
from edge.llama.llama import Model
from edge.llm.constraint import Mask, constraint_for

MAX_SEED = 2**32 - 2  # llama.cpp takes the next number for "any seed"
PENALTY_LAST_N = 64  # tokens that penalties look back
MAX_PENALTY = 100.0
MAX_BIASES = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. The filters apply in this order: biases, penalties, top-k, top-p, min-p,
    temperature. At most one of the last four constrains what the answer looks like.
    """

    temperature: float = 0.7  # 0: always the most likely token
    top_k: int = 40  # keep this many of the most likely tokens; 0: all
    top_p: float = 0.95  # keep the most likely tokens that together have this probability; 1: all
    min_p: float = 0.05  # keep tokens at least this likely relative to the likeliest; 0: all
    repeat_penalty: float = 1.0  # divide the logits of the last PENALTY_LAST_N tokens by this; 1: off
    frequency_penalty: float = 0.0  # taken from the logit of each of those tokens, as often as it is there
    presence_penalty: float = 0.0  # taken once from each of them
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of tokens, by id
    seed: int = field(default_factory=lambda: secrets.randbelow(MAX_SEED + 1))
    grammar: str | None = None  # GBNF; only text its rule `root` derives is generated
    json_schema: str | None = None  # JSON text of a schema; only JSON that fits it is generated
    regex: str | None = None  # only text that this regular expression matches as a whole
    lark: str | None = None  # only text of this grammar, in llguidance's form of Lark

    def __post_init__(self) -> None:
        """SamplingError names the option that is out of its range."""
        ranges = (
            ("temperature", self.temperature, 0, math.inf),
            ("top_k", self.top_k, 0, math.inf),
            ("top_p", self.top_p, 0, 1),
            ("min_p", self.min_p, 0, 1),
            ("seed", self.seed, 0, MAX_SEED),
            ("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
            ("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        )
        for name, value, low, high in ranges:
            if not (low <= value <= high) or value == math.inf:
                needed = f"{low} or more" if high == math.inf else f"from {low} to {high}"
                raise SamplingError(f"{name} must be {needed}, it is {value}")
        if not 0.0 < self.repeat_penalty < math.inf:
            raise SamplingError(f"repeat_penalty must be above 0, it is {self.repeat_penalty}")
        if any(not math.isfinite(bias) for bias in self.logit_bias.values()) or len(self.logit_bias) > MAX_BIASES:
            raise SamplingError(f"logit_bias takes up to {MAX_BIASES} tokens, each with a finite number")
        if sum(given is not None for given in (self.grammar, self.json_schema, self.regex, self.lark)) > 1:
            raise SamplingError("give one of a GBNF grammar, a JSON schema, a regular expression and a Lark grammar")
        if self.grammar is not None and not self.grammar.strip():
            raise SamplingError("the grammar is empty")  # llama.cpp would take it for none


class Wanted(NamedTuple):
    """Which logits suffice for choices."""

    top: int = 0  # the largest of each row; 0: all of them
    masks: Sequence[Mask | None] = ()  # and the largest of what these allow, one for each row; none: no row has one


class TokenSampler:
    """Chooses tokens for one generation; it remembers what it accepted."""

    def __init__(self, model: Model, params: SamplingParams) -> None:
        """SamplingError where the biases, the grammar or the schema cannot be used."""
        if not all(0 <= token < model.n_vocab for token in params.logit_bias):
            raise SamplingError(f"logit_bias names a token that is none: ids are from 0 to {model.n_vocab - 1}")
        self._constraint = constraint_for(
            model, grammar=params.grammar, json_schema=params.json_schema, regex=params.regex, lark=params.lark
        )
        parts = _parts(model, params)
        self._is_greedy = parts[-1] == _GREEDY and not _penalizes(params)
        self._biased = np.array(list(params.logit_bias), np.intp)
        self._biases = np.array(list(params.logit_bias.values()), np.float32)
        self._needs = _needs(params)
        self._candidates = native.Candidates(model.n_vocab)
        self._chain = native.Sampler.chain(parts)

    def wanted(self, guesses: Sequence[int] = ()) -> Wanted:
        """What suffices for the next choice, and for those behind each of these tokens, as if it came."""
        if self._constraint is None or not self._needs:
            return Wanted(self._needs)
        masks = self._constraint.masks(guesses)
        return Wanted() if masks is None else Wanted(self._needs, masks)

    def choose(self, logits: NDArray[np.float32]) -> int:
        """A token id for logits [n_vocab]. Call `accept` with it, or with another, before the next choice."""
        token = self._choice(logits)
        # Asking a constraint about the whole vocabulary is slow, so it is asked about the choice first. What is drawn
        # is the same: a draw that is refused is drawn again from what is allowed.
        if self._constraint is None or self._constraint.allows(token):
            return token
        return self._choice(self._constraint.restrict(logits))

    def _choice(self, logits: NDArray[np.float32]) -> int:
        if self._is_greedy:  # as the chain, in a tenth of its time
            if len(self._biased):
                logits = logits.copy()
                logits[self._biased] += self._biases
            return int(logits.argmax())
        candidates = self._candidates
        candidates.reset(logits)
        candidates.apply(self._chain)
        return candidates.selected

    def accept(self, token: int, *, generated: bool = True) -> None:
        """Take note of a token: of the prompt (for penalties only) or generated."""
        self._chain.accept(token)
        if generated and self._constraint is not None:
            self._constraint.accept(token)

    def close(self) -> None:
        """Free the samplers."""
        self._chain.close()
        if self._constraint is not None:
            self._constraint.close()


def _needs(p: SamplingParams) -> int:
    """How many of the largest logits decide a choice, and with a constraint as many of what it allows; 0: all.

    Top-k comes after penalties alone. Those that lower logits lower at most PENALTY_LAST_N, so that those which are the
    k largest then were among that many more before.
    """
    raises = p.repeat_penalty < 1 or p.frequency_penalty < 0 or p.presence_penalty < 0 or p.logit_bias
    if raises:
        return 0
    largest = 1 if p.temperature == 0 else p.top_k
    return largest + (PENALTY_LAST_N if largest and _penalizes(p) else 0)


def _penalizes(p: SamplingParams) -> bool:
    return p.repeat_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0


_GREEDY: tuple[str, tuple[float, ...]] = ("greedy", ())


def _parts(model: Model, p: SamplingParams) -> list[tuple[str, tuple[float, ...]]]:
    """The chain, as names of llama.cpp's samplers with their arguments."""
    parts: list[tuple[str, tuple[float, ...]]] = []
    if p.logit_bias:
        flat = [value for pair in p.logit_bias.items() for value in pair]
        parts.append(("logit_bias", (model.n_vocab, *flat)))
    if _penalizes(p):
        penalties = (p.repeat_penalty, p.frequency_penalty, p.presence_penalty)
        parts.append(("penalties", (model.n_vocab, PENALTY_LAST_N, *penalties)))
    if p.temperature == 0:
        return [*parts, _GREEDY]
    if p.top_k:
        parts.append(("top_k", (p.top_k,)))
    if p.top_p < 1:
        parts.append(("top_p", (p.top_p, 1)))
    if p.min_p > 0:
        parts.append(("min_p", (p.min_p, 1)))
    return [*parts, ("temp", (p.temperature,)), ("dist", (p.seed,))]
