"""A session: one sequence in an engine's KV cache, and prompts that reuse what is already there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, ref

import numpy as np
from numpy.typing import NDArray

from edge.errors import ContextFull, EngineError
from edge.llm.engine import Outputs
from edge.llm.interface import TextEngine

PrefillProgress = Callable[[int, int], None]
"""(tokens done, tokens to do): called before the first chunk of a prompt and after each."""


USED_MEANWHILE = (
    "something else used this model before the answer was complete; take one answer to its end before the next is"
    " asked for, or answer several at once with Model.stream"
)
# The holder of each sequence of an engine's cache: who put there what is there now.
_HOLDERS: WeakKeyDictionary[TextEngine, dict[int, ref[object]]] = WeakKeyDictionary()


def take(engine: TextEngine, sequence: int, holder: object) -> bool:
    """Make `holder` the one whose tokens a sequence holds from now on; whether it was so already."""
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
        self.top = 0  # how many of the largest logits whoever samples needs; 0: all
        self.tokens: list[int] = []
        self.computed = 0  # tokens the last prefill had to compute

    def prefill(self, prompt: Sequence[int], on_progress: PrefillProgress | None = None) -> NDArray[np.float32]:
        """Make the session hold exactly `prompt`; logits [n_vocab] after its last token.

        Only what differs from the tokens held is computed, in chunks as the engine likes them. ContextFull where the
        prompt leaves no room for an answer. After an exception the session holds the chunks that were completed.
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
        self.cut(min(_common_prefix(self.tokens, prompt), len(prompt) - 1))  # the last token's logits are needed
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

    def _decode(self, tokens: Sequence[int], outputs: Outputs) -> NDArray[np.float32]:
        logits = self.engine.decode(tokens, len(self.tokens), sequence=self.sequence, outputs=outputs, top=self.top)
        self.tokens.extend(tokens)
        return logits


def _advice(prompt_tokens: int, trained: int) -> str:
    """What to do about a prompt that does not fit. trained: tokens that the model was trained for; 0: not known."""
    if trained and prompt_tokens >= trained:
        return f"use a shorter prompt: the model was trained for {trained} tokens"
    most = f", up to the {trained} that the model was trained for," if trained else ""
    return f"use a larger --context{most} or a shorter prompt"


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
