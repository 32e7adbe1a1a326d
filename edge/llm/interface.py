"""Interfaces: of an engine, on one device or spread over many, to the scheduler and benchmarks; and of a drafter.

The classes that have them document the methods. `decode` is here: it is the same for all engines.
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
from partition.model.model import ModelShape
from partition.plan.plan import Range
from partition.state.sequence import KVBlock
from quant.gguf.file import GgufFile

Outputs = Literal["last", "all", "none"]


class SequenceSnapshots(Protocol):
    """Interface of `edge.llm.snapshots.Snapshots` and `edge.parallel.states.SpreadSnapshots`."""

    def make(self, sequence: int, block_hash: bytes) -> None: ...
    def has(self, block_hash: bytes) -> bool: ...
    def set_back(self, sequence: int, length: int, block_hash: bytes) -> bool: ...


class SequenceStates(Protocol):
    """Interface of `edge.llm.states.States` and `edge.parallel.states.SpreadStates`: keys and values of sequences."""

    use: CacheUse
    prefiller: Any  # the placement that computes prompts, a `PrefillPlacement`; None: this one
    block: int  # tokens of a block that is kept
    most_read: int  # tokens that can be read at once
    factors: str  # those of the model's that turn positions; "" where it has but one kind

    @property
    def snapshots(self) -> SequenceSnapshots | None: ...  # None: `kv_remove` forgets any tokens at the end
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

    path: Path  # the model's file
    file: GgufFile  # the same, opened: its header and tensors
    shape: ModelShape
    model: Model  # the vocabulary
    context: int  # tokens
    batch: int  # rows one decode may have
    outputs: int  # of these, those that may give logits
    sequences: int  # independent ones; their ids begin at 0
    attention_window: int | None  # as `EngineOptions.attention_window`
    threads: int  # of this device
    gpu_layers: GpuLayers | None  # of this device's part; None without a GPU
    memory: MemoryNeed  # of this device
    paging: PagedWeights | None  # this device's weights under a budget; None without one
    stages: int  # decodes that are under way at once where there are as many microbatches
    listener: HiddenListener | None  # of hidden states

    @property
    def groups(self) -> int: ...  # microbatches that answers form, as its plan says, or one for each stage

    @property
    def adapters(self) -> Sequence[CheckedAdapter]: ...  # that it was loaded with
    @property
    def states(self) -> SequenceStates: ...
    @property
    def logits_cross(self) -> bool: ...  # they come from other devices, so that few should be asked for
    @property
    def failed(self) -> Exception | None: ...  # why it can compute nothing any more; None while it can
    @property
    def uncollected(self) -> int: ...
    @property
    def rollback(self) -> int | None: ...
    @property
    def can_shift(self) -> bool: ...
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
    """`decode` of an engine that has `submit` and `collect`."""

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
        """Compute tokens at positions start, start + 1, ... of a sequence, and keep their keys and values.

        outputs: "last" gives logits [n_vocab] of the last token, "all" [n, n_vocab], "none" an empty array; valid until
        the next decode. top: the caller needs only so many of the largest logits, and as many of what the mask of each
        row with logits allows; others may be -inf. adapters: scales of its adapters, (): without any; None: those that
        the options say.
        """
        n = len(tokens)
        if not 0 < n <= self.batch:
            raise EngineError(f"a decode takes 1 to {self.batch} tokens, {n} were given")
        if start + n > self.context:
            raise ContextFull(f"{start + n} tokens do not fit in the context of {self.context}; use a larger --context")
        if self.uncollected > 0:
            raise EngineError("logits of submitted steps are still to be collected")
        gives = np.full(n, outputs == "all", np.int8)
        gives[-1] = outputs != "none"
        positions, sequences = np.arange(start, start + n), np.full(n, sequence)
        try:
            self.submit(tokens, positions, sequences, gives, top=top, masks=masks, adapters=adapters)
            rows = self.collect() if outputs != "none" else np.empty((0, 0), np.float32)
        except BaseException:
            with suppress(EdgeError):  # what was submitted before an interrupt is not the next decode's
                while self.uncollected > 0:
                    self.collect()
            raise
        return rows[0] if outputs == "last" else rows


class RemotePrompt(Protocol):
    """Interface of `edge.parallel.prefiller.RemotePrompt`: a prompt that another placement computes."""

    def take(self) -> tuple[list[KVBlock], bool]: ...
    def wait(self, timeout_s: float) -> bool: ...
    def release(self) -> None: ...


class VerifyResult(NamedTuple):
    """A window of rows of one request, and what came of it."""

    rows: int
    used: int  # rows that gave a token
    is_first: bool = True  # it began with a token that was chosen before it was submitted, not with a draft
    is_alone: bool = True  # nothing else was in flight
    windows: int = 1  # that were to be in flight
    right: int = 0  # drafts behind its rows, that of the next window among them, that were accepted
    looked_at: int = 0  # those, and the one that was not
    cancelled: tuple[int, ...] = ()  # rows of the windows behind it, of which nothing comes


class Proposer(Protocol):
    """Interface of `GreedyDrafter`, here or on a worker."""

    context: int  # tokens that a text and its drafts may have
    n_vocab: int  # token ids are below it

    def propose(self, tokens: Sequence[int], n: int) -> list[int]: ...


class Answer(Protocol):
    """Interface of `edge.llm.requests.Running`: a request, as far as drafting needs it."""

    tokens: list[int]  # its history, by position, without what context shifts dropped; the last is not computed

    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def answer(self) -> Sequence[int]: ...
    @property
    def sequence(self) -> int: ...


class Drafter(Protocol):
    """Interface of `edge.speculate.speculation.Speculation`. Its drafts decide how fast answers come, never what they
    say."""

    def begin(self) -> None: ...
    def shape(self, requests: Sequence[Answer], most_rows: int, most_windows: int) -> tuple[int, int]: ...
    def draft(self, request: Answer, first: Sequence[int], rows: int, assumed: Sequence[int] = ()) -> Sequence[int]: ...
    def verified(self, results: Sequence[VerifyResult]) -> None: ...
    def disturbed(self) -> None: ...
    def ended(self, request: Answer) -> None: ...
    def to_json(self) -> dict[str, Any]: ...
    def describe(self) -> str: ...
