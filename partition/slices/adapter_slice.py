"""Slices of LoRA adapters: the part of an adapter for a rank's slice of the model, as a recipe.

Each pair of matrices is cut like the weight that it changes, with the pieces of that weight's slice. If the weight's
rows are cut, its outputs are cut, and so are the rows of B. If the values of its rows are cut, its inputs are cut, and
so are the values of A's rows. The results are then partial, and are summed together with the weight's results.
"""

from __future__ import annotations

from collections.abc import Iterator

from partition.errors import CannotSlice
from partition.model.check_adapter import ALPHA, TOKEN_TABLE, A, B, Pair, adapter_pairs
from partition.model.model import block_of
from partition.plan.plan import Slice
from partition.slices.gguf_slice import joined
from partition.slices.metadata import architecture
from partition.slices.recipe import Recipe
from partition.slices.source import Source
from partition.slices.tensors import Piece, Placed, layer_ranges, pieces_of, placed_piece
from quant.gguf.file import GgufFile
from quant.gguf.writer import encoded, header

_HEAD = "output.weight"


def adapter_recipe(adapter: GgufFile, digest: str, model: GgufFile, cut: Slice) -> Recipe:
    """Return the recipe that cuts an adapter for the slice `cut` of its model.

    digest: SHA-256 of the adapter's file

    If the adapter changes no weight of the slice, the recipe has no tensors. Raises ModelFileError if the adapter
    belongs to another model. Raises CannotSlice if it changes a weight that cannot be changed in slices.
    """
    source = Source.from_file(model)
    pairs = adapter_pairs(adapter, model)
    placed = [part for name, pair in pairs.items() for part in _placed(source, cut, name, pair)]
    metadata = {
        "general.type": encoded("str", "adapter"),
        "general.architecture": encoded("str", architecture(source, cut)),
        "adapter.type": encoded("str", "lora"),
    }
    if ALPHA in adapter.metadata:
        metadata[ALPHA] = adapter.raw_value(ALPHA)
    return joined(adapter, digest, header(metadata, [part.tensor for part in placed]), placed)


def _placed(source: Source, cut: Slice, name: str, pair: Pair) -> Iterator[Placed]:
    """Yield the slice's parts of the matrices that change one weight."""
    for piece in _pieces(source, cut, name):
        for matrix, suffix, dimension in ((pair.a, A, 0), (pair.b, B, 1)):
            is_cut = piece.dimension == dimension
            part = Piece(piece.name + suffix, dimension if is_cut else -1, piece.ranges)
            yield placed_piece(matrix, part, cut)


def _pieces(source: Source, cut: Slice, name: str) -> list[Piece]:
    """Return the slice's pieces of a weight. Raises CannotSlice if llama.cpp would not apply an adapter to them."""
    layer = block_of(name)
    if layer is not None and layer < source.shape.n_layers:
        if layer not in range(cut.layers.start, cut.layers.stop):
            return []
        new = f"blk.{layer - cut.layers.start}.{name.split('.', 2)[2]}"
        return pieces_of(source, new, layer_ranges(source, cut, layer))
    if name == _HEAD and source.rules.needs_output:
        return [Piece(name, 1, [cut.vocab])] if cut.vocab else []
    why = {
        TOKEN_TABLE: "rows of the token table are looked up by this device, without llama.cpp",
        _HEAD: f"slices have the output matrix of {source.file.architecture} models as their token table",
    }
    raise CannotSlice(
        f"the adapter changes {name!r}, which it cannot on several devices: "
        f"{why.get(name, 'it is in no layer of a slice')}; run it on one device, or use an adapter of the layers alone"
    )
