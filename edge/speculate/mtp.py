"""Multi-token prediction (MTP): draft with a layer of the model itself that was trained for that.

This layer follows the last one. From a token and the hidden state before it, the layer computes the next hidden state
and the logits of the next token. These two are its next input. The layer has its own keys and values:

  position               p - 1      p       p + 1    p + 2
  token                  sat        on      the      mat          on: sampled; the rest: drafts
  input hidden state     h(p - 2)   h(p - 1)  d(p)     d(p + 1)     h: from the model; d: from the layer

Accepted drafts are computed again with the model's hidden states. (DeepSeek-V3 Technical Report, 2024, 2.2.)

The layer is loaded separately from the model, with the token table and the head. So the first device drafts wherever
the model computes, and token ids stay on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devices.probe import available_memory
from edge.closing import Closing
from edge.errors import EngineError, NotEnoughMemory
from edge.llama import llama
from edge.llama.address_space import AddressSpace
from edge.llama.buffers import CallerBuffer
from edge.llama.predicting import HiddenRows, check_library
from edge.llm.interface import Answer, TextEngine
from edge.speculate.choice import MOST_ROWS
from edge.speculate.hidden_states import MOST_TOKENS, HiddenStates, Tokens
from edge.speculate.small_model import ENOUGH, PROBE, DraftPace
from edge.speculate.speculation import FEW, Drafts
from edge.tasks import SILENT, Steps
from edge.weights import memory
from edge.weights.load import load_stub
from partition.architectures.table import ASSERTED
from partition.model.file import ModelFile
from partition.model.predictors import predictor_tensors, why_no_predictor
from partition.predict.drafts import ACCEPTANCE, MTP
from quant.text import bytes_text
from quant.types import cache_type

_BATCH = 128  # rows of one decode
_AHEAD = 256  # room for tokens after a text: enough for the windows of a few stages
_ALIGNMENT = 64  # bytes


def check_mtp(file: ModelFile) -> None:
    """Raise EngineError if this file or the llama.cpp in use lacks a layer for drafting."""
    if reason := why_no_predictor(file):
        raise EngineError(f"{file.path.name} cannot draft by its own layers: {reason}; use --draft ngram")
    check_library()


def mtp_bytes(file: ModelFile, sequences: int) -> int:
    """Return the additional bytes for drafting: weights, keys and values, buffers, hidden states."""
    sizes = _sizes(sequences)
    _, lines = memory.dry_run(file.path, sizes)
    weights = sum(_aligned(tensor.n_bytes) for tensor in predictor_tensors(file))
    return weights + sum(memory.context_parts(lines).values()) + HiddenStates.most_bytes(file.shape.n_embd, sequences)


def _sizes(sequences: int) -> llama.ContextSizes:
    own = min(FEW, sequences)
    return llama.ContextSizes(own * (MOST_TOKENS + _AHEAD), cache_type("f16"), _BATCH, own, predicts=True)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass
class _Chain:
    """Drafts after a text whose keys and values are computed."""

    end: int  # position of the end of the text
    tokens: list[int]  # computed tokens after the text
    next_token: int  # the layer's prediction after these tokens
    state: NDArray[np.float32]  # the layer's hidden state of the last of these tokens


class Predictor(Closing):
    """Loaded first MTP layer of a model, with its own keys and values of FEW sequences."""

    def __init__(self, file: ModelFile, sequences: int, threads: int, steps: Steps = SILENT) -> None:
        """sequences: number of the model's sequences.

        Raises the errors of `check_mtp` and `load_stub`, NotEnoughMemory, or OSError if the file cannot be read.
        """
        check_mtp(file)
        need, available = mtp_bytes(file, sequences), available_memory()
        if need > available:
            raise NotEnoughMemory(
                f"drafting by layers of {file.path.name} needs {bytes_text(need)}, {bytes_text(available)} are"
                " available; free memory, or use --draft ngram"
            )
        n_embd = file.shape.n_embd
        self.hidden = HiddenStates(n_embd)
        # by sequence: its first position, and the tokens from there on
        self._computed: dict[int, tuple[int, Tokens]] = {}
        self._chains: dict[int, _Chain] = {}  # by sequence
        # by sequence of the model: the predictor's sequence, in the order of last use
        self._places: dict[int, int] = {}
        sizes = _sizes(sequences)
        self._free = list(range(sizes.sequences))
        with ExitStack() as stack:
            model, own = load_stub(file, predictors=True)
            stack.callback(own.close)
            stack.callback(model.close)
            stack.callback(_load(file, own, steps).close)
            self._context = llama.Context(model, sizes, threads=threads)
            stack.callback(self._context.close)
            row = ASSERTED[file.architecture].predictors
            self._states = HiddenRows(self._context)
            self._states.give(only_outputs=row is not None and row.cuts)
            self._rows, self._row = llama.Batch(_BATCH, n_embd, both=True), 0
            self._closing = stack.pop_all()

    def close(self) -> None:
        """Free the layer and its memory."""
        self._closing.close()

    def behind(self, sequence: int, text: Tokens, start: int, *, whole: bool) -> int:
        """Return the number of tokens that `take_in` would compute. For the text see `HiddenStates.behind`."""
        return max(0, start + len(text) - 1 - self._first(sequence, text, start, whole))

    def take_in(self, sequence: int, text: Tokens, start: int, *, whole: bool) -> None:
        """Compute a text up to its second last token, as far as hidden states are known.

        If not `whole`, compute only as much of its end as a trial needs.
        """
        self._compute(sequence, text, start, start + len(text) - 1, whole)

    def propose(self, sequence: int, text: Tokens, start: int, n: int, assumed: Sequence[int] = ()) -> list[int]:
        """Return the `n` most likely tokens after a text and `assumed`.

        Return no tokens if the hidden state before the last token is unknown or there is no room.
        """
        end, tokens = start + len(text), list[int]()
        if len(assumed) + n > _AHEAD or not len(self.hidden.behind(sequence, text, start)[1]):
            return tokens
        chain = self._chains.get(sequence)
        if (
            chain is None
            or chain.end != end
            or self._same(sequence, text, start) < end
            or chain.tokens != list(assumed[: len(chain.tokens)])
        ):
            self._compute(sequence, text, start, end)
            chain = self._chains[sequence] = _Chain(end, [], *self._outcome())
        while True:
            number = len(chain.tokens)
            if number >= len(assumed):
                tokens.append(chain.next_token)
                if len(tokens) == n:
                    return tokens
            token = assumed[number] if number < len(assumed) else chain.next_token
            self._decode(sequence, np.array([token], np.int32), end + number, chain.state[None], gives=True)
            chain.tokens.append(int(token))
            chain.next_token, chain.state = self._outcome()

    def _same(self, sequence: int, text: Tokens, start: int) -> int:
        """Return the first position at which the computed tokens of a sequence do not match this text."""
        first, tokens = self._computed.get(sequence, (start, text[:0]))
        own = tokens[max(0, start - first) :]
        n = min(len(own), start + len(text) - max(start, first))
        if n <= 0:  # a shorter text that ends before the computed tokens, or another part of it
            return start
        other = np.flatnonzero(own[:n] != text[max(0, first - start) :][:n])
        return max(start, first) + (int(other[0]) if len(other) else n)

    def _first(self, sequence: int, text: Tokens, start: int, whole: bool) -> int:
        """Return the first position to compute: after the matching computed tokens if these are long enough to
        continue."""
        last = start + len(text) - 1
        least = self.hidden.behind(sequence, text, start)[0] + 1
        same = min(self._same(sequence, text, start), last)
        first = self._computed[sequence][0] if sequence in self._computed else last
        if whole:
            goes_on = first <= max(least, last - MOST_TOKENS // 2)
        else:
            goes_on = last - same <= MOST_ROWS
        if goes_on and first < same >= least:
            return same
        return least if whole else max(least, last - PROBE)

    def _compute(self, sequence: int, text: Tokens, start: int, end: int, whole: bool = False) -> None:
        """Compute a text up to position `end`. If that is the end of the text, its last token gives logits."""
        known, states = self.hidden.behind(sequence, text, start)
        at = self._first(sequence, text, start, whole)
        if at >= end:
            return
        first, tokens = self._computed.pop(sequence, (at, text[:0]))
        self._chains.pop(sequence, None)
        place = self._place(sequence)
        if not first < at <= first + len(tokens) or not self._context.kv_remove(place, at, -1):
            self._context.kv_remove(place, -1, -1)
            first, tokens = at, text[:0]
        tokens = np.concatenate([tokens[: at - first], text[at - start : end - start]])
        if len(tokens) > MOST_TOKENS:
            drop = min(at - first, len(tokens) - MOST_TOKENS // 2)
            self._context.kv_remove(place, first, first + drop)
            first, tokens = first + drop, tokens[drop:]
        for chunk in range(at, end, _BATCH):
            stop = min(chunk + _BATCH, end)
            own = text[chunk - start : stop - start]
            gives = stop == start + len(text)
            self._decode(sequence, own, chunk, states[chunk - 1 - known : stop - 1 - known], gives=gives)
        self._computed[sequence] = first, tokens

    def _decode(
        self, sequence: int, tokens: Tokens, position: int, states: NDArray[np.float32], *, gives: bool
    ) -> None:
        """Compute tokens from a position on, each with the hidden state before it.

        gives: the last token gives logits.
        """
        rows, n = self._rows, len(tokens)
        rows.tokens[:n], rows.embeddings[:n] = tokens, states
        rows.positions[:n] = range(position, position + n)
        rows.sequences[:n] = self._place(sequence)
        rows.outputs[:n] = 0
        rows.outputs[n - 1] = gives
        self._row = n - 1
        self._context.decode(rows, n)

    def _outcome(self) -> tuple[int, NDArray[np.float32]]:
        """Return the most likely token after the last row, and the hidden state of that row."""
        return int(self._context.logits(self._row).argmax()), self._states.row(self._row).copy()

    def _place(self, sequence: int) -> int:
        """Return the predictor's sequence for a sequence of the model. If all are in use, replace the least recently
        used."""
        if sequence not in self._places and not self._free:
            oldest = next(iter(self._places))
            self._computed.pop(oldest, None)
            self._chains.pop(oldest, None)
            self._free.append(self._places.pop(oldest))
        place = self._places.pop(sequence) if sequence in self._places else self._free.pop()
        self._places[sequence] = place
        return place


def _load(file: ModelFile, own: CallerBuffer, steps: Steps) -> AddressSpace:
    """Read the MTP weights and point llama.cpp's tensors to them. Raises EngineError or OSError."""
    tensors = predictor_tensors(file)
    n_bytes, at = sum(_aligned(tensor.n_bytes) for tensor in tensors), 0
    space = AddressSpace(n_bytes)
    with steps.step(f"Loading layers of {file.path.name} that draft", n_bytes) as show:
        for tensor in tensors:
            with tensor.path.open("rb") as data, space.view(at, tensor.n_bytes) as target:
                data.seek(tensor.offset)
                if data.readinto(target) != tensor.n_bytes:
                    space.close()
                    raise EngineError(f"{tensor.path.name} ends inside {tensor.name}; get the file again")
            if tensor.name in own.weights:  # llama.cpp leaves out tensors that it does not use
                own.weights[tensor.name].point(space.address + at, repacked=False)
            at += _aligned(tensor.n_bytes)
            show(at)
    return space


class MtpDrafts(Drafts):
    """Most likely tokens of a model's own predictor, for one request.

    A trial prefills only the end of a text. More of the text is prefilled if that pays.
    """

    free = False
    acceptance = ACCEPTANCE[MTP]

    def __init__(self, predictor: Predictor, pace: DraftPace, clock: Callable[[], float] = time.perf_counter) -> None:
        """pace: prefill speed of the predictor. clock: clock in seconds."""
        self._predictor, self._pace, self._clock = predictor, pace, clock
        self._request: Answer | None = None
        self._last = 0  # number of tokens in the last draft

    def attach(self, request: Answer) -> None:
        self._request = request

    @property
    def behind_s(self) -> float:
        """Seconds that a trial would spend on prefill. 0 before the first trial, and if the last draft can be
        continued."""
        n = self._predictor.behind(*self._text(), whole=False)
        return 0.0 if n <= self._last + 1 else self._pace.token_s * n

    def catch_up(self, pays: Callable[[float], bool]) -> float:
        """Prefill the whole text if its seconds pay, or else only the end of the text. Return the seconds that this
        took.

        Tokens that the last pass accepted are computed with the next draft.
        """
        sequence, text, start = self._text()
        n = self._predictor.behind(sequence, text, start, whole=True)
        whole = n > 0 and pays(self._pace.token_s * n)
        n = n if whole else self._predictor.behind(sequence, text, start, whole=False)
        if n <= self._last + 1:
            return 0.0
        began = self._clock()
        self._predictor.take_in(sequence, text, start, whole=whole)
        seconds = self._clock() - began
        if n >= ENOUGH or not self._pace.token_s:
            self._pace.token_s = seconds / n
        return seconds

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        """Return at most `n` most likely tokens after the text and `assumed`."""
        sequence, text, start = self._text()
        self._last = n
        return self._predictor.propose(sequence, text, start, n, assumed) if n > 0 else []

    def _text(self) -> tuple[int, Tokens, int]:
        """Return the request's sequence, its recent tokens, and the position of the first of these."""
        assert self._request is not None
        history = self._request.tokens
        start = max(0, len(history) - MOST_TOKENS)
        return self._request.sequence, np.array(history[start:], np.int32), start


def mtp_drafts(predictor: Predictor, clock: Callable[[], float]) -> Callable[[], Drafts]:
    """Return a function that creates the drafts of a request."""
    pace = DraftPace()
    return lambda: MtpDrafts(predictor, pace, clock)


def open_predictor(engine: TextEngine, steps: Steps = SILENT) -> Predictor:
    """Return the predictor of an engine's model, subscribed to the engine's hidden states.

    Raises the errors of `Predictor` and of `TextEngine.listen`.
    """
    predictor = Predictor(engine.file, engine.sequences, engine.threads, steps)
    try:
        engine.listen(predictor.hidden.add)
    except BaseException:
        predictor.close()
        raise
    return predictor
