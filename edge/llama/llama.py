"""llama.cpp as Python objects: models, contexts, batches. One of nine files with ctypes.

Everything above works with numpy arrays and plain numbers. Handles are closed by `close()`; objects that native code
calls back into (log, progress and node callbacks) are kept referenced for as long as it may call them.
"""

from __future__ import annotations

import collections
import ctypes as C
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama import library
from edge.llama.batch import Batch as Batch
from edge.llama.buffers import CallerBuffer, disable_amx
from edge.llama.interrupt import StopFlag, deferred_interrupts
from edge.llama.library import llama_cpp as L
from edge.llama.sequences import Sequences
from edge.llama.vocabulary import Vocabulary
from partition.architectures.table import RULES, has_flash
from quant.types import CacheType

FLASH_ATTENTION = {
    "auto": L.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": L.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": L.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}

NodeCallback = Callable[[int, bool, Any], bool]
"""(node address, ask, unused). ask: is the node's value wanted? Else: it is computed; False ends the graph here."""

_LOG_WARN, _LOG_ERROR = 3, 4
_complaints: collections.deque[tuple[int, str]] = collections.deque(maxlen=8)  # (level, line)
_listener: Callable[[str], None] | None = None  # gets every log line while somebody listens


@L.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _: Any) -> None:
    if level < _LOG_WARN and _listener is None:  # as nearly all lines, of which a model has hundreds
        return
    line = text.decode(errors="replace").rstrip("\n")
    if level in (_LOG_WARN, _LOG_ERROR):
        _complaints.append((level, line))
    if _listener is not None:
        _listener(line)


@functools.cache
def initialise() -> None:
    """Start the backend once: quiet log, and a clear line instead of a core dump if ggml has to stop the process."""
    library.on_abort_exit()
    L.llama_log_set(_on_log, None)
    L.llama_backend_init()
    disable_amx()


@contextmanager
def forwarded_log(listener: Callable[[str], None]) -> Iterator[None]:
    """Send each line that llama.cpp logs inside the block to `listener` alone, which must not raise."""
    global _listener
    initialise()
    L.llama_log_set(_on_log, None)  # another user of the library in this process may have taken the log
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collect all lines that llama.cpp logs inside the block."""
    lines: list[str] = []
    with forwarded_log(lines.append):
        yield lines


def _why() -> str:
    """Return llama.cpp's complaint: the first error since the last `clear`, else its last warning."""
    lines = [line for level, line in _complaints if level == _LOG_ERROR] or [line for _, line in _complaints][-1:]
    return (lines or ["it gives no reason"])[0].split(": ", 1)[-1]  # without the function's name


def has_gpu() -> bool:
    """Return whether this build of llama.cpp can run layers on a GPU that is present."""
    initialise()
    return bool(L.llama_supports_gpu_offload())


def system_info() -> str:
    """The instruction sets and backends in use, as llama.cpp prints them."""
    initialise()
    return bytes(L.llama_print_system_info()).decode()


class Model(Vocabulary):
    """A loaded GGUF. The file must have been checked before: ggml aborts the process on what it does not expect."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        gpu_layers: int = 0,  # -1: all
        repack: bool = True,  # keep a second copy of some weights, laid out for this CPU: faster, not mapped
        allocate: bool = True,  # False: metadata only, to ask what it would need
        vocabulary_only: bool = False,  # to tokenize: no weights are loaded
        own: CallerBuffer | None = None,  # where the weights get their addresses; nothing is loaded then
        predictors: bool = False,  # with the layers behind the last one that predict further tokens
        progress: Callable[[float], None] | None = None,  # called with the fraction loaded; may raise
    ) -> None:
        initialise()
        params = L.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.load_mode = L.LLAMA_LOAD_MODE_MMAP if allocate else L.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts = repack
        params.no_alloc = not allocate
        params.vocab_only = vocabulary_only
        params.load_mtp = predictors
        if own is not None:
            params.tensor_buft_overrides = own.overrides
            params.split_mode = L.LLAMA_SPLIT_MODE_NONE  # its weights are brought to one GPU
        self.path = os.path.abspath(path)
        self.at_close = ExitStack()  # what is made of this model, and ends with it
        self.own_memory = own  # llama.cpp points into it
        self.adapters: list[Any] = []  # in the order they were loaded

        @L.llama_progress_callback  # type: ignore[untyped-decorator]
        def on_progress(fraction: float, _: Any) -> bool:
            try:
                if progress is not None:
                    progress(fraction)
            except Exception as error:  # in a function that native code calls it would be printed and dropped
                failed.append(error)
            return not (interrupts or failed)

        failed: list[Exception] = []
        params.progress_callback = on_progress
        _complaints.clear()
        self._handle = None
        try:
            with deferred_interrupts() as interrupts:
                self._handle = L.llama_model_load_from_file(os.fsencode(path), params)
            if failed:
                raise failed[0]
        except BaseException:
            self.close()
            raise
        if not self._handle:
            raise EngineError(f"{os.fspath(path)}: llama.cpp cannot load it: {_why()}")
        self.vocab = L.llama_model_get_vocab(self._handle)
        self.n_vocab: int = L.llama_vocab_n_tokens(self.vocab)
        self.n_bytes: int = L.llama_model_size(self._handle)
        self.architecture, self.pre_tokenizer = map(self._text_value, (b"general.architecture", b"tokenizer.ggml.pre"))
        self.has_decoder: bool = L.llama_model_has_decoder(self._handle)
        # Recurrent layers hold what all tokens so far made, and nothing of each.
        self.has_attention: bool = not L.llama_model_is_recurrent(self._handle)
        self.is_recurrent: bool = not self.has_attention or L.llama_model_is_hybrid(self._handle)
        self.window: int = L.llama_model_n_swa(self._handle)  # tokens that some layers attend to; 0: all attend to all
        rules = RULES.get(self.architecture)
        self.is_chunked: bool = rules is not None and rules.window is not None and rules.window.chunked
        # A shift rotates keys, at the beginning of the next decode; other keys cannot follow their positions.
        rope = L.llama_model_rope_type(self._handle)
        self.rotates: bool = rope != L.LLAMA_ROPE_TYPE_NONE
        self.has_sections: bool = rope in (L.LLAMA_ROPE_TYPE_MROPE, L.LLAMA_ROPE_TYPE_IMROPE)  # of positions
        self.n_embd_inp: int = L.llama_model_n_embd_inp(self._handle)  # of a row of embeddings

    def _text_value(self, key: bytes) -> str:
        """Return a short text of the file's metadata; empty if the file has none."""
        value = C.create_string_buffer(64)
        L.llama_model_meta_val_str(self._handle, key, value, len(value))
        return value.value.decode(errors="replace")

    def first_in_window(self, position: int) -> int:
        """Return the first position that every layer attends to at this one."""
        if not self.window:
            return 0
        return position // self.window * self.window if self.is_chunked else max(0, position + 1 - self.window)

    def close(self) -> None:
        self.at_close.close()
        self.forget_vocabulary()
        if self._handle:
            L.llama_model_free(self._handle)
            self._handle = None

    def load_adapter(self, path: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter, which is freed with the model. Contexts that are made later have room for it in their
        graphs. The file must have been checked for this model. EngineError if llama.cpp refuses it."""
        if self.own_memory is not None:
            self.own_memory.is_ordinary = True  # all weights have their addresses by now
        _complaints.clear()
        with deferred_interrupts():
            adapter = L.llama_adapter_lora_init(self._handle, os.fsencode(path))
        if not adapter:
            raise EngineError(f"{os.fspath(path)}: llama.cpp cannot load this adapter: {_why()}")
        self.adapters.append(adapter)


# libc's strlen as llama.cpp's abort callback: an empty string means go on, any other means stop. A Python function
# here would be called once a graph node and need the interpreter's lock each time.
_strlen = C.cast(C.CDLL(None).strlen, L.ggml_abort_callback)

_MOST_DOUBLED = 127  # sequences: llama.cpp has room for 256, and one of them is for reading and writing
_STOPPED = 2  # llama_decode's code for an abort callback that said so


@dataclass(frozen=True)
class ContextSizes:
    """Sizes of a context."""

    context: int  # tokens
    kv: CacheType
    batch: int = 512  # rows one decode may have
    sequences: int = 1
    outputs: int = 1  # rows of one decode that may give logits; llama.cpp reserves a vocabulary for each
    flash_attention: str = "auto"
    predicts: bool = False  # it computes the first of the model's `predictors`, and no other layer
    adapter_bytes: tuple[int, ...] = ()  # of their matrices by layer, and of those in none
    adapter_row_bytes: int = 0  # that a row of a decode takes for what adapters compute, beside what llama.cpp says
    rollback: int = 0  # rows at the end of a decode that recurrent layers can forget, where llama.cpp can for a model


class Context(Sequences):
    """A KV cache and compute buffers over a model, and decoding into them."""

    def __init__(
        self, model: Model, sizes: ContextSizes, *, threads: int = 1, on_node: NodeCallback | None = None
    ) -> None:
        params = L.llama_context_default_params()
        params.n_ctx = sizes.context
        params.ctx_type = L.LLAMA_CONTEXT_TYPE_MTP if sizes.predicts else L.LLAMA_CONTEXT_TYPE_DEFAULT
        params.n_batch = params.n_ubatch = sizes.batch  # one decode is one graph: hooks count its nodes
        n_sequences = sizes.sequences
        scratch = first_double = None
        if model.has_attention:  # one more than anybody decodes: positions are copied to it to be written, or read
            scratch = n_sequences
            n_sequences += 1
        slides = model.window > 0 and not model.is_chunked and not model.is_recurrent
        if slides and 1 < sizes.sequences <= _MOST_DOUBLED:  # one sequence alone loses nothing to others
            first_double = n_sequences
            n_sequences += sizes.sequences
        params.n_seq_max = n_sequences
        params.n_rs_seq = sizes.rollback if model.is_recurrent else 0
        params.kv_unified = True  # likewise: separate caches would split a batch of several sequences
        params.n_threads = params.n_threads_batch = threads
        params.type_k, params.type_v = sizes.kv.keys.id, sizes.kv.values.id
        flash = has_flash(model.architecture)
        if not flash and sizes.flash_attention == "on":
            raise EngineError(f"llama.cpp has no flash attention for {model.architecture} models; choose auto or off")
        params.flash_attn_type = FLASH_ATTENTION[sizes.flash_attention if flash else "off"]
        params.n_outputs_max = max(sizes.outputs, params.n_seq_max)  # ggml stops the process on fewer
        if model.own_memory:
            params.op_offload = False  # a GPU would be given copies of weights before they are there
        self.stopping = StopFlag(C.create_string_buffer(2))
        params.abort_callback, params.abort_callback_data = _strlen, C.addressof(self.stopping.flag)
        self._on_node = L.ggml_backend_sched_eval_callback(on_node) if on_node else None
        if self._on_node:
            params.cb_eval = self._on_node
        _complaints.clear()
        self.model = model
        self.active_adapters: tuple[int, ...] = ()  # numbers of those in the graphs from now on
        self.gives_hidden = False  # the graphs from now on give hidden states
        self._logits_place, self._logits = (0, 0), np.empty((0, 0), np.float32)  # address and rows of those given last
        self._handle = None
        try:
            with deferred_interrupts():
                self._handle = L.llama_init_from_model(model._handle, params)
        except BaseException:
            self.close()
            raise
        if not self._handle:
            raise EngineError(f"llama.cpp cannot make a context of {sizes.context} tokens: {_why()}")
        # A predictor is a layer of attention, in a model of recurrent layers, too.
        is_recurrent = model.is_recurrent and not sizes.predicts
        Sequences.__init__(
            self, self._handle, scratch, is_recurrent=is_recurrent, window=model.window, first_double=first_double
        )
        self.can_shift = bool(model.rotates and not model.is_recurrent and L.llama_memory_can_shift(self._memory))
        self.n_ctx: int = L.llama_n_ctx(self._handle)

    def close(self) -> None:
        self.forget_native()
        if self._handle:
            L.llama_free(self._handle)
            self._handle = None

    def decode(self, batch: Batch, n: int) -> None:
        """Compute the first `n` rows. EngineError if llama.cpp refuses, Interrupted after `stop()`."""
        if not self._handle:
            raise EngineError("the engine is closed")
        batch.native.n_tokens = n
        if self.model.has_sections:
            batch.set_sections(n)
        code = _STOPPED
        if not self.stopping.flag.value:
            self.decoding(batch.sequences[:n])
            code = batch.decode(self._handle)
        if code == 0:
            self.decoded(batch.sequences[:n], batch.positions[:n])
            return
        if code == _STOPPED:
            raise self.stopping.error()
        if code == 1:
            raise EngineError(f"no room in the KV cache of {self.n_ctx} tokens for {n} more")
        raise EngineError(f"llama_decode failed with code {code}: {_why()}")

    def use_adapters(self, scales: Sequence[float]) -> None:
        """Compute with the model's adapters from the next decode on, each times its scale; 0: without it. No scales:
        without any."""
        if not self._handle:
            raise EngineError("the engine is closed")
        if scales and len(scales) != len(self.model.adapters):
            raise EngineError(f"{len(scales)} scales came for {len(self.model.adapters)} adapters; update both devices")
        active = tuple(i for i, scale in enumerate(scales) if scale)
        n = len(active)
        adapters = (L.llama_adapter_lora_p_ctypes * n)(*(self.model.adapters[i] for i in active))
        factors = (C.c_float * n)(*(scales[i] for i in active))
        self.active_adapters = active
        if L.llama_set_adapters_lora(self._handle, adapters, n, factors):
            raise EngineError(f"llama.cpp cannot use these adapters: {_why()}")

    def wait(self) -> None:
        """Wait until what was decoded is computed: a GPU computes asynchronously."""
        if self._handle:
            L.llama_synchronize(self._handle)

    def use_threads(self, threads: int) -> None:
        """Compute with so many threads from the next decode on."""
        if self._handle:
            L.llama_set_n_threads(self._handle, threads, threads)

    def stop(self) -> None:
        """Make a decode that runs in another thread end at its next graph node (CPU only), and later ones fail."""
        self.stopping.stop()

    def resume(self) -> None:
        """Allow decoding again."""
        self.stopping.resume()

    def logits(self, row: int, n: int = 1) -> NDArray[np.float32]:
        """Logits of `n` rows from batch row `row` (-1: last with any): a view [n, n_vocab] until the next decode."""
        values = L.llama_get_logits_ith(self._handle, row)
        if not values:
            raise EngineError(f"row {row} of the last batch gave no logits")
        place = C.addressof(values.contents), n
        if place != self._logits_place:  # mostly they are where those of the last decode were
            self._logits_place, self._logits = place, np.ctypeslib.as_array(values, shape=(n, self.model.n_vocab))
        return self._logits
