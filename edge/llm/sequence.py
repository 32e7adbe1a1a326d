"""A session: one sequence in an engine's KV cache, and prompts that reuse what is already there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, ref

import numpy as np
from numpy.typing import NDArray

from edge.errors import ContextFull, EngineError
from edge.llm.engine import Outputs
from edge.llm.interface import TextEngine
from edge.llm.sampler import LogitsRequest
from edge.prefixes.group import group_start
from partition.errors import StateError
from partition.plan.plan import Range

PrefillProgress = Callable[[int, int], None]
"""(tokens done, tokens to do): called before the first chunk of a prompt and after each."""


USED_MEANWHILE = (
    "something else used this model before the answer was complete; take one answer to its end before the next is"
    " asked for, or answer several at once with Model.stream"
)
# The holder of each sequence of an engine's cache: who put there what is there now.
_HOLDERS: WeakKeyDictionary[TextEngine, dict[int, ref[object]]] = WeakKeyDictionary()
# Of engines with steps under way that an answer still waits for: what takes these back.
_AWAITED: WeakKeyDictionary[TextEngine, Callable[[], None]] = WeakKeyDictionary()


def awaits(engine: TextEngine, take_back: Callable[[], None]) -> None:
    """An answer waits for logits. take_back: called before anybody else has the engine compute."""
    _AWAITED[engine] = take_back


def await_none(engine: TextEngine) -> None:
    """Nobody waits for logits."""
    _AWAITED.pop(engine, None)


def _take_back(engine: TextEngine) -> None:
    if engine in _AWAITED:
        _AWAITED[engine]()


def take(engine: TextEngine, sequence: int, holder: object) -> bool:
    """Make `holder` the one whose tokens a sequence holds from now on; whether it was so already."""
    _take_back(engine)
    was = holds(engine, sequence, holder)
    _HOLDERS.setdefault(engine, {})[sequence] = ref(holder)
    return was


def holds(engine: TextEngine, sequence: int, holder: object) -> bool:
    """Whether `holder` was the last to take a sequence."""
    taken = _HOLDERS.get(engine, {}).get(sequence)
    return taken is not None and taken() is holder


class Session:
    """The tokens of one sequence whose keys and values are held; always what the cache really has.

    Several may use one sequence in turns. Each computes its whole prompt where another one had the sequence since.
    """

    def __init__(self, engine: TextEngine, sequence: int = 0) -> None:
        self.engine = engine
        self.sequence = sequence
        # Of whoever samples: which logits it wants behind what is held, and behind each of some guesses.
        self.wanted: Callable[[Sequence[int]], LogitsRequest] = lambda guesses: LogitsRequest()
        self.tokens: list[int] = []
        self.computed = 0  # tokens the last prefill had to compute
        self.restored = 0  # tokens whose keys and values it read from disk
        self.dropped = 0  # tokens that it dropped in place
        self.exact: int | None = None  # tokens before the first that were shifted; None: none were
        self._shifting = False  # the next decode moves keys
        self._kept = 0  # tokens whose keys and values are on disk, or on their way

    def prefill(
        self, prompt: Sequence[int], on_progress: PrefillProgress | None = None, *, in_place: bool = False
    ) -> NDArray[np.float32]:
        """Make the session hold exactly `prompt`; logits [n_vocab] after its last token.

        Only what differs from the tokens held is computed, in chunks as the engine likes them. in_place: where the
        prompt is what is held without a stretch in its middle, the rest is shifted and not computed; that is nearly
        the same, and needs an engine that can. ContextFull where the prompt leaves no room for an answer. After an
        exception the session holds the chunks that were completed.
        """
        room = self.engine.context
        if not prompt:
            raise ContextFull("the prompt is empty: there is nothing to continue")
        if len(prompt) >= room:
            raise ContextFull(
                f"the prompt has {len(prompt)} tokens and the context {room}, which must also hold the answer;"
                f" {_advice(len(prompt), self.engine.shape.context_length)}"
            )
        if not take(self.engine, self.sequence, self):
            self.tokens.clear()
        same = common_prefix(self.tokens, prompt)
        self.dropped = _dropped_stretch(self.tokens, prompt, same, self.engine.states.most_read) if in_place else 0
        if self.dropped:
            self._drop(same, self.dropped)
        self.cut(min(common_prefix(self.tokens, prompt), len(prompt) - 1))  # the last token's logits are needed
        self.restored = self._restore(prompt)
        todo = len(prompt) - len(self.tokens)
        self.computed = todo
        done, size = 0, self.engine.chunk(todo)
        logits = np.empty(0, np.float32)
        if on_progress is not None:
            on_progress(0, todo)
        while done < todo:
            chunk = prompt[len(self.tokens) : len(self.tokens) + size]
            last = done + len(chunk) == todo
            logits = self._decode(chunk, "last" if last else "none")
            done += len(chunk)
            if on_progress is not None:
                on_progress(done, todo)
        return logits

    def step(self, token: int) -> NDArray[np.float32]:
        """Append one token; logits [n_vocab] after it. EngineError where the sequence was taken since the prompt."""
        if not holds(self.engine, self.sequence, self):
            raise EngineError(USED_MEANWHILE)
        return self._decode((token,), "last")

    @property
    def most_rows(self) -> int:
        """Rows that `check` may have now; 1 where they could not be forgotten: recurrent layers hold what all tokens so
        far made, and nothing of each."""
        if self.engine.model.is_recurrent:
            return 1
        return max(1, min(self.engine.outputs, self.engine.batch, self.engine.context - len(self.tokens)))

    def check(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens, at most `most_rows`, in one pass; logits [n, n_vocab] after each. EngineError as `step`."""
        if len(tokens) == 1:
            return self.step(tokens[0])[np.newaxis]
        if not holds(self.engine, self.sequence, self):
            raise EngineError(USED_MEANWHILE)
        return self._decode(tokens, "all")

    def submit(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> None:
        """Begin as `check`, behind what is under way; `collect` returns the logits. guesses: all tokens, up to the last
        of these, that were not chosen yet. EngineError as `step`."""
        if not holds(self.engine, self.sequence, self):
            raise EngineError(USED_MEANWHILE)
        n, start = len(tokens), len(self.tokens)
        everything = np.ones(n, np.int8)
        positions = np.arange(start, start + n)
        top, masks = self._wanted(guesses)
        self.engine.submit(
            tokens, positions, np.full(n, self.sequence), everything, top=top, masks=masks[len(masks) - n :]
        )
        self.tokens.extend(tokens)

    def collect(self) -> NDArray[np.float32]:
        """Logits [n, n_vocab] of the oldest step that was submitted; they hold until the next call of the engine."""
        return self.engine.collect()

    def forget(self, n_tokens: int) -> None:
        """Forget the last tokens, which `check` appended. Where the cache cannot, the rest is computed again."""
        held = self.tokens[: len(self.tokens) - n_tokens]
        self.cut(len(held))
        while len(self.tokens) < len(held):
            start = len(self.tokens)
            self._decode(held[start : start + self.engine.chunk(len(held) - start)], "none")

    def make_room(self, beginning: int) -> int:
        """Drop half of the tokens behind the first `beginning` in place, the oldest, so that `step` can go on: how many
        that are. EngineError as `step`, or where the engine cannot shift."""
        if not holds(self.engine, self.sequence, self):
            raise EngineError(USED_MEANWHILE)
        n_tokens = max(0, len(self.tokens) - beginning) // 2
        if n_tokens:
            self._drop(beginning, n_tokens)
        return n_tokens

    @property
    def full(self) -> bool:
        """Whether no further token fits."""
        return len(self.tokens) >= self.engine.context

    def cut(self, length: int) -> None:
        """Forget all tokens from position `length` on; more where the cache cannot forget only those."""
        # Also when nothing is to be forgotten: a decode that failed may have left rows behind.
        if not self.engine.kv_remove(self.sequence, length, -1):
            self.engine.kv_remove(self.sequence, 0, -1)
            length = 0
        del self.tokens[length:]
        self._kept = min(self._kept, length)
        if self.exact is not None and length <= self.exact:
            self.exact = None

    def keep(self) -> None:
        """Keep what is held on disk, where the engine has such a place, so that a later prompt need not compute it.

        What was shifted has keys and values of a longer history, which computing its tokens would not give: it is not
        kept.
        """
        states = self.engine.states
        exact = len(self.tokens) if self.exact is None else self.exact
        whole, kept = exact // states.block, self._kept // states.block
        if states.keeps and not self._shifting and whole > kept and holds(self.engine, self.sequence, self):
            first = group_start(kept)
            states.keep(self.sequence, first * states.block, states.links(self.tokens[: whole * states.block])[first:])
            self._kept = whole * states.block

    def _restore(self, prompt: Sequence[int]) -> int:
        """Continue what is held with what is kept of this prompt: how many tokens came from there."""
        states = self.engine.states
        held, whole = len(self.tokens), (len(prompt) - 1) // states.block
        if not states.keeps or self.exact is not None or whole <= held // states.block:
            return 0
        first = group_start(held // states.block)
        links = states.links(prompt[: whole * states.block])[first:]
        links = links[: states.kept(links)]
        if (first + len(links)) * states.block <= held:
            return 0
        self.cut(first * states.block)
        if len(self.tokens) < first * states.block:  # all had to be forgotten
            return max(0, self._restore(prompt) - held)
        blocks = states.restore(self.sequence, first * states.block, links)
        self.tokens.extend(prompt[first * states.block : (first + blocks) * states.block])
        self.cut(len(self.tokens))  # some ranks may have had more than others
        self._kept = max(self._kept, len(self.tokens))
        return max(0, len(self.tokens) - held)

    def _drop(self, start: int, n_tokens: int) -> None:
        """Drop tokens from position `start` on; those behind them take their places."""
        tokens, self.tokens = self.tokens, []  # what is interrupted half-way must not be used
        self._shifting = True
        self.engine.kv_remove(self.sequence, start, start + n_tokens)
        self.engine.kv_shift(self.sequence, start + n_tokens, -1, -n_tokens)
        self.tokens = tokens[:start] + tokens[start + n_tokens :]
        self.exact = start if self.exact is None else min(start, self.exact)
        self._kept = min(self._kept, start)

    def _wanted(self, guesses: Sequence[int]) -> LogitsRequest:
        """All logits where they are on this device: masks would be made for nothing."""
        return self.wanted(guesses) if self.engine.logits_cross else LogitsRequest()

    def _decode(self, tokens: Sequence[int], outputs: Outputs) -> NDArray[np.float32]:
        _take_back(self.engine)
        guesses = tokens[1:] if outputs == "all" else ()  # `tokens` of a prompt were not chosen
        top, masks = LogitsRequest() if outputs == "none" else self._wanted(guesses)
        try:
            logits = self.engine.decode(
                tokens, len(self.tokens), sequence=self.sequence, outputs=outputs, top=top, masks=masks
            )
        except BaseException:
            if self._shifting:  # the keys of some layers may have moved, and would move again
                self.tokens.clear()
            raise
        self._shifting = False
        self.tokens.extend(tokens)
        return logits


def _advice(prompt_tokens: int, trained: int) -> str:
    """What to do about a prompt that does not fit. trained: tokens that the model was trained for; 0: not known."""
    if trained and prompt_tokens >= trained:
        return f"use a shorter prompt: the model was trained for {trained} tokens"
    most = f", up to the {trained} that the model was trained for," if trained else ""
    return f"use a larger --context{most} or a shorter prompt"


def _dropped_stretch(held: Sequence[int], prompt: Sequence[int], same: int, least: int) -> int:
    """How many held tokens are to be dropped behind the first `same`, so that most of what follows them continues the
    prompt as it is. 0 where that would be fewer than `least` tokens."""
    matches = _matches(prompt[same:], held[same:])
    most = max(matches, default=0)
    return matches.index(most) if most >= least else 0


def _matches(pattern: Sequence[int], text: Sequence[int]) -> list[int]:
    """How many tokens of `text` from each of its places on are those that `pattern` begins with (the Z algorithm)."""
    n_pattern, joined = len(pattern), [*pattern, -1, *text]
    z, start, end = [0] * len(joined), 0, 0  # joined[start:end] is the match that reaches furthest
    for i in range(1, len(joined)):
        length = min(z[i - start], end - i) if i < end else 0
        while i + length < len(joined) and joined[length] == joined[i + length]:
            length += 1
        z[i] = length
        if i + length > end:
            start, end = i, i + length
    return z[n_pattern + 1 :]


def move(
    session: Session, engine: TextEngine, sequence: int = 0, on_progress: Callable[[int, int], None] | None = None
) -> Session:
    """A session of `engine` that holds what `session` holds, so that nothing is computed again. Both remain usable.

    A block of tokens at a time is in memory. on_progress is called with (tokens moved, tokens to move). Errors leave
    the sequence of `engine` empty: EngineError where there is no room; CannotSlice where keys
    and values of this model cannot be told apart; StateError where some are gone, behind an attention window, or mean
    something else in a context of another length. Whoever moves computes the tokens again then.
    """
    _take_back(session.engine)
    source, n_tokens = session.engine, len(session.tokens)
    if not holds(source, session.sequence, session):
        raise EngineError("something else used the sequence since, so its keys and values are gone; compute them again")
    if n_tokens > engine.context:
        raise EngineError(f"{n_tokens} tokens do not fit in a context of {engine.context}; use a larger --context")
    if source.states.factors != engine.states.factors:
        raise StateError(
            f"contexts of {source.context} and {engine.context} tokens turn this model's positions by other factors;"
            " compute the tokens again"
        )
    moved = Session(engine, sequence)
    take(engine, sequence, moved)
    engine.kv_remove(sequence, 0, -1)
    try:
        for start in range(0, n_tokens, source.states.most_read):
            positions = Range(start, min(start + source.states.most_read, n_tokens))
            engine.states.write(sequence, source.states.read(session.sequence, positions))
            if on_progress is not None:
                on_progress(positions.stop, n_tokens)
    except BaseException:
        engine.kv_remove(sequence, 0, -1)
        raise
    moved.tokens, moved.exact = list(session.tokens), session.exact
    return moved


class GreedyDrafter:
    """What a model goes on with where each token is the likeliest."""

    def __init__(self, engine: TextEngine) -> None:
        """engine: nobody else may use it."""
        self.context, self.n_vocab = engine.context, engine.model.n_vocab
        self._session = Session(engine)
        self._session.wanted = lambda _: LogitsRequest(1)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """`n` tokens behind these, each the likeliest; with 0 the text is only computed. Of a text that begins like the
        last one only the rest is computed. ContextFull where the text is empty, or has no room; the errors of the
        engine."""
        logits = self._session.prefill(tokens)
        found: list[int] = []
        while len(found) < n:
            if found:
                logits = self._session.step(found[-1])
            found.append(int(logits.argmax()))
        return found


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two histories begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
