"""Interfaces: of an engine, on one device or spread over many, to the scheduler and benchmarks; and of a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.adapters.adapter import Scales
from edge.adapters.file import CheckedAdapter
from edge.constraints.constraint import Mask
from edge.llama.attention_kernel import AttentionKernel
from edge.llama.llama import Model
from edge.llama.predicting import HiddenListener
from edge.llm.engine import Outputs
from edge.llm.states import CacheUse
from edge.paging.gpu_layers import GpuLayers
from edge.paging.memory import MemoryNeed
from edge.paging.weights import PagedWeights
from partition.model.model import ModelShape
from partition.plan.plan import Range
from partition.state.sequence import KVBlock
from quant.gguf.file import GgufFile


class SequenceSnapshots(Protocol):
    """`edge.llm.snapshots.Snapshots` and `edge.parallel.states.SpreadSnapshots`; the former documents the methods."""

    def make(self, sequence: int, block_hash: bytes) -> None:
        """Make a snapshot of a sequence, which ends with this block."""

    def has(self, block_hash: bytes) -> bool:
        """Return whether there is, or may be, a snapshot behind this block."""

    def set_back(self, sequence: int, length: int, block_hash: bytes) -> bool:
        """Set a sequence back to its first tokens, which end with this block; False where there is no snapshot."""


class SequenceStates(Protocol):
    """`edge.llm.states.States` and `edge.parallel.states.SpreadStates`; the former documents the methods."""

    use: CacheUse
    attention: AttentionKernel  # of this device's part
    prefiller: Any  # the placement that computes prompts, a `Prefiller`; None: this one

    @property
    def block(self) -> int:
        """Tokens of a block that is kept."""

    @property
    def most_read(self) -> int:
        """Tokens that can be read at once."""

    @property
    def factors(self) -> str:
        """Which of the model's factors turn positions; "" where it has but one kind."""

    @property
    def keeps(self) -> bool:
        """True if blocks of this model are kept on disk."""

    @property
    def snapshots(self) -> SequenceSnapshots | None:
        """Snapshots of recurrent layers; None where there are none, and `kv_remove` forgets any tokens at the end."""

    @property
    def problem(self) -> str | None:
        """Why something was not kept, the first time, in one line; None where nothing was amiss."""

    @property
    def is_writing(self) -> bool:
        """True while blocks are written to the disk, or wait for it."""

    def describe(self) -> str:
        """Describe how much is kept where."""

    def read(self, sequence: int, positions: Range) -> KVBlock:
        """Keys and values of the whole model at these positions."""

    def begin_read(self, sequence: int, positions: Range) -> Callable[[], list[KVBlock]]:
        """Ask for keys and values at any positions; what it returns waits for them, in any thread."""

    def write(self, sequence: int, block: KVBlock) -> None:
        """Add to a sequence what `read` gave, here or elsewhere."""

    def block_hashes(self, tokens: Sequence[int], namespace: str = "") -> list[bytes]:
        """The names of the whole blocks of a history, in a namespace."""

    def keep(self, sequence: int, start: int, hashes: Sequence[bytes]) -> None:
        """Keep blocks of a sequence from position `start` on, each under its hash."""

    def n_cached(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading ones of these blocks are kept."""

    def restore(self, sequence: int, start: int, hashes: Sequence[bytes]) -> int:
        """Add kept blocks to a sequence that ends at `start`: how many leading ones were there."""


class TextEngine(Protocol):
    """`edge.llm.engine.Engine` and `edge.parallel.engine.DistributedEngine`; the former documents the methods."""

    @property
    def path(self) -> Path:
        """The model's file."""

    @property
    def file(self) -> GgufFile:
        """The same file, opened: its header and tensors."""

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""

    @property
    def adapters(self) -> Sequence[CheckedAdapter]:
        """The LoRA adapters that it was loaded with."""

    @property
    def context(self) -> int:
        """Tokens of context."""

    @property
    def batch(self) -> int:
        """Rows one decode may have."""

    @property
    def outputs(self) -> int:
        """Rows of one decode that may give logits."""

    @property
    def threads(self) -> int:
        """Threads of this device."""

    @property
    def gpu_layers(self) -> GpuLayers | None:
        """Layers of this device's part on its GPU; None without one."""

    @property
    def sequences(self) -> int:
        """Number of independent sequences; their ids begin at 0."""

    @property
    def memory(self) -> MemoryNeed:
        """Memory that this device needs."""

    @property
    def stages(self) -> int:
        """Decodes that are under way at once where there are as many microbatches."""

    @property
    def groups(self) -> int:
        """Microbatches that answers form, as its plan says, or one for each stage."""

    @property
    def contexts(self) -> int:
        """Groups of sequences, each with a KV cache of its own: sequence s is of group s modulo their number. Of
        several, each may have one decode under way, all of its rows are of that group, and each is collected."""

    @property
    def logits_cross(self) -> bool:
        """True if logits come from other devices, so that few should be asked for."""

    @property
    def states(self) -> SequenceStates:
        """The keys and values of sequences, to be read, written and kept."""

    @property
    def model(self) -> Model:
        """The vocabulary."""

    @property
    def paging(self) -> PagedWeights | None:
        """This device's weights under a budget; None without one."""

    @property
    def failed(self) -> Exception | None:
        """Why this engine can compute nothing any more; None while it can."""

    @property
    def uncollected(self) -> int:
        """Submitted steps whose logits wait to be collected."""

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
    ) -> NDArray[np.float32]:
        """Compute tokens of one sequence, and keep their keys and values."""

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
    ) -> None:
        """Begin a decode of any rows; `collect` returns the logits in the order of submission."""

    def collect(self) -> NDArray[np.float32]:
        """Logits [rows, n_vocab] of the oldest step that gives any. They hold until the next decode."""

    def chunk(self, n: int) -> int:
        """Tokens of a prompt of `n` that should go into one decode."""

    def stop(self) -> None:
        """Make a decode that runs in another thread, and later ones, raise Interrupted."""

    def resume(self) -> None:
        """Decode again after `stop`."""

    def kv_remove(self, sequence: int, start: int, end: int = -1) -> bool:
        """Forget positions [start, end) of a sequence; False where everything must be."""

    def kv_copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """Let `target` share positions of `source`."""

    def kv_shift(self, sequence: int, start: int, end: int, delta: int) -> None:
        """Add `delta` to positions of a sequence."""

    @property
    def rollback(self) -> int | None:
        """Rows at the end of a step, all but its first, that `kv_remove` can forget; None: any, of any step."""

    @property
    def can_shift(self) -> bool:
        """True if `kv_shift` gives nearly what computing the tokens again would."""

    def answered(self, step_s: Sequence[float]) -> None:
        """An answer is complete, whose tokens took so many seconds."""

    @property
    def listener(self) -> HiddenListener | None:
        """Receiver of hidden states; None: there is none."""

    def listen(self, listener: HiddenListener) -> None:
        """Give the hidden states of later steps to `listener`."""

    def kv_clear(self) -> None:
        """Forget all sequences: clear the KV cache."""


class RemotePrompt(Protocol):
    """A prompt that another placement computes. `edge.parallel.prefiller` documents the methods."""

    def take(self) -> tuple[list[KVBlock], bool]:
        """Blocks that came since the last call, in order; and whether no more come."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until `take` has something new; whether it has."""

    def release(self) -> None:
        """Its request has its keys and values, or needs them no more."""


class Prefiller(Protocol):
    """The placement that computes prompts, `edge.parallel.prefiller.PrefillPlacement`, which documents the method."""

    def begin(
        self, tokens: Sequence[int], n_held: int, namespace: str, adapters: Scales, *, keep: bool
    ) -> RemotePrompt | None:
        """Compute a prompt; None where that does not pay."""


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
    """`GreedyDrafter`, which documents it."""

    @property
    def context(self) -> int:
        """Tokens that a text and its drafts may have."""

    @property
    def n_vocab(self) -> int:
        """Token ids are below it."""

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """`n` tokens behind these, each the likeliest."""


class Answer(Protocol):
    """`edge.llm.requests.Running`: a request, as far as drafting needs it."""

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids."""

    @property
    def answer(self) -> Sequence[int]:
        """Token ids so far."""

    @property
    def left(self) -> int:
        """Tokens that it may still get."""

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids of its history, by position, without what context shifts dropped. The last one is not computed."""

    @property
    def sequence(self) -> int:
        """The engine's sequence that it runs in."""


class Drafter(Protocol):
    """`edge.speculate.speculation.Speculation`, which documents the methods. Its drafts decide how fast answers come,
    never what they say."""

    def begin(self) -> None:
        """Count figures from now on."""

    def shape(self, requests: Sequence[Answer], most_rows: int, most_windows: int) -> tuple[int, int]:
        """Rows of each of these requests, which are all that run, in the next step; and how many such windows of one
        that is alone are to be in flight."""

    def draft(self, request: Answer, first: Sequence[int], rows: int, assumed: Sequence[int] = ()) -> Sequence[int]:
        """A window of at most `rows` tokens: `first`, which was chosen, or nothing where the window is behind others;
        then drafts of what follows the text and `assumed`. Empty where there is nothing to draft."""

    def verified(self, results: Sequence[VerifyResult]) -> None:
        """The logits of the oldest step came: what came of the window of each request."""

    def disturbed(self) -> None:
        """Something else is computed beside such steps."""

    def ended(self, request: Answer) -> None:
        """A request has ended."""

    def to_json(self) -> dict[str, Any]:
        """Figures since `begin`, as docs/cli/chat.md and docs/serve.md say."""

    def describe(self) -> str:
        """The same in a line for people."""
