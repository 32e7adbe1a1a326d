"""Matchers of JSON schemas, regular expressions and grammars. They run in the child process (child.py).

llguidance compiles schemas, regular expressions and its own Lark grammars, and refuses constraints that it cannot
enforce completely. llama.cpp handles GBNF grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from edge.errors import SamplingError
from edge.llama import sampling as native
from edge.llama.llama import Model
from edge.text.constraints.constraint import KINDS, Mask
from edge.text.constraints.schemas import PLACE, Reason, culprit, normal_schema
from edge.text.json_arrays import with_bounds

# JSON has fixed white space, because a small model may fill optional white space with endless spaces.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LONGEST_REASON = 300  # characters
_PLAIN = {  # plain text of llguidance's error codes
    "NoExtensionBias": "no text can follow it; look for parts that contradict each other, or that match nothing",
    "NoExtension": "no text can follow it; look for parts that contradict each other, or that match nothing",
    "LexerTooComplex": "it is too complex; make it smaller",
    "ParserTooComplex": "it is too complex; make it smaller",
}
_LINES = re.compile(r"^ +\d+ \|.*$|^ *\^+$|^at \d+\(\d+\): ", re.MULTILINE)  # lines of the grammar in an error
_AT_LINE = re.compile(r"at (\d+)\(")
_MARK = b"\x02"  # a character that does not occur in texts


class Matcher(Protocol):
    """Computes the allowed next tokens and remembers the accepted tokens."""

    def allows(self, token: int) -> bool:
        """Return True if this token may come next."""

    def mask(self) -> Mask:
        """Return the mask of allowed tokens. Raises SamplingError if it is empty or cannot be computed."""

    def masks(self, draft: Sequence[int]) -> list[Mask | None]:
        """Return masks for the next token, and then after each of these draft tokens.

        The mask after a token that is not allowed is None.
        """

    def accept(self, token: int) -> None:
        """Accept the next token. Raises SamplingError if the constraint cannot be followed after it."""


class GbnfMatcher:
    """Matcher of a GBNF grammar, whose start rule is `root`."""

    def __init__(self, model: Model, gbnf: str) -> None:
        """Raises SamplingError if llama.cpp cannot parse the grammar."""
        self._sampler = native.Sampler.grammar(model, gbnf)
        self._candidates = native.Candidates(model.n_vocab)
        self._zeros = np.zeros(model.n_vocab, np.float32)

    def allows(self, token: int) -> bool:
        """Return True if this token may come next. This is much faster than computing a mask of all tokens."""
        self._candidates.reset_to(token)
        self._candidates.apply(self._sampler)
        return self._candidates.first_allowed

    def mask(self) -> Mask:
        self._candidates.reset(self._zeros)
        self._candidates.apply(self._sampler)
        return _checked(np.isfinite(self._candidates.logits), "grammar")

    def masks(self, draft: Sequence[int]) -> list[Mask | None]:
        raise NotImplementedError("masks ahead of time are not supported for llama.cpp's grammars")

    def accept(self, token: int) -> None:
        self._sampler.accept(token)


class GuidanceMatcher:
    """Matcher of a grammar that llguidance compiles."""

    def __init__(self, tokenizer: Any, n_vocab: int, grammar: str, kind: str, source: str = "") -> None:
        """kind: a key of KINDS.
        source: the original text of the constraint, to locate errors.

        Raises SamplingError if the grammar cannot be compiled.
        """
        self._tokenizer = tokenizer
        self._matcher = _guidance().LLMatcher(tokenizer, grammar, log_level=0)
        self._kind, self._n_vocab = KINDS[kind], n_vocab
        error = str(self._matcher.get_error()) if self._matcher.is_error() else ""
        if error and (place := _place(kind, source, error, self._reason_of)):
            raise SamplingError(f"this {self._kind} cannot be used: {place}")
        self._check()

    def _reason_of(self, schema: Mapping[str, Any]) -> str:
        """Return why a schema cannot be compiled by itself, or "" if it can."""
        compiler = _guidance().LLMatcher
        matcher = compiler(self._tokenizer, compiler.grammar_from_json_schema(json.dumps(schema)), log_level=0)
        return _reason(str(matcher.get_error()).rpartition("error: ")[2]) if matcher.is_error() else ""

    def allows(self, token: int) -> bool:
        return bool(self._matcher.validate_tokens([token]) == 1)

    def mask(self) -> Mask:
        allowed = self._mask(self._matcher)
        self._check()
        return _checked(allowed, self._kind)

    def masks(self, draft: Sequence[int]) -> list[Mask | None]:
        ahead = self._matcher.deep_copy()  # `mask` raises the error later, if it becomes relevant
        masks = [self._mask(ahead)]
        for token in draft:
            ahead.consume_token(token)
            masks.append(self._mask(ahead))
        return masks

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _mask(self, matcher: Any) -> Mask | None:
        """Return the mask, or None if the matcher is in an error state."""
        bias = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[: self._n_vocab]
        return None if matcher.is_error() else bias > 0

    def _check(self) -> None:
        if self._matcher.is_error():
            raise SamplingError(f"this {self._kind} cannot be used: {_reason(str(self._matcher.get_error()))}")


def _reason(error: str) -> str:
    """Return the reason in an error of llguidance, without lines of the grammar."""
    reason = " ".join(_LINES.sub("", error.partition("<state>")[0]).split())[:_LONGEST_REASON]
    return _PLAIN.get(reason, reason)


def _normal(schema: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return normal_schema(schema)
    except SamplingError as error:
        raise SamplingError(f"this JSON schema cannot be used: {error}") from None


def _place(kind: str, source: str, error: str, reason_of: Reason) -> str:
    """Return the place and the reason of an error, or "" if the place is unknown.

    Places are known in schemas, and in grammars whose rules have comments with their places.
    source: JSON of the schema, or the grammar.
    """
    place = ""
    if kind == "lark":
        lines, match = source.split("\n"), _AT_LINE.match(error)
        n_line = int(match[1]) if match else 0
        if not 1 < n_line <= len(lines) or not lines[n_line - 2].startswith(PLACE):
            return ""
        place = lines[n_line - 2].removeprefix(PLACE)
        _, _, source = lines[n_line - 1].partition(": %json ")
    with suppress(ValueError, RecursionError):
        if inner := culprit(json.loads(source), reason_of):
            return inner
    return f"{place}: {_reason(error)}" if place else ""


def _checked(mask: Mask | None, kind: str) -> Mask:
    if mask is None or not mask.any():
        raise SamplingError(f"this {kind} leaves no token that could come next")
    return mask


class Matchers:
    """Factory of matchers for the vocabulary of one model."""

    def __init__(self, model: Model) -> None:
        self._model, self.n_vocab = model, model.n_vocab

    def matcher(self, kind: str, source: str) -> Matcher:
        """Return a matcher. kind: a key of KINDS. Raises SamplingError if the constraint cannot be used."""
        if kind == "grammar":
            return GbnfMatcher(self._model, source)
        compiler = _guidance().LLMatcher
        if kind == "json_schema":
            try:
                values = json.loads(source)
                if not isinstance(values, dict):
                    raise SamplingError("a JSON schema must be a JSON object")
                source = json.dumps(with_bounds(_normal(values)))
                grammar = compiler.grammar_from_json_schema(source, overrides=_JSON_OPTIONS)
            except (ValueError, RecursionError) as error:
                raise SamplingError(f"the JSON schema is not valid JSON: {error}") from error
        elif kind == "regex":
            grammar = compiler.grammar_from_regex(source)
        else:
            grammar = compiler.grammar_from_lark(source)
        return GuidanceMatcher(self.tokenizer, self.n_vocab, grammar, kind, source)

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of llguidance. Its construction takes up to a second. Raises SamplingError if this vocabulary has
        no end token."""
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = _Vocabulary(self._model)
        if vocabulary.eos_token_id is None:
            raise SamplingError("answers of this model cannot be constrained: its vocabulary has no end-of-text token")
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.ends)


def _guidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise SamplingError(
            "JSON schemas and regular expressions need llguidance, which is not installed: pip install llguidance"
        ) from None
    return llguidance


class _Vocabulary:
    """Vocabulary with the interface that llguidance expects."""

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
        """Return the tokens of bytes that occur in the middle of a text."""
        # Some vocabularies put a space before a text. The mark keeps that space away from the bytes.
        tokens = self._model.tokenize((_MARK + text).decode(errors="replace"), add_special=False, parse_special=False)
        before = b""
        while tokens and not before.endswith(_MARK):
            before += self.tokens[tokens.pop(0)]
        if b"".join(self.tokens[token] for token in tokens) == text:
            return tokens
        return self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        """Tokenize greedily: repeat the longest token that fits. Bytes without a token are left out."""
        tokens, at = [], 0
        while at < len(text):
            lengths = range(min(self._longest, len(text) - at), 0, -1)
            length = next((n for n in lengths if text[at : at + n] in self._by_piece), 0)
            if length:
                tokens.append(self._by_piece[text[at : at + length]])
            at += length or 1
        return tokens
