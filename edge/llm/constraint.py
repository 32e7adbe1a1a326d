"""What an answer must look like: a JSON schema, a regular expression or a grammar, as tokens that may come next.

llguidance compiles schemas, regular expressions and its own Lark grammars, and refuses what it cannot hold in full.
GBNF grammars are llama.cpp's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edge.bounds.json_arrays import bounded
from edge.errors import SamplingError
from edge.llama import sampling as native
from edge.llama.llama import Model

_TOKENIZERS: WeakKeyDictionary[Model, Any] = WeakKeyDictionary()  # making one takes up to a second
# Between tokens of JSON: what a small model would else fill with spaces without end.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LONGEST_REASON = 300  # characters
_PLAIN = {  # words for what llguidance has a code for
    "NoExtensionBias": "no text can follow it; look for parts that contradict each other, or that match nothing",
    "NoExtension": "no text can follow it; look for parts that contradict each other, or that match nothing",
    "LexerTooComplex": "it is too complex; make it smaller",
    "ParserTooComplex": "it is too complex; make it smaller",
}
Mask = NDArray[np.bool_]  # [n_vocab]: tokens that may come next
_MARK = b"\x02"  # a character that no text has


class Constraint(Protocol):
    """Which tokens may come next. It remembers the tokens it accepted."""

    def allows(self, token: int) -> bool:
        """Whether this token may come next."""

    def masks(self, guesses: Sequence[int]) -> list[Mask | None] | None:
        """What may come next, and then behind each of these tokens, as if it came; None behind one that may not. None
        for all where it takes longer to find than logits on their way."""

    def restrict(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits [n_vocab] with -inf for tokens that may not come next."""

    def accept(self, token: int) -> None:
        """A token came."""

    def close(self) -> None:
        """Free it."""


def constraint_for(
    model: Model, *, grammar: str | None, json_schema: str | None, regex: str | None, lark: str | None
) -> Constraint | None:
    """The constraint of the one that is given; None where none is. SamplingError where it cannot be used."""
    if grammar is not None:
        return GbnfConstraint(model, grammar)
    if json_schema is not None:
        return _of_schema(model, json_schema)
    if regex is not None:
        return GuidanceConstraint(model, _guidance().LLMatcher.grammar_from_regex(regex), "regular expression")
    if lark is not None:
        return GuidanceConstraint(model, _guidance().LLMatcher.grammar_from_lark(lark), "grammar")
    return None


class GbnfConstraint:
    """Only text that the rule `root` of a GBNF grammar derives."""

    def __init__(self, model: Model, gbnf: str) -> None:
        """SamplingError where llama.cpp cannot parse it."""
        self._sampler = native.Sampler.grammar(model, gbnf)
        self._candidates = native.Candidates(model.n_vocab)

    def allows(self, token: int) -> bool:
        """Asking about one token is far cheaper than about all."""
        self._candidates.reset_to(token)
        self._candidates.apply(self._sampler)
        return self._candidates.first_allowed

    def masks(self, guesses: Sequence[int]) -> None:
        """None: llama.cpp takes 37 ms for a mask of 128,256 tokens, and their logits 4 ms over 1 Gbit/s."""

    def restrict(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        self._candidates.reset(logits)
        self._candidates.apply(self._sampler)
        return self._candidates.logits

    def accept(self, token: int) -> None:
        self._sampler.accept(token)

    def close(self) -> None:
        self._sampler.close()


class GuidanceConstraint:
    """What llguidance compiles."""

    def __init__(self, model: Model, grammar: str, kind: str) -> None:
        """kind: what it was made from, for messages. SamplingError where it cannot be compiled."""
        self._matcher = _guidance().LLMatcher(_tokenizer(model), grammar, log_level=0)
        self._kind, self._n_vocab = kind, model.n_vocab
        self._check()

    def allows(self, token: int) -> bool:
        return bool(self._matcher.validate_tokens([token]) == 1)

    def masks(self, guesses: Sequence[int]) -> list[Mask | None]:
        ahead = self._matcher.deep_copy()  # what goes wrong here is told by `restrict`, where it matters
        masks = [self._mask(ahead)]
        for guess in guesses:
            ahead.consume_token(guess)
            masks.append(self._mask(ahead))
        return masks

    def restrict(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        allowed = self._mask(self._matcher)
        self._check()
        if allowed is None or not allowed.any():
            raise SamplingError(f"this {self._kind} leaves no token that could come next")
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def close(self) -> None:
        """Nothing to free."""

    def _mask(self, matcher: Any) -> Mask | None:
        """None where the matcher has an error, or comes to one now."""
        bias = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[: self._n_vocab]
        return None if matcher.is_error() else bias > 0

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = " ".join(str(self._matcher.get_error()).partition("<state>")[0].split())[:_LONGEST_REASON]
            raise SamplingError(f"this {self._kind} cannot be used: {_PLAIN.get(reason, reason)}")


def _of_schema(model: Model, schema: str) -> GuidanceConstraint:
    try:
        values = json.loads(schema)
        if not isinstance(values, dict):
            raise SamplingError("a JSON schema must be a JSON object")
        text = json.dumps(bounded(values)[0])
        grammar = _guidance().LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
    except (ValueError, RecursionError) as error:
        raise SamplingError(f"the JSON schema is not valid JSON: {error}") from error
    return GuidanceConstraint(model, grammar, "JSON schema")


def _guidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise SamplingError(
            "JSON schemas and regular expressions need llguidance, which is not installed: pip install llguidance"
        ) from None
    return llguidance


class _Vocabulary:
    """A vocabulary as llguidance asks for one."""

    def __init__(self, model: Model) -> None:
        self._model = model
        ids = range(model.n_vocab)
        plain = [model.piece(token) for token in ids]
        self.special_token_ids = [token for token in ids if not plain[token] or model.is_end(token)]
        specials = set(self.special_token_ids)
        self.tokens = [model.piece(token, special=True) if token in specials else plain[token] for token in ids]
        self.ends = [token for token in ids if model.is_end(token)]
        self.eos_token_id = self.ends[0] if self.ends else None
        self.bos_token_id = model.special_token("bos")
        self._by_piece = {piece: token for token, piece in enumerate(plain) if piece}
        self._longest = max(map(len, self._by_piece), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of bytes in the middle of a text."""
        # Some vocabularies put a space before a text: here it comes before the mark.
        tokens = self._model.tokenize((_MARK + text).decode(errors="replace"), add_special=False, parse_special=False)
        before = b""
        while tokens and not before.endswith(_MARK):
            before += self.tokens[tokens.pop(0)]
        if b"".join(self.tokens[token] for token in tokens) == text:
            return tokens
        return self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token that fits, again and again; bytes without any are left out."""
        tokens, at = [], 0
        while at < len(text):
            lengths = range(min(self._longest, len(text) - at), 0, -1)
            length = next((n for n in lengths if text[at : at + n] in self._by_piece), 0)
            if length:
                tokens.append(self._by_piece[text[at : at + length]])
            at += length or 1
        return tokens


def _tokenizer(model: Model) -> Any:
    if model not in _TOKENIZERS:
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = _Vocabulary(model)
        if vocabulary.eos_token_id is None:
            raise SamplingError("this model has no token that ends a text, so its answers cannot be constrained")
        _TOKENIZERS[model] = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.ends)
    return _TOKENIZERS[model]
