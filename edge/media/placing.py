"""Rows of pictures in an engine's batches, and the positions of the tokens after them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama.batch import Batch
from edge.media.media import EmbeddingRows, embeddings_of, row_of
from partition.architectures.table import RULES
from partition.model.file import ModelFile
from partition.plan.plan import Plan
from partition.slices.rules import takes_tokens


class RowPositions:
    """Positions of sequences in a model with multi-part picture positions (M-RoPE).

    A picture takes fewer positions than it has rows, so a token's position differs from its place in the history.
    """

    def __init__(self) -> None:
        # For each sequence: (place of a picture, rows minus positions).
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def add(self, sequence: int, place: int, rows: EmbeddingRows) -> None:
        """Record a picture at a place of a sequence."""
        self.remove(sequence, place)
        self._spans.setdefault(sequence, []).append((place, len(rows.embeddings) - rows.n_positions))

    def remove(self, sequence: int, place: int) -> None:
        """Forget pictures from a place on."""
        if sequence in self._spans:
            self._spans[sequence] = [span for span in self._spans[sequence] if span[0] < place]

    @property
    def any(self) -> bool:
        """True if any pictures may be recorded."""
        return bool(self._spans)

    def clear(self) -> None:
        self._spans.clear()

    def position_of(self, sequence: int, place: int) -> int:
        """Return the position of a place that is not inside a picture."""
        return place - sum(fewer for start, fewer in self._spans.get(sequence, ()) if start < place)


class PlacedRows:
    """Mixin of an engine that accepts pictures. It fills batches, and converts places of a history to positions."""

    media_problem = ""  # reason why no prompt may have pictures or sounds
    batch: int
    model: Any

    @cached_property
    def embedding_batch(self) -> Batch:
        """Batch of embeddings, in addition to the batch of tokens."""
        return Batch(self.batch, self.model.n_embd_inp)

    @cached_property
    def row_positions(self) -> RowPositions:
        """Places of pictures that have fewer positions than rows."""
        return RowPositions()

    def place_rows(
        self,
        rows: Batch,
        tokens: Sequence[int] | NDArray[np.int32],
        positions: NDArray[np.int_],
        sequences: NDArray[np.int_],
    ) -> None:
        """Fill in the positions of rows and, for rows of a picture, their embeddings. All rows of a picture are in one
        sequence.

        Raises EngineError if the rows belong to several pictures, or if the picture no longer exists.
        """
        n, first = len(tokens), int(tokens[0])
        rows.sequences[:n], rows.causal, rows.offsets, rows.deep = sequences, True, None, None
        if first >= 0:
            rows.positions[:n] = positions
            if self.row_positions.any:
                rows.positions[:n] = [*map(self.row_positions.position_of, sequences.tolist(), positions.tolist())]
            return
        media, row = embeddings_of(first), row_of(first)
        if list(tokens) != media.ids[row : row + n]:
            raise EngineError("a step with rows of a picture cannot have other rows")
        values, width = media.embeddings[row : row + n], rows.embeddings.shape[1]
        rows.embeddings[:n], rows.causal = values[:, :width], media.causal
        if values.shape[1] > width:  # ranks need these rows, because their slices do not add them
            rows.deep = np.ascontiguousarray(values[:, width:].reshape(n, -1, width).swapaxes(0, 1))
        rows.positions[:n] = positions
        if media.offsets is not None:
            sequence, start = int(sequences[0]), int(positions[0]) - row
            self.row_positions.add(sequence, start, media)
            rows.positions[:n] = self.row_positions.position_of(sequence, start)
            rows.offsets = media.offsets[:, row : row + n]

    def kv_remove(self, sequence: int, start: int, end: int = -1) -> bool:
        """Forget places [start, end) of a sequence, as the engine's own method does for positions."""
        position = self.row_positions.position_of(sequence, start)
        self.row_positions.remove(sequence, start)
        engine: Any = super()
        return bool(engine.kv_remove(sequence, position, end))

    def kv_clear(self) -> None:
        self.row_positions.clear()
        engine: Any = super()
        engine.kv_clear()


class RankRows(PlacedRows):
    """The same mixin for rank 0, whose batches always contain embeddings."""

    file: ModelFile
    plan: Plan

    @property
    def media_problem(self) -> str:  # type: ignore[override]
        """Reason why no prompt may have pictures or sounds; "" if it may."""
        arch = self.file.architecture
        if takes_tokens(arch):
            return f"ranks of {arch} models compute with tokens, and pictures have none; load this model on one device"
        n_deep, rules = self.file.metadata.get(f"{arch}.n_deepstack_layers"), RULES.get(arch)
        n_first = len(self.plan.stages[0].layers)
        if self.file.metadata.get(f"{arch}.deepstack_mapping") or (n_deep and not (rules and rules.deepstack)):
            return f"how pictures of {arch} models go to later layers is not known here; load this model on one device"
        if isinstance(n_deep, int) and n_deep > n_first:
            return (
                f"pictures go to the first {n_deep} layers of this model, and the first stage has {n_first} of them;"
                " let it have more"
            )
        return ""
