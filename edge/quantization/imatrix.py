"""Importance matrix: run a model over a text, and sum the squares of the inputs of each weight.

The matrix covers the same tensors as llama.cpp's own tool: the weights of the layers. By default it does not include
the output matrix. That matrix quantizes well without it, and few inputs would have to represent a whole vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama.ggml import Node
from edge.llama.hooks import Hook
from edge.llama.interrupt import interrupt_stops
from edge.llm.engine import Engine
from edge.llm.options import DEFAULTS, EngineOptions
from edge.quantization.divergence import CHUNK_TOKENS, Chunks, options_for
from partition.model.file import ModelFile, ModelLike
from partition.model.model import ModelShape
from quant.gguf.file import GgufFile
from quant.gguf.imatrix import Entry, ImportanceMatrix
from quant.gguf.part import TensorInfo

Progress = Callable[[int, int], None]  # arguments: chunks done, chunks in total

_PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")
_LAST_NORM = "result_norm"  # name of the node before the output matrix
_SQUARED_VALUES = 1 << 20  # float64 values squared together


def collect(
    model: ModelLike,
    text: str,
    options: EngineOptions = DEFAULTS,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    most: int | None = None,
    within_s: float | None = None,
    output: bool = False,
    dataset: str = "",
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ImportanceMatrix:
    """Compute the importance matrix of a model on `text`. Every chunk is computed with an empty cache.

    options: engine options; their context and outputs do not matter, because the chunks determine both
    chunk_tokens: tokens of a chunk
    most: maximum number of chunks; None: all
    within_s: no chunk starts after this time in seconds, by `clock`
    output: include the output matrix, even if it is also the token table
    dataset: name of the text, written into the file

    Raises TextError if the text is too short, and EngineError if the model computes NaN or infinite values. Raises the
    errors of Engine, and Interrupted after Ctrl-C.
    """
    file = ModelFile.open(model)
    squares = Squares(covered(file, output))
    hooks = [squares.hook] if output else [squares.hook, _END_BEFORE_OUTPUT]
    options = options_for(options, chunk_tokens, file.shape.n_vocab)
    if options.memory is not None:
        options = replace(options, reserved=_results_bytes(squares, file.shape, options))
    with Engine(file, options, hooks) as engine, interrupt_stops(engine):
        chunks = Chunks.cut(engine.model, text, chunk_tokens, most)
        # llama.cpp's last layer skips rows without logits, so all rows must produce logits.
        step = min(engine.batch, engine.outputs)
        began, done = clock(), 0
        for i in range(len(chunks)):
            if i and within_s is not None and clock() - began > within_s:
                break
            tokens = chunks.inputs(i)
            engine.kv_clear()
            for start in range(0, len(tokens), step):
                squares.begin()
                engine.decode(tokens[start : start + step], start, outputs="all")
            done = i + 1
            if progress:
                progress(done, len(chunks))
    datasets = (dataset,) if dataset else ()
    return ImportanceMatrix(squares.entries(file.path.name), datasets, done, chunk_tokens)


def _results_bytes(squares: Squares, shape: ModelShape, options: EngineOptions) -> int:
    """Return the bytes of the sums, of the summed inputs, and of unused logits."""
    inputs = 3 * 4 * options.rows * max(1, shape.n_experts_used) * squares.widest
    return squares.n_bytes + inputs + 2 * 8 * _SQUARED_VALUES + 4 * shape.n_vocab * (options.outputs or 1)


class Squares:
    """Sums of squares of the inputs of weights, over all graphs computed with `hook`."""

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        """tensors: the weights by name"""
        self._tensors = tensors
        self._sums: dict[str, NDArray[np.float64]] = {}  # shape [experts, columns]
        self._counts: dict[str, NDArray[np.int64]] = {}  # shape [experts]
        # Address of an input, its sums, its number of rows.
        self._last: tuple[int, NDArray[np.float64], int] | None = None
        self.hook = Hook(self._wants, self._add)

    @property
    def widest(self) -> int:
        """Number of columns of the widest weight."""
        return max((tensor.shape[0] for tensor in self._tensors.values()), default=0)

    @property
    def n_bytes(self) -> int:
        """Bytes of all sums and counts, and of the entries made from them."""
        values = sum(int(np.prod((t.shape[0], *t.shape[2:]), dtype=np.int64)) for t in self._tensors.values())
        return (8 + 4 + 4) * values

    def begin(self) -> None:
        """Forget the last input. Call this before each graph, because a new input may have the address of an old
        one."""
        self._last = None

    def entries(self, model: str) -> dict[str, Entry]:
        """Return the entries by weight. Raises EngineError if there are none, or if a sum is not finite."""
        if not self._sums:
            raise EngineError(f"{model}: no weight of its layers is multiplied with anything; it cannot be calibrated")
        broken = [name for name, sums in self._sums.items() if not np.isfinite(sums).all()]
        if broken:
            raise EngineError(f"{model} computes inputs of {broken[0]} that are not numbers; its weights are damaged")
        return {name: Entry(sums.astype(np.float32), self._counts[name]) for name, sums in self._sums.items()}

    def _wants(self, node: Node) -> bool:
        return node.op in _PRODUCTS and node.weight in self._tensors

    def _add(self, node: Node) -> None:
        name = node.weight
        columns, _, *more = self._tensors[name].shape
        matrices = int(np.prod(more, dtype=np.int64))
        if name not in self._sums:
            self._sums[name] = np.zeros((matrices, columns))
            self._counts[name] = np.zeros(matrices, np.int64)
        if node.op == "MUL_MAT_ID":
            self._add_experts(name, node)
            return
        sums, rows = self._summed(node.sources[1])  # [ne2, columns]
        # If a weight has several matrices, they take the inputs in turn. A single matrix takes all inputs.
        self._sums[name] += sums.reshape(-1, matrices, columns).sum(axis=0)
        self._counts[name] += rows // matrices

    def _summed(self, source: int) -> tuple[NDArray[np.float64], int]:
        """Return the sums of squares of an input [ne2, columns], and its number of rows.

        Products with the same input, such as queries, keys and values, follow each other. Their input is summed once.
        """
        if self._last is None or self._last[0] != source:
            x = Node(source).values()
            by_matrix = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1, x.shape[3])
            sums = np.stack([_squares(rows) for rows in by_matrix])
            self._last = source, sums, x.size // x.shape[3]
        return self._last[1], self._last[2]

    def _add_experts(self, name: str, node: Node) -> None:
        """Add the inputs of expert products: [tokens, used experts or 1, columns], with expert IDs [tokens, used
        experts]."""
        x = Node(node.sources[1]).values()[0]
        ids = Node(node.sources[2]).values()[0, 0]
        used = ids.shape[1]
        order = np.argsort(ids, axis=None, kind="stable")
        experts, starts = np.unique(ids.reshape(-1)[order], return_index=True)
        for expert, places in zip(experts, np.split(order, starts[1:]), strict=True):
            # If all experts of a token have the same input, the array contains it only once.
            self._sums[name][expert] += _squares(x[places // used, places % used % x.shape[1]])
            self._counts[name][expert] += len(places)


def _squares(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the squares of [rows, columns], summed over rows."""
    sums = np.zeros(x.shape[1])
    step = max(1, _SQUARED_VALUES // x.shape[1])
    for start in range(0, len(x), step):
        rows = x[start : start + step].astype(np.float64)
        sums += np.einsum("ij,ij->j", rows, rows)
    return sums


def covered(file: GgufFile, output: bool = False) -> dict[str, TensorInfo]:
    """Return the weights that an importance matrix can cover. output: include the output matrix"""
    head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    return {
        name: tensor
        for name, tensor in file.tensors.items()
        if len(tensor.shape) > 1 and (name.startswith("blk.") or (output and name == head))
    }


_END_BEFORE_OUTPUT = Hook(lambda node: node.name == _LAST_NORM, lambda node: False)
