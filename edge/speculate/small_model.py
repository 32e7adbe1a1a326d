"""Drafts from a smaller model with the same vocabulary, on this device or on a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge.errors import EngineError
from edge.llm.interface import Proposer
from edge.llm.slot import common_prefix
from edge.speculate.speculation import Drafts
from quant.gguf.file import GgufFile
from quant.gguf.header import GgufArray

_VOCABULARY = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens")


PROBE = 12  # tokens at the end of a text that a trial prefills
ENOUGH = 8  # minimum number of tokens for measuring the prefill speed
_AHEAD = 16  # room for tokens after the text


@dataclass
class DraftPace:
    """Prefill speed and cached tokens of a draft model, shared by all its users."""

    token_s: float = 0.0  # seconds per token in the last measurement; 0: none yet
    cached: list[int] = field(default_factory=list)  # computed tokens in its cache


class ModelDrafts(Drafts):
    """Most likely tokens of a smaller model.

    A trial prefills only the last tokens of a text. The whole text is prefilled if that pays.
    """

    free = False

    def __init__(
        self, proposer: Proposer, pace: DraftPace | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """proposer: a model with the vocabulary of the verifying model.
        pace: speed and cache of that model.
        clock: clock in seconds.
        """
        self._proposer, self._clock = proposer, clock
        self._pace = DraftPace() if pace is None else pace
        self._tokens: list[int] = []
        self._first = 0  # index of the first token that the model sees
        self._cached = self._pace.cached  # cached tokens from there on; a different list once another user has drafted
        self._same = 0  # number of cached tokens that match the text

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new text with a prompt. Nothing is computed before the first draft."""
        self._tokens = list(prompt)
        self._same = common_prefix(self._cached, self._tokens[self._first :])
        self._first = self._first if self._same else 0

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            follows = self._first + self._same == len(self._tokens)
            if follows and self._cached[self._same : self._same + 1] == [token]:  # this token was drafted
                self._same += 1
            self._tokens.append(token)

    @property
    def behind_s(self) -> float:
        """Seconds that a trial would spend on prefill, or 0 before the first trial."""
        return self._pace.token_s * self._behind(self._cheapest())

    def catch_up(self, pays: Callable[[float], bool]) -> float:
        """Prefill the whole text if its seconds pay, or else only the end of the text. Return the seconds that this
        took."""
        whole = self._oldest(len(self._tokens) + self._ahead)
        first = whole if pays(self._pace.token_s * self._behind(whole)) else self._cheapest()
        n_tokens = self._behind(first) - 1  # the last token is computed with the draft
        self._first, self._same = first, len(self._tokens) - first - n_tokens - 1
        if n_tokens < 1:
            return 0.0
        began = self._clock()
        self._proposer.propose(self._tokens[first:-1], 0)
        seconds = self._clock() - began
        if n_tokens >= ENOUGH or not self._pace.token_s:
            self._pace.token_s = seconds / n_tokens
        self._hold(self._tokens[first:-1])
        return seconds

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        """Return the `n` most likely tokens after the text and `assumed`.

        Return fewer tokens if the context is too small or the drafting device is lost.
        """
        n = min(n, self._proposer.context // 2)
        if n < 1 or not (self._tokens or assumed):
            return []
        first = max(self._first, self._oldest(len(self._tokens) + len(assumed) + n))
        text = [*self._tokens, *assumed][first:]
        drafted = self._proposer.propose(text, n)
        self._first = min(first, len(self._tokens))
        self._hold([*text, *drafted[:-1]] if drafted and first == self._first else [])
        return drafted

    def _hold(self, tokens: list[int]) -> None:
        self._cached = self._pace.cached = tokens
        self._same = common_prefix(tokens, self._tokens[self._first :])

    def _behind(self, first: int) -> int:
        """Return the number of tokens from `first` on that are not computed."""
        same = self._same if first == self._first and self._cached is self._pace.cached else 0
        return len(self._tokens) - first - same

    def _cheapest(self) -> int:
        """Return the index of the first token that a trial sees."""
        oldest, last = self._oldest(len(self._tokens) + self._ahead), len(self._tokens) - PROBE
        return min(max(oldest, self._first), max(oldest, last), key=self._behind)

    @property
    def _ahead(self) -> int:
        return min(_AHEAD, self._proposer.context // 2)

    def _oldest(self, n_tokens: int) -> int:
        """Return the index of the first token that fits the context, if the text had `n_tokens` tokens.

        A long text loses half a context at a time, so that the rest is rarely recomputed.
        """
        context = self._proposer.context
        half = (context + 1) // 2
        beyond = n_tokens - context
        return half * (-(-beyond // half)) if beyond > 0 else 0


def check_vocabulary(target: GgufFile, draft: GgufFile) -> None:
    """Raise EngineError with the first difference unless both models have the same tokens."""
    for key in _VOCABULARY:
        ours, theirs = (_plain(file.metadata.get(key)) for file in (target, draft))
        if ours != theirs:
            raise EngineError(
                f"{draft.path.name} cannot draft for {target.path.name}, because its tokens differ:"
                f" {_difference(key, ours, theirs)}; use a smaller model of the same family, or --draft ngram"
            )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, GgufArray) else value


def _difference(key: str, ours: Any, theirs: Any) -> str:
    if not (isinstance(ours, tuple) and isinstance(theirs, tuple)):
        return f"{key} is {theirs!r:.60} there and {ours!r:.60} here"
    if len(ours) != len(theirs):
        return f"it has {len(theirs)}, and {len(ours)} are needed"
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return f"token {at} is {theirs[at]!r:.60} there and {ours[at]!r:.60} here"
