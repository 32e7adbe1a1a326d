"""Engine of a slice that a browser's page computes. Operations go to the page, one at a time (`edge.browser.page`).

The page runs stock llama.cpp in WebAssembly. Rules, names of nodes and the encoding of states stay here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.browser.page import PageConnection
from edge.browser.profile import RUNTIME_BYTES
from edge.errors import EngineError, Interrupted, NotEnoughMemory
from edge.llama.batch import Batch
from edge.llama.ggml import Node
from edge.llama.hooks import Hook, NodeValue
from edge.llama.llama import FLASH_ATTENTION, Context, Model, SequenceLayout
from edge.llm.engine import Accounted, Engine, ModelRunner
from edge.llm.options import EngineOptions
from edge.text.constraints.constraint import Mask
from edge.weights import memory
from edge.weights.adapter import Scales
from edge.weights.mapped import ModelInMemory, check_generates_text
from edge.weights.memory import MIB, LoadRequest, MemoryNeed
from partition.architectures.description import SCALED_INPUT
from partition.architectures.table import RULES, has_flash
from partition.model.file import ModelFile

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_STOPPED = 2  # llama_decode's code after the abort callback stopped it


class PageEngine(ModelRunner):
    """An engine on a slice's file. The page has the weights and the KV cache."""

    def __init__(
        self,
        file: ModelFile,
        options: EngineOptions,
        folder: Path,
        memory_bytes: int,
        hooks: Sequence[Hook],
        progress: Callable[[float], None] | None,
        *,
        embeddings: bool = True,
    ) -> None:
        """folder: folder of the page.
        memory_bytes: memory of the page.
        embeddings: batches contain hidden states instead of tokens.

        Raises the errors of ModelRunner, NotEnoughMemory if the page has too little memory, and EngineError if it was
        closed or lost.
        """
        if options.lora:
            raise EngineError("a browser cannot compute LoRA adapters; give it no layers, or leave --lora out")
        self._folder, self._page_bytes = folder, min(memory_bytes, options.memory or memory_bytes)
        super().__init__(file, replace(options, memory=None, prefixes=None), hooks, progress, embeddings=embeddings)

    def _load(
        self, request: LoadRequest, options: EngineOptions, accounted: Accounted | None, *, embeddings: bool
    ) -> ModelInMemory:
        """Send the slice to the page, and let the page load it."""
        sizes = request.sizes
        parts = {**memory.need(request.file.path, sizes).parts, "runtime": RUNTIME_BYTES}
        need = MemoryNeed(parts, self._page_bytes, self._page_bytes)
        if not need.fits:
            raise NotEnoughMemory(
                f"the slice needs {need.total / MIB:,.0f} MiB in the browser, which has {self._page_bytes / MIB:,.0f};"
                " give it a smaller share, or use a smaller --context"
            )
        with ExitStack() as closing:
            page = PageConnection(self._folder)
            closing.callback(page.close)
            page.on_progress = request.progress
            # Its properties are read here, so the page needs to report nothing about a file that it may misread.
            model = Model(request.file.path, allocate=False)
            closing.callback(model.close)
            check_generates_text(model, request.file.path)
            context = load_at_page(page, model, request)
            closing.callback(context.close)
            page.show(self.shape.name, str(self.shape.n_layers))
            return ModelInMemory(model, context, sizes, None, need, closing.pop_all(), None)


class WholePageEngine(PageEngine, Engine):
    """An engine on a whole model at the page, which drafts."""

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
        """Same as in `Engine`. The page returns only the `top` largest logits of each row."""
        self.use_top(top)
        super().submit(tokens, positions, sequences, outputs, top=top, masks=masks, adapters=adapters)


def load_at_page(page: PageConnection, model: Model, request: LoadRequest) -> PageContext:
    """Let the page load the slice. Return its context. Raises EngineError if the page cannot load it.

    model: the slice in this process, without weights.
    """
    sizes, layout = request.sizes, SequenceLayout.for_model(model, request.sizes)
    flash = sizes.flash_attention if has_flash(model.architecture) else "off"
    answer, _ = page.load_file(
        request.file.path,
        "load",
        threads=request.threads,
        n_ctx=sizes.context,
        n_batch=sizes.batch,
        n_seq_max=layout.total,
        n_outputs_max=max(sizes.outputs, layout.total),
        n_rs_seq=sizes.rollback if model.is_recurrent else 0,
        type_k=sizes.kv.keys.id,
        type_v=sizes.kv.values.id,
        flash=int(FLASH_ATTENTION[flash]),
    )
    facts = answer.get("context")
    if not isinstance(facts, dict) or answer.get("model", {}).get("n_vocab") != model.n_vocab:
        raise EngineError("the browser's page loaded something else than the slice; reload the page")
    return PageContext(page, model, request, layout, facts)


class PageContext(Context):
    """Context at a page."""

    def __init__(
        self, page: PageConnection, model: Model, request: LoadRequest, layout: SequenceLayout, facts: dict[str, Any]
    ) -> None:
        """facts: what the page reports about the context."""
        self._page, self.model = page, model
        self._threads = request.threads
        rules, architecture = RULES[model.architecture], request.file.architecture
        blocks = request.file.metadata.get(f"{architecture}.block_count")
        end = rules.end_node.format(int(blocks) - 1 if isinstance(blocks, int) else 0)
        self._end_hooks = _hooks_of(request.hooks, end)
        self._end = end if self._end_hooks else ""  # node at which the graph ends; "": it computes logits
        inputs = (name for name in (SCALED_INPUT, rules.input_node) if name and _hooks_of(request.hooks, name))
        self._input = next(inputs, "")  # node over which the embeddings are written; "": none
        self.gives_hidden, self.active_adapters = False, ()
        self._is_stopped = False
        self._logits: Floats = np.empty((0, model.n_vocab), np.float32)
        self._outputs = np.empty(0, np.int8)  # of the rows of the last decode
        self.n_ctx = request.sizes.context
        self._set_up_sequences(_PageCalls(page, facts), layout, request.sizes)

    def decode(self, batch: Batch, n: int) -> None:
        """Compute the first `n` rows at the page. Then hooks get the value of their node."""
        if self._is_stopped:
            raise Interrupted("stopped on request")
        if not batch.causal:
            raise EngineError("a browser cannot compute pictures; let this device have the first layers")
        write, end = self._input, self._end
        fields: dict[str, Any] = {"n": n, "tokens": not batch.has_embeddings, "embeddings": 0}
        payload = list[NDArray[Any]]()
        if not batch.has_embeddings:
            payload.append(batch.tokens[:n])
        if batch.has_embeddings or write:
            fields["embeddings"] = batch.embeddings.shape[1]
            payload.append(batch.embeddings[:n])
        positions = batch.native_positions(n, in_sections=self.model.has_sections)
        payload += [positions, batch.sequences[:n], batch.outputs[:n]]
        top = 0 if end else self.top
        self.decoding(batch.sequences[:n])
        header, values = self._page.call(
            "decode",
            b"".join(part.tobytes() for part in payload),
            **fields,
            sections=len(positions) // n,
            write=write,
            stop_at=end,
            threads=self._threads,
            top=top,
        )
        code = header.get("code")
        if code == _STOPPED:
            raise Interrupted("stopped on request")
        if code == 1:
            raise EngineError(f"no room in the KV cache of {self.n_ctx} tokens for {n} more")
        if code != 0:
            raise EngineError(f"llama_decode failed with code {code!s:.20} in the browser")
        outputs = batch.outputs[:n].copy()
        width = batch.embeddings.shape[1] if end else self.model.n_vocab
        n_rows = n if end else int(np.count_nonzero(outputs))
        page_width = header.get("width") if n_rows else width  # without rows there is no width
        if (header.get("rows"), page_width) != (n_rows, width) or len(values) != 4 * n_rows * (2 * top or width):
            raise EngineError(
                f"the browser's page returned {len(values)} bytes for {n_rows} rows of {width} values; reload it"
            )
        if top:
            rows = _spread(values, n_rows, top, width)
        else:
            rows = np.frombuffer(values, np.float32).reshape(n_rows, width)
        self.decoded(batch.sequences[:n], batch.positions[:n])
        if end:
            for run in self._end_hooks:
                run(NodeValue(rows, end))  # type: ignore[arg-type]  # it looks at the value alone
        else:
            self._logits, self._outputs = rows, outputs

    def logits(self, row: int, n: int = 1) -> Floats:
        """Return the logits [n, n_vocab] of `n` rows from batch row `row` (-1: last row with logits)."""
        first = len(self._logits) - 1 if row < 0 else int(np.count_nonzero(self._outputs[:row]))
        if first < 0 or first + n > len(self._logits) or (row >= 0 and not self._outputs[row]):
            raise EngineError(f"row {row} of the last batch gave no logits")
        return self._logits[first : first + n]

    def use_threads(self, threads: int) -> None:
        """Compute with `threads` threads from the next decode on."""
        self._threads = threads

    def use_adapters(self, scales: Sequence[float]) -> None:
        """Accept no adapters. Raises EngineError for any scale but 0."""
        if any(scales):
            raise EngineError("a browser cannot compute LoRA adapters")

    def wait(self) -> None:
        """Do nothing, because each operation waits for its answer."""

    def stop(self) -> None:
        """Same as `Context.stop`. Without shared memory the page ends the current decode first."""
        self._is_stopped = True
        self._page.stop()

    def resume(self) -> None:
        """Same as `Context.resume`."""
        self._is_stopped = False
        self._page.resume()

    def close(self) -> None:
        """Do nothing. The page frees the context when the connection ends."""
        self.forget_native()


def _hooks_of(hooks: Sequence[Hook], name: str) -> list[Callable[[Node], bool | None]]:
    """Return the functions of the hooks that select the node with this name."""
    blank = NodeValue(np.empty((1, 1), np.float32), name)
    return [hook.run for hook in hooks if hook.run is not None and hook.wants(blank)]  # type: ignore[arg-type]


def _spread(values: memoryview, n_rows: int, top: int, width: int) -> Floats:
    """Return rows of `width` with the `top` logits that the page sent for each, and -inf elsewhere."""
    places, largest = np.frombuffer(values, np.uint32).reshape(2, n_rows, top)
    if (places >= width).any():
        raise EngineError("the browser's page returned logits of tokens that do not exist; reload the page")
    rows = np.full((n_rows, width), -np.inf, np.float32)
    np.put_along_axis(rows, places.astype(np.intp), largest.view(np.float32), 1)
    return rows


class _PageCalls:
    """Calls on the sequences of a page's context. Same as `edge.llama.sequences.NativeCalls`."""

    def __init__(self, page: PageConnection, facts: dict[str, Any]) -> None:
        self._page = page
        self.rollback, self.can_shift = int(facts.get("n_rs_seq", 0)), facts.get("can_shift") is True

    def remove(self, sequence: int, start: int, end: int) -> bool:
        return self._result("seq_rm", sequence=sequence, start=start, end=end) is True

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        self._page.call("seq_cp", source=source, target=target, start=start, end=end)

    def add(self, sequence: int, start: int, end: int, delta: int) -> None:
        self._page.call("seq_add", sequence=sequence, start=start, end=end, delta=delta)

    def clear(self) -> None:
        self._page.call("clear")

    def ends(self, sequence: int) -> list[int]:
        ends = self._result("ends", sequence=sequence)
        if not isinstance(ends, list) or len(ends) != 2 or not all(isinstance(end, int) for end in ends):
            raise EngineError("the browser's page does not report the ends of a sequence; reload the page")
        return ends

    def read(self, sequence: int, flags: int) -> Bytes:
        return np.frombuffer(self._page.call("state_get", sequence=sequence, flags=flags)[1], np.uint8)

    def write(self, sequence: int, data: Bytes, flags: int) -> bool:
        header, _ = self._page.call("state_set", data.tobytes(), sequence=sequence, flags=flags)
        return header.get("result") == len(data)

    def _result(self, op: str, **fields: Any) -> Any:
        return self._page.call(op, **fields)[0].get("result")
