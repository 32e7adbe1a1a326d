"""Interfaces of engines, on one device or on several, for the scheduler and benchmarks; and the interface of drafters.

The implementing classes document the methods. `decode` is implemented here, because it is the same for all engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.errors import ContextFull, EdgeError, EngineError
from edge.llama.llama import Model
from edge.llama.predicting import HiddenListener
from edge.llm.states import CacheUse
from edge.text.constraints.constraint import Mask
from edge.weights.adapter import Scales
from edge.weights.adapter_file import CheckedAdapter
from edge.weights.gpu_layers import GpuLayers
from edge.weights.memory import MemoryNeed
from edge.weights.paged_weights import PagedWeights
from partition.model.file import ModelFile
from partition.model.model import ModelShape
from partition.plan.plan import Range
from partition.state.sequence import KVBlock

Outputs = Literal["last", "all", "none"]


class SequenceSnapshots(Protocol):
    """Interface of `edge.llm.snapshots.Snapshots` and `edge.parallel.states.SpreadSnapshots`."""

    def make(self, sequence: int, block_hash: bytes) -> None: ...
    def has(self, block_hash: bytes) -> bool: ...
    def set_back(self, sequence: int, length: int, block_hash: bytes) -> bool: ...


class SequenceStates(Protocol):
    """Interface of `edge.llm.states.States` and `edge.parallel.states.SpreadStates`: KV cache of sequences in
    blocks.
    """

    use: CacheUse
    prefiller: Any  # the prefill placement, a `PrefillPlacement`; None: this engine prefills
    block: int  # tokens per block
    most_read: int  # largest number of tokens read at a time
    factors: str  # kind of the RoPE factors: "short" or "long"; "" if the model has only one kind

    @property
    def snapshots(self) -> SequenceSnapshots | None: ...  # None: `kv_remove` can remove any tokens at the end
    @property
    def keeps(self) -> bool: ...
    @property
    def problem(self) -> str | None: ...
    @property
    def is_writing(self) -> bool: ...
    def describe(self) -> str: ...
    def read(self, sequence: int, positions: Range) -> KVBlock: ...
    def begin_read(self, sequence: int, positions: Range) -> Callable[[], list[KVBlock]]: ...
    def write(self, sequence: int, block: KVBlock) -> None: ...
    def block_hashes(self, tokens: Sequence[int], namespace: str = "") -> list[bytes]: ...
    def keep(self, sequence: int, start: int, hashes: Sequence[bytes]) -> None: ...
    def n_cached(self, hashes: Sequence[bytes]) -> int: ...
    def restore(self, sequence: int, start: int, hashes: Sequence[bytes]) -> int: ...


class TextEngine(Protocol):
    """Interface of `edge.llm.engine.Engine` and `edge.parallel.engine.DistributedEngine`."""

    path: Path  # path of the model file
    file: ModelFile
    shape: ModelShape
    model: Model  # vocabulary of the model
    context: int  # size of the context in tokens
    batch: int  # maximum number of rows of one decode
    outputs: int  # maximum number of rows of one decode that yield logits
    sequences: int  # number of independent sequences, whose ids start at 0
    attention_window: int | None  # same as `EngineOptions.attention_window`
    threads: int  # number of threads on this device
    gpu_layers: GpuLayers | None  # GPU layers of this device's part of the model; None without a GPU
    memory: MemoryNeed  # memory need on this device
    paging: PagedWeights | None  # weights on this device under a memory budget; None without a budget
    stages: int  # number of pipeline stages, which is how many decodes can run at the same time

    @property
    def microbatches(self) -> int: ...  # number of microbatches: from the plan, or one for each stage

    @property
    def listener(self) -> HiddenListener | None: ...  # listener to hidden states, or None
    @property
    def adapters(self) -> Sequence[CheckedAdapter]: ...  # adapters that the model was loaded with
    @property
    def states(self) -> SequenceStates: ...
    @property
    def logits_cross(self) -> bool: ...  # True if logits come from other devices, so that few should be requested
    @property
    def failed(self) -> Exception | None: ...  # error after which the engine cannot compute; None if it works
    @property
    def uncollected(self) -> int: ...
    @property
    def rollback(self) -> int | None: ...
    @property
    def can_shift(self) -> bool: ...
    @property
    def media_problem(self) -> str: ...  # reason why prompts may not contain media; "" if they may
    def decode(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        start: int,
        *,
        sequence: int = 0,
        outputs: Outputs = "last",
        top: int = 0,
        masks: Sequence[Mask | None] = (),
        adapters: Scales | None = None,
    ) -> NDArray[np.float32]: ...
    def submit(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        positions: NDArray[np.int_],
        sequences: NDArray[np.int_],
        outputs: NDArray[np.int8],
        *,
        top: int = 0,
        masks: Sequence[Mask | None] = (),
        adapters: Scales | None = None,
    ) -> None: ...
    def collect(self) -> NDArray[np.float32]: ...
    def chunk(self, n: int) -> int: ...
    def stop(self) -> None: ...
    def resume(self) -> None: ...
    def listen(self, listener: HiddenListener) -> None: ...
    def kv_remove(self, sequence: int, start: int, end: int = -1) -> bool: ...
    def kv_copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None: ...
    def kv_shift(self, sequence: int, start: int, end: int, delta: int) -> None: ...
    def kv_clear(self) -> None: ...


class DecodesBySteps:
    """Implementation of `decode` for engines with `submit` and `collect`."""

    def decode(
        self: TextEngine,
        tokens: Sequence[int] | NDArray[np.int32],
        start: int,
        *,
        sequence: int = 0,
        outputs: Outputs = "last",
        top: int = 0,
        masks: Sequence[Mask | None] = (),
        adapters: Scales | None = None,
    ) -> NDArray[np.float32]:
        """Compute tokens at positions start, start + 1, ... of a sequence, and hold their KV cache.

        outputs: "last" returns logits [n_vocab] of the last token, "all" returns [n, n_vocab], "none" an empty array.
            Logits are valid until the next decode.
        top: the caller needs only this many of the largest logits, and as many of the tokens that each row's mask
            allows; others may be -inf.
        adapters: adapter scales; (): no adapter; None: the scales of the options.
        """
        n = len(tokens)
        if not 0 < n <= self.batch:
            raise EngineError(f"a decode takes 1 to {self.batch} tokens, got {n}")
        if start + n > self.context:
            raise ContextFull(f"{start + n} tokens do not fit in the context of {self.context}; use a larger --context")
        if self.uncollected > 0:
            raise EngineError("collect the logits of submitted steps first")
        gives = np.full(n, outputs == "all", np.int8)
        gives[-1] = outputs != "none"
        positions, sequences = np.arange(start, start + n), np.full(n, sequence)
        try:
            self.submit(tokens, positions, sequences, gives, top=top, masks=masks, adapters=adapters)
            rows = self.collect() if outputs != "none" else np.empty((0, 0), np.float32)
        except BaseException:
            with suppress(EdgeError):  # logits submitted before an interrupt must not reach the next decode
                while self.uncollected > 0:
                    self.collect()
            raise
        return rows[0] if outputs == "last" else rows


class RemotePrompt(Protocol):
    """Interface of `edge.parallel.prefiller.RemotePrompt`: a prompt that another placement prefills."""

    def take(self) -> tuple[list[KVBlock], bool]: ...
    def wait(self, timeout_s: float) -> bool: ...
    def release(self) -> None: ...


class VerifyResult(NamedTuple):
    """Result of verifying a draft window of one request."""

    rows: int
    used: int  # rows that yielded a token
    is_first: bool = True  # True if the window began with a chosen token instead of a draft
    is_alone: bool = True  # True if nothing else was in flight
    windows: int = 1  # number of windows intended in flight
    right: int = 0  # accepted drafts after its rows, including the first draft of the next window
    looked_at: int = 0  # accepted drafts, plus the rejected one if any
    cancelled: tuple[int, ...] = ()  # rows of later windows that were cancelled


class Proposer(Protocol):
    """Interface of `GreedyDrafter`, here or on a worker."""

    context: int  # largest number of tokens of a text with its drafts
    n_vocab: int  # size of the vocabulary

    def propose(self, tokens: Sequence[int], n: int) -> list[int]: ...


class Answer(Protocol):
    """Interface of `edge.llm.requests.RequestState`: a request as drafters see it."""

    # History by position, without tokens dropped by context shifts; the last token has not been computed.
    tokens: list[int]

    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def answer(self) -> Sequence[int]: ...
    @property
    def sequence(self) -> int: ...


class Drafter(Protocol):
    """Interface of `edge.speculate.speculation.Speculation`. Drafts influence the speed of responses, never their
    content.
    """

    def begin(self) -> None: ...
    def shape(self, requests: Sequence[Answer], most_rows: int, most_windows: int) -> tuple[int, int]: ...
    def draft(self, request: Answer, first: Sequence[int], rows: int, assumed: Sequence[int] = ()) -> Sequence[int]: ...
    def verified(self, results: Sequence[VerifyResult]) -> None: ...
    def disturbed(self) -> None: ...
    def ended(self, request: Answer) -> None: ...
    def to_json(self) -> dict[str, Any]: ...
    def describe(self) -> str: ...
