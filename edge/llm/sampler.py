"""Sampling: choose tokens from logits with llama.cpp's samplers and the usual options."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.arguments import check_fields
from edge.errors import SamplingError
from edge.llama import sampling as native
from edge.llama.llama import Model
from edge.text.constraints.constraint import KINDS, Constraint, Mask, never_given_up

MAX_SEED = 2**32 - 2  # llama.cpp uses the next number for "any seed"
PENALTY_LAST_N = 64  # number of last tokens that penalties count
MAX_DRY_LAST_N = 1 << 17  # largest number of tokens that DRY examines
MAX_DRY_BREAKERS = 64
MAX_DRY_BREAKER = 40  # bytes; llama.cpp truncates longer ones
MAX_PENALTY = 100.0
DRY_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's defaults
MAX_BIASES = 1024
MAX_TOP_K = 2**31 - 1  # limit of llama.cpp's type
MAX_BIAS = 1e6  # larger than any difference of two logits, and small enough to be added to one
MAX_TEMPERATURE = 1e4
MAX_REPEAT_PENALTY = 100.0
MAX_MIN_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling the next token. The samplers are llama.cpp's, in its order: biases, penalties, DRY, top-k,
    typical-p, top-p, min-p, XTC, temperature. At most one of grammar, json_schema, regex and lark constrains the
    answer.
    """

    temperature: float = 0.7  # 0: always the most likely token
    top_k: int = 40  # keep this many of the most likely tokens; 0: all
    top_p: float = 0.95  # keep the most likely tokens that together have this probability; 1: all
    min_p: float = 0.05  # keep tokens at least this likely relative to the likeliest; 0: all
    repeat_penalty: float = 1.0  # divide the logits of the last PENALTY_LAST_N tokens by this; 1: off
    frequency_penalty: float = 0.0  # subtracted from the logits of the last PENALTY_LAST_N tokens for each occurrence
    presence_penalty: float = 0.0  # subtracted once from the logits of the last PENALTY_LAST_N tokens
    typical_p: float = 1.0  # keep the most typical tokens that together have this probability; 1: all
    dry_multiplier: float = 0.0  # DRY: penalty for a token that would prolong a repetition; 0: off
    dry_base: float = 1.75  # the penalty grows by this factor with each token of the repetition
    dry_allowed_length: int = 2  # tokens of a repetition that cost nothing
    dry_penalty_last_n: int = -1  # tokens that DRY examines; -1: all, at most MAX_DRY_LAST_N; 0: off
    dry_sequence_breakers: Sequence[str] = DRY_BREAKERS  # texts that end a repetition
    xtc_probability: float = 0.0  # XTC: probability of removing all likely tokens except the last; 0: off
    xtc_threshold: float = 0.1  # minimum probability of a likely token; above 0.5: off
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of tokens, by id
    seed: int = field(default_factory=lambda: secrets.randbelow(MAX_SEED + 1))
    grammar: str | None = None  # GBNF; only text its rule `root` derives is generated
    json_schema: str | None = None  # JSON text of a schema; only JSON that fits it is generated
    regex: str | None = None  # only text that this regular expression matches as a whole
    lark: str | None = None  # only text of this grammar, in llguidance's form of Lark
    stop: Sequence[str] = ()  # strings that end the answer and are not part of its text
    ignore_eos: bool = False  # ignore the end of text and repetitions; a complete constraint still ends
    min_tokens: int = 0  # minimum tokens, unless a constraint is complete or the context is full
    allow_repetition: bool = False  # do not end an answer that repeats itself (edge.text.repetition)

    def __post_init__(self) -> None:
        """Raise SamplingError, naming the option, if a value is out of range, and TypeError if its type is wrong."""
        check_fields(self)
        ranges = (
            ("temperature", self.temperature, 0, MAX_TEMPERATURE),
            ("top_k", self.top_k, 0, MAX_TOP_K),
            ("top_p", self.top_p, 0, 1),
            ("min_p", self.min_p, 0, 1),
            ("seed", self.seed, 0, MAX_SEED),
            ("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
            ("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
            ("typical_p", self.typical_p, 0, 1),
            ("dry_multiplier", self.dry_multiplier, 0, MAX_PENALTY),
            ("dry_base", self.dry_base, 1, MAX_PENALTY),
            ("dry_allowed_length", self.dry_allowed_length, 0, MAX_DRY_LAST_N),
            ("dry_penalty_last_n", self.dry_penalty_last_n, -1, MAX_DRY_LAST_N),
            ("xtc_probability", self.xtc_probability, 0, 1),
            ("xtc_threshold", self.xtc_threshold, 0, 1),
            ("min_tokens", self.min_tokens, 0, MAX_MIN_TOKENS),
            ("repeat_penalty", self.repeat_penalty, 1 / MAX_REPEAT_PENALTY, MAX_REPEAT_PENALTY),
        )
        for name, value, low, high in ranges:
            if not low <= value <= high:
                raise SamplingError(f"{name} must be from {low} to {high}, got {value}")
        if len(self.dry_sequence_breakers) > MAX_DRY_BREAKERS or not all(map(_is_breaker, self.dry_sequence_breakers)):
            raise SamplingError(
                f"dry_sequence_breakers takes up to {MAX_DRY_BREAKERS} texts, each of 1 to {MAX_DRY_BREAKER} bytes"
            )
        if len(self.logit_bias) > MAX_BIASES:
            raise SamplingError(f"logit_bias takes up to {MAX_BIASES} tokens, got {len(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise SamplingError(f"logit_bias of token {token} must be from {-MAX_BIAS} to {MAX_BIAS}, got {bias}")
        if sum(getattr(self, kind) is not None for kind in KINDS) > 1:
            raise SamplingError(
                "a GBNF grammar, a JSON schema, a regular expression and a Lark grammar exclude each other; use one"
            )
        if self.grammar is not None and not self.grammar.strip():
            raise SamplingError("the grammar is empty")  # llama.cpp would ignore it

    @property
    def looks_back(self) -> int:
        """Number of last tokens that influence the next choice, at least 1."""
        return max(PENALTY_LAST_N, self.dry_last_n)

    @property
    def dry_last_n(self) -> int:
        """Number of tokens that DRY examines; 0 if it is off."""
        if self.dry_multiplier == 0:
            return 0
        return MAX_DRY_LAST_N if self.dry_penalty_last_n == -1 else self.dry_penalty_last_n


def _is_breaker(text: str) -> bool:
    return "\0" not in text and 0 < len(text.encode(errors="replace")) <= MAX_DRY_BREAKER


class LogitsRequest(NamedTuple):
    """Logits that suffice for the choice of tokens."""

    top: int = 0  # number of largest logits of each row; 0: all logits
    masks: Sequence[Mask | None] = ()  # masks of rows: the largest allowed logits are needed, too; empty: no masks


class TokenSampler:
    """Chooses tokens for one generation, and remembers the accepted ones."""

    def __init__(self, model: Model, params: SamplingParams, given_up: Callable[[], bool] = never_given_up) -> None:
        """given_up: returns True if the client has disconnected; called while a constraint is compiled.

        Raises SamplingError if the biases, the grammar or the schema are invalid.
        """
        if not all(0 <= token < model.n_vocab for token in params.logit_bias):
            raise SamplingError(f"logit_bias names an unknown token: ids are from 0 to {model.n_vocab - 1}")
        parts = _parts(model, params)
        self._is_greedy = [part for part in parts if part[0] != "logit_bias"] == [_GREEDY]
        self._has_typical = params.typical_p < 1
        self._biased = np.array(list(params.logit_bias), np.intp)
        self._biases = np.array(list(params.logit_bias.values()), np.float32)
        holds_ends_off = params.ignore_eos or params.min_tokens > 0
        self._ends = np.array(model.ends if holds_ends_off else (), np.intp)
        needs = _needs(params)
        self._needs = needs and needs + len(self._ends)  # an end token may be among the largest
        # The constraint is created before the chain, because its errors would leak the chain.
        constraint = next(((kind, text) for kind in KINDS if (text := getattr(params, kind)) is not None), None)
        self._constraint = Constraint(model, *constraint, given_up) if constraint is not None else None
        self._candidates = native.Candidates(model.n_vocab)
        self._chain = native.Sampler.chain(parts)

    @property
    def is_constrained(self) -> bool:
        """True if a constraint applies."""
        return self._constraint is not None

    def logits_request(self, drafts: Sequence[int] = (), *, constrained: bool = True) -> LogitsRequest:
        """Return the logits needed for the next choice, and for the choices after each of `drafts`.

        constrained: as for `choose`.
        """
        if self._constraint is None or not self._needs or not constrained:
            return LogitsRequest(self._needs)
        masks = self._constraint.masks(drafts)
        return LogitsRequest() if masks is None else LogitsRequest(self._needs, masks)

    def choose(self, logits: NDArray[np.float32], *, constrained: bool = True, may_end: bool = True) -> int:
        """Return a token id for logits [n_vocab]. Call `accept` with the next token, which may be another one, before
        the next choice.

        constrained: False if the constraint does not apply to this token.
        may_end: False: avoid end-of-text tokens, unless the constraint allows nothing else.
        """
        token = self._choice(logits)
        if not may_end and token in self._ends:
            token = self._choice(self._without_ends(logits))
        # Evaluating a constraint for the whole vocabulary is slow, so first only the choice is checked. The
        # distribution is the same: a refused draw is repeated among the allowed tokens.
        if self._constraint is None or not constrained or self._constraint.allows(token):
            return token
        allowed = self._constraint.restrict(logits)
        if not may_end and np.isfinite(others := self._without_ends(allowed)).any():
            allowed = others
        return self._choice(allowed)

    def _without_ends(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits = logits.copy()
        logits[self._ends] = -np.inf
        return logits

    def _choice(self, logits: NDArray[np.float32]) -> int:
        if self._is_greedy:  # same result as the chain in a tenth of its time
            if len(self._biased):
                logits = logits.copy()
                logits[self._biased] += self._biases
            return int(logits.argmax())
        candidates = self._candidates
        candidates.reset(logits)
        if self._has_typical:
            candidates.drop_impossible()
        candidates.apply(self._chain)
        return candidates.selected

    def accept(self, token: int, *, generated: bool = True) -> None:
        """Record a token. generated: False for prompts and thoughts, which the constraint ignores."""
        if not self._is_greedy:
            self._chain.accept(token)
        if generated and self._constraint is not None:
            self._constraint.accept(token)

    def constrain(self, tokens: Sequence[int]) -> None:
        """Advance the constraint over tokens that were accepted without it."""
        for token in tokens:
            if self._constraint is not None:
                self._constraint.accept(token)

    def close(self) -> None:
        """Free the samplers."""
        self._chain.close()
        if self._constraint is not None:
            self._constraint.close()


def _needs(p: SamplingParams) -> int:
    """Return the number of largest logits that decide a choice, and with a constraint as many allowed ones; 0: all.

    Top-k comes directly after penalties. Penalties lower at most PENALTY_LAST_N logits, so the k largest afterwards
    were among the k + PENALTY_LAST_N largest before. DRY may lower any number of logits.
    """
    raises = p.repeat_penalty < 1 or p.frequency_penalty < 0 or p.presence_penalty < 0 or p.logit_bias
    if raises or p.dry_last_n:
        return 0
    largest = 1 if p.temperature == 0 and not _excludes_likeliest(p) else p.top_k
    return largest + (PENALTY_LAST_N if largest and _penalizes(p) else 0)


def _penalizes(p: SamplingParams) -> bool:
    return p.repeat_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0


def _excludes_likeliest(p: SamplingParams) -> bool:
    """Return True if a filter may remove the most likely token. Then filters matter even for greedy choices."""
    return p.typical_p < 1 or (p.xtc_probability > 0 and p.xtc_threshold <= 0.5)


_GREEDY: tuple[str, tuple[Any, ...]] = ("greedy", ())


def _parts(model: Model, p: SamplingParams) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the chain of llama.cpp samplers: their names and arguments."""
    parts: list[tuple[str, tuple[Any, ...]]] = []
    if p.logit_bias:
        flat = [value for pair in p.logit_bias.items() for value in pair]
        parts.append(("logit_bias", (model.n_vocab, *flat)))
    if _penalizes(p):
        penalties = (p.repeat_penalty, p.frequency_penalty, p.presence_penalty)
        parts.append(("penalties", (model.n_vocab, PENALTY_LAST_N, *penalties)))
    if p.dry_last_n:
        dry = (p.dry_multiplier, p.dry_base, p.dry_allowed_length, p.dry_last_n)
        parts.append(("dry", (model.vocab, *dry, tuple(p.dry_sequence_breakers))))
    if p.temperature == 0 and not _excludes_likeliest(p):
        return [*parts, _GREEDY]
    if p.top_k:
        parts.append(("top_k", (p.top_k,)))
    if p.typical_p < 1:
        parts.append(("typical", (p.typical_p, 1)))
    if p.top_p < 1:
        parts.append(("top_p", (p.top_p, 1)))
    if p.min_p > 0:
        parts.append(("min_p", (p.min_p, 1)))
    if p.xtc_probability > 0:
        parts.append(("xtc", (p.xtc_probability, p.xtc_threshold, 1, p.seed)))
    if p.temperature == 0:
        return [*parts, _GREEDY]
    return [*parts, ("temp", (p.temperature,)), ("dist", (p.seed,))]
