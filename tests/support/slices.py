"""Run slices in one process: threads as ranks, sums in rank order, and stages one after another."""

import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edge.llama import llama
from edge.llama.ggml import Node
from edge.llama.hooks import Hook, NodeHooks
from edge.models import shapes, synth
from edge.models import slice_cutting as cutting
from partition.architectures.table import ARCHITECTURES, RULES
from partition.plan.plan import NOTHING, Range, Slice
from partition.slices.gguf_slice import elastic_recipe, limits, slice_recipe
from quant.gguf.file import GgufFile
from quant.gguf.writer import NewTensor, encoded, header
from quant.types import TYPES, cache_type

Floats = NDArray[np.float32]

# Small models to cut: what one of `edge.models.synth` would have, and more layers and columns.
SMALL: dict[str, Any] = {"layers": 7, "embd": 128, "ff": 96, "heads": 4, "kv": 2, "vocab": 512, "context": 512}
_EXPERTS = {"experts": 4, "experts_used": 2, "expert_ff": 96}
_WIDE = {"head_size": 48, **_EXPERTS}
# Those that are run thoroughly, in all tests of slices; `tests/cluster/test_architectures.py` runs stages of all.
FIGURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_size": 48},
    "qwen3moe": _WIDE,
    "gemma": {"head_size": 48, "kv": 1},
    "gemma2": {"head_size": 48, "window": 16},
    "gemma3": {"head_size": 48, "window": 16, "kv": 1, "rope_scaling": "linear", "rope_factor": 8.0},
    "phi3": {},
    "gpt-oss": {**_WIDE, "window": 16},
    "mistral3": {},
    "exaone": {"rope_freqs": True},
    "seed_oss": {"head_size": 48},
    "olmo2": {"window": 16},
}

DIGEST = "0" * 64  # of no model: cutting does not look at it
CONTEXT = 512
_F32 = 0  # its ggml type id, for the KV cache
_PATIENCE_S = 60.0


def figures_of(arch: str) -> dict[str, Any]:
    """Figures of a small model, beside `SMALL`."""
    if arch in FIGURES:
        return FIGURES[arch]
    described = ARCHITECTURES[arch]
    result: dict[str, Any] = {"kv": 4} if described.equal_heads else {}
    if not described.dense or described.common.keys() & {"dense_layers", "expert_every"}:
        result |= _EXPERTS if described.experts else {}
    if described.rules.window:
        result["window"] = 16
    return result


def synthetic(path: Path, arch: str, type_name: str = "f32", **figures: Any) -> Path:
    """A small random model; `figures` change some of its sizes. A model there already is used again."""
    if not path.exists():
        shape = shapes.shape(arch, **{**SMALL, **figures_of(arch), **figures})
        synth.synthesize(path, shape, type_name, type_name if type_name in ("f32", "f16") else None)
    return path


def rewritten(
    model: Path,
    target: Path,
    values: Mapping[str, tuple[str, Any]] = MappingProxyType({}),
    add: Mapping[str, Floats] = MappingProxyType({}),
    drop: Collection[str] = (),
) -> Path:
    """A model file with other metadata (type, value), 32-bit tensors added in place of old ones, and some dropped."""
    file = GgufFile.open(model)
    pairs = {key: file.raw_value(key) for key in file.metadata} | {k: encoded(*v) for k, v in values.items()}
    saved = [t for name, t in file.tensors.items() if name not in add and name not in drop]
    data = [bytes(file.data(t.name)) for t in saved] + [np.ascontiguousarray(v, "<f4").tobytes() for v in add.values()]
    tensors = [NewTensor(t.name, t.shape, t.type) for t in saved]
    tensors += [NewTensor(name, v.shape[::-1], TYPES["f32"]) for name, v in add.items()]
    weights = b"".join(raw + bytes(t.padding) for raw, t in zip(data, tensors, strict=True))
    target.write_bytes(header({k: v for k, v in pairs.items() if k not in drop}, tensors) + weights)
    return target


def ranges(*sizes: int) -> list[Range]:
    """Ranges of these sizes, one after another."""
    ends = np.cumsum(sizes).tolist()
    return [Range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def whole(file: GgufFile, layers: Range | None = None) -> Slice:
    """All of the given layers, and the head where they reach the end."""
    sizes = limits(file).sizes
    layers = layers or Range(0, sizes.layers)
    vocab = Range(0, sizes.vocab) if layers.stop == sizes.layers else NOTHING
    return Slice(layers, Range(0, sizes.heads), Range(0, sizes.ff), vocab, True)


def write(model: Path, cut: Slice, target: Path, *, elastic: bool = False) -> Path:
    """Cut a slice of a model file into a file. elastic: of all sizes that the file holds."""
    recipe = (elastic_recipe if elastic else slice_recipe)(GgufFile.open(model), DIGEST, cut)
    target.write_bytes(b"".join(cutting.chunks(recipe, model)))
    return target


def embedded(model: Path, tokens: Sequence[int]) -> Floats:
    """The rows of the token table, as the model's own graph has them before its first layer."""
    reader = gguf.GGUFReader(model)
    table = next(t for t in reader.tensors if t.name == "token_embd.weight")
    rows = gguf.dequantize(table.data[list(tokens)], table.tensor_type).astype(np.float32)
    arch = reader.fields["general.architecture"].contents()
    return rows * np.float32(sqrt(rows.shape[1])) if arch.startswith("gemma") else rows


class Sum:
    """Adds what the ranks have, in rank order, for all of them."""

    def __init__(self, n: int) -> None:
        self._parts: list[Floats] = [np.empty(0, np.float32)] * n
        self._barrier = threading.Barrier(n, timeout=_PATIENCE_S)

    def __call__(self, rank: int, values: Floats) -> Floats:
        self._parts[rank] = values
        self._barrier.wait()
        total = functools.reduce(np.add, self._parts)
        self._barrier.wait()
        return total

    def abort(self) -> None:
        """Let no rank wait for one that failed."""
        self._barrier.abort()


def is_summed(arch: str, node: Node) -> bool:
    """Return whether the ranks of a stage add up their values of this node."""
    rules = RULES[arch]
    weights = (".ffn_down.weight",) if rules.whole_attention else (".attn_output.weight", ".ffn_down.weight")
    return node.weight.endswith(weights) or node.name.startswith((rules.shared_sum or rules.experts_sum).format(""))


class Part:
    """A model or a slice of one, with 32-bit KV cache and plain attention: computed as exactly as llama.cpp can."""

    def __init__(
        self,
        path: Path,
        reduce: Callable[[Floats], Floats] | None = None,
        last_layer: int | None = None,
        *,
        first: bool = True,
    ) -> None:
        """With `last_layer`, computing ends after that layer, and `decode` gives what it gave. first: it begins with
        the model's first layer."""
        file = GgufFile.open(path)
        rules = RULES[file.architecture]
        self._takes_states = file.metadata["tokenizer.ggml.model"] == "none"
        embd = int(file.metadata[f"{file.architecture}.embedding_length"])
        self._reduce, self._input, self._states = reduce, np.empty(0, np.float32), np.empty(0, np.float32)
        self.sums = 0
        hooks = []
        if self._takes_states and (rules.scales_input or rules.takes_tokens or not first):
            changed = "inp_scaled" if rules.scales_input else rules.input_node
            hooks.append(Hook(lambda node: node.name == changed, lambda node: node.write(self._input)))
        if reduce:
            hooks.append(Hook(functools.partial(is_summed, file.architecture), self._sum))
        if last_layer is not None:
            hooks.append(Hook(lambda node: node.name == rules.end_node.format(last_layer), self._end))
        self._ends = last_layer is not None
        self._hooks = NodeHooks(hooks)
        self._model = llama.Model(path, repack=False)
        self._context = llama.Context(
            self._model,
            llama.ContextSizes(CONTEXT, cache_type("f32"), batch=64, outputs=64, flash_attention="off"),
            on_node=self._hooks.callback if hooks else None,
        )
        self._batch = llama.Batch(64, embd if self._takes_states else 0, as_tokens=rules.takes_tokens)

    def _sum(self, node: Node) -> None:
        assert self._reduce is not None
        node.write(self._reduce(node.read()))
        self.sums += 1

    def _end(self, node: Node) -> bool:
        self._states = node.read()
        return False

    def decode(self, rows: Floats | Sequence[int], start: int) -> Floats:
        """Logits, or states after `last_layer`, of all rows."""
        batch, n = self._batch, len(rows)
        if self._takes_states:
            self._input = np.ascontiguousarray(rows, np.float32)
            batch.embeddings[:n] = rows
        else:
            batch.tokens[:n] = rows
        batch.positions[:n] = range(start, start + n)
        batch.outputs[:n] = 1
        self._hooks.decode(self._context, batch, n, n)
        return self._states if self._ends else self._context.logits(0, n).copy()

    def close(self) -> None:
        self._context.close()
        self._model.close()


Calls = Sequence[tuple[Sequence[int], int]]  # tokens, and the position of the first


def run_local(model: Path, calls: Calls) -> list[Floats]:
    """Return what the whole model gives for these tokens, call by call."""
    part = Part(model)
    try:
        return [part.decode(tokens, start) for tokens, start in calls]
    finally:
        part.close()


def run_shards(model: Path, cuts: Sequence[Slice], calls: Calls, folder: Path) -> list[Floats]:
    """The same from slices side by side."""
    total = Sum(len(cuts))
    parts = [
        Part(write(model, cut, folder / f"{rank}.gguf"), functools.partial(total, rank))
        for rank, cut in enumerate(cuts)
    ]

    def decode(part: Part, rows: Floats, start: int) -> Floats:
        try:
            return part.decode(rows, start)
        except BaseException:
            total.abort()
            raise

    logits = []
    try:
        with ThreadPoolExecutor(len(parts)) as pool:
            for tokens, start in calls:
                rows = embedded(model, tokens)
                logits.append(np.concatenate(list(pool.map(lambda p: decode(p, rows, start), parts)), axis=1))  # noqa: B023
    finally:
        for part in parts:
            part.close()
    assert all(part.sums == parts[0].sums > 0 for part in parts)
    return logits


def run_stages(model: Path, layers: Sequence[Range], calls: Calls, folder: Path) -> list[Floats]:
    """The same from slices one after another."""
    file = GgufFile.open(model)
    parts = [
        Part(
            write(model, whole(file, part), folder / f"stage{i}.gguf"),
            last_layer=None if part is layers[-1] else len(part) - 1,
            first=i == 0,
        )
        for i, part in enumerate(layers)
    ]
    logits = []
    try:
        for tokens, start in calls:
            logits.append(functools.reduce(lambda rows, part: part.decode(rows, start), parts, embedded(model, tokens)))
    finally:
        for part in parts:
            part.close()
    return logits
