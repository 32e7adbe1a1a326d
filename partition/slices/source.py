"""A model file as the source of slices: its rules, its sizes, and its possible cuts."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm, sqrt

from partition.architectures.description import Rules
from partition.architectures.table import ARCHITECTURES, REFUSED, RULES
from partition.errors import CannotSlice
from partition.model.check_architecture import recurrent_layers
from partition.model.file import ModelFile
from partition.model.metadata import Metadata
from partition.model.model import ModelShape, block_of
from partition.plan.plan import Range, Slice
from partition.slices.rules import COMMON, CUTS, DOWN, HEAD_VECTORS, POSITIONS, SHARED, Cut
from quant.gguf.file import GgufFile, TensorInfo
from quant.gguf.header import GgufArray

WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"
INDEXES = "attention.indexer.types"
QUERY_NORM = "attn_q_norm.weight"  # multiplies queries, so that it can absorb a change of attention's scale
_SHARED_FROM = 1 << 20  # tokens of context of GLM 5.2, whose layers share indexes; GLM 5 has less


@dataclass(frozen=True)
class Source:
    """Model file of an architecture whose slices are known to compute the same as the whole model."""

    file: GgufFile
    meta: Metadata
    shape: ModelShape
    rules: Rules

    @classmethod
    def from_file(cls, file: GgufFile) -> "Source":
        """Return `file` as a source.

        Raises CannotSlice if not even its layers can be separated, and ModelFileError for a bad file.
        """
        meta = Metadata(file)
        rules = RULES.get(file.architecture)
        if rules is None and file.architecture in REFUSED:
            raise CannotSlice(
                f"{file.architecture} models cannot be cut: {REFUSED[file.architecture].why}; run it on one device"
            )
        if rules is None:
            raise CannotSlice(
                f"cutting the architecture {file.architecture!r} has not been checked (known are {', '.join(RULES)}); "
                "run it on one device"
            )
        if len(file.paths) > 1:
            raise CannotSlice(
                f"{file.path.name} is split over {len(file.paths)} files; make it one with llama-gguf-split --merge"
            )
        shape = file.shape if isinstance(file, ModelFile) else ModelShape.from_gguf(file)
        source = cls(file, meta, shape, rules)
        source._check_layers()
        source._check_tensors()
        source._check_scale()
        return source

    def _check_layers(self) -> None:
        """Raise CannotSlice if llama.cpp would read parts of this model as another kind of model."""
        n, rules = self.shape.n_layers, self.rules
        if n in rules.layers_of_other_kind or (rules.other_kind_from and n >= rules.other_kind_from):
            raise CannotSlice(
                f"llama.cpp takes {self.file.architecture} models of {n} layers for another kind than those of fewer; "
                "run it on one device"
            )
        for name, reason in rules.whole_with.items():
            if self.meta.count(name, 0):
                raise CannotSlice(f"this {self.file.architecture} model cannot be cut: {reason}; run it on one device")
        for name, guessed in rules.guessed.items():
            if n in guessed and name not in self.meta:
                raise CannotSlice(
                    f"{self.meta.key(name)} is missing, which llama.cpp guesses from the {n} layers and could not from "
                    "those of a part; convert the model again, or run it on one device"
                )
        if any(self.shape.n_heads) and not all(self.shape.n_heads):
            raise CannotSlice(
                "some layers have no attention heads; a part that begins with one would have none; run it on one device"
            )

    def _check_tensors(self) -> None:
        names = {*COMMON, *HEAD_VECTORS, POSITIONS, "token_embd.weight", "output.weight"}
        for name in self.file.tensors:
            block = block_of(name)
            if block is None and name not in names:
                raise CannotSlice(
                    f"the purpose of the tensor {name!r} in a slice is not known; run the model on one device"
                )
        described = ARCHITECTURES[self.file.architecture]
        if not described.recurrent and all(self.shape.n_heads_kv):
            for layer in range(self.shape.n_layers):
                if "attn_output.weight" not in self.block(layer):
                    raise self._missing(layer, "attn_output.weight")
                if self.down(layer) is None:
                    raise self._missing(layer, self.down_name)
        for name in ("token_embd.weight", *described.outer):
            if name.startswith(("token_embd", "output_norm")) and name not in self.file.tensors:
                raise CannotSlice(f"the tensor {name!r} is missing; download or convert the model again")

    def _missing(self, layer: int, name: str) -> CannotSlice:
        return CannotSlice(f"layer {layer} has no {name}, which others have; run the model on one device")

    def _check_scale(self) -> None:
        """Raise CannotSlice if no part of the model would have the model's attention scale."""
        if self.scale_is_fixed() and self.shape.n_embd // max(self.heads, 1) != self.shape.head_k:
            raise self.other_scale()

    def scale_is_fixed(self) -> bool:
        """Return whether llama.cpp takes attention's scale from the number of heads, and no tensor can correct it."""
        layers = range(self.shape.n_layers)
        return len(layers) == self.rules.layers_of_other_scale and any(QUERY_NORM not in self.block(n) for n in layers)

    def other_scale(self) -> CannotSlice:
        """Return the error for a slice that would compute with another attention scale."""
        return CannotSlice(
            f"attention's scale in this {self.file.architecture} model follows from its {self.shape.n_layers} layers "
            f"and {self.heads} heads, and would be another in a part of it; run it on one device"
        )

    @cached_property
    def head(self) -> TensorInfo:
        """Output matrix, which is the token table in a tied model."""
        tensors = self.file.tensors
        return tensors.get("output.weight") or tensors["token_embd.weight"]

    @cached_property
    def down_name(self) -> str:
        """Name of the FFN's last matrix, dense or of experts, in the first layer."""
        dense, experts = DOWN
        return dense if f"blk.0.{dense}" in self.file.tensors else experts

    def down(self, layer: int) -> TensorInfo | None:
        """Return the FFN's last matrix in a layer; None if the layer has none."""
        dense, experts = DOWN
        block = self.block(layer)
        return block.get(dense) or block.get(experts)

    @cached_property
    def heads(self) -> int:
        """Query heads of a layer; the maximum if layers differ."""
        return max(self.shape.n_heads)

    @cached_property
    def heads_kv(self) -> int:
        return max(self.shape.n_heads_kv)

    def head_sizes(self, layer: int) -> tuple[int, int]:
        """Return the values of one head's key and of one head's value in a layer. Window layers may have other
        sizes."""
        key, value = self.shape.head_k, self.shape.head_v
        if not self.windowed[layer]:
            return key, value
        return self.meta.count("attention.key_length_swa", key), self.meta.count("attention.value_length_swa", value)

    @cached_property
    def ff(self) -> int:
        """Columns to divide, of a layer's FFN or of one of its experts.

        If layers differ, this is the width with the fewest units, so that a rank with some of its units has some of
        each layer's.
        """
        units = self._ff_units
        return min(units, key=lambda columns: (columns // units[columns], -columns), default=1)

    @cached_property
    def _ff_units(self) -> dict[int, int]:
        """Unit of a rank's columns by number of columns of an FFN. A rank's columns are a multiple of the unit."""
        result: dict[int, int] = {}
        for layer in range(self.shape.n_layers):
            down, shared = self.down(layer), self.block(layer).get("ffn_down_shexp.weight")
            if down:
                columns, units = down.shape[0], [down.type.block]
                if shared and self.rules.shared_sum:
                    units.append(shared.type.block // gcd(shared.type.block, shared.shape[0] // columns))
                result[columns] = lcm(result.get(columns, 1), *units)
        return result

    def part(self, ff: Range, layer: int) -> Range:
        """Return the columns of one layer for a part of `self.ff`: about the same part, in whole units."""
        columns = self.columns(layer)
        if columns in (0, self.ff):
            return ff
        unit = self._ff_units[columns]
        start, stop = ((2 * edge * columns // (self.ff * unit) + 1) // 2 * unit for edge in (ff.start, ff.stop))
        return Range(start, stop)

    @cached_property
    def turned(self) -> int:
        """Values of a head that RoPE rotates."""
        return self.meta.count("rope.dimension_count", self.shape.head_k)

    def columns(self, layer: int) -> int:
        """Return the columns of one layer's FFN; 0 if it has none."""
        down = self.down(layer)
        return down.shape[0] if down else 0

    @cached_property
    def recurrent(self) -> tuple[bool, ...]:
        """For each layer, whether it is recurrent instead of using attention."""
        return recurrent_layers(self.meta, self.shape)

    @cached_property
    def no_stage_of(self) -> tuple[int, ...]:
        """Numbers of layers that a stage cannot have, unless it is the whole model."""
        never = {*self.rules.no_stage_of, *self.rules.layers_of_other_kind}
        layers = range(self.shape.n_layers)
        if any(QUERY_NORM not in self.block(n) for n in layers) and (
            self.shape.n_embd // max(self.heads, 1) != self.shape.head_k
        ):
            never.add(self.rules.layers_of_other_scale)
        return tuple(sorted(never - {0, self.shape.n_layers}))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Layers that a stage can begin with.

        If some layers are recurrent and others have attention, every stage needs both kinds. The same applies to layers
        with and without a window if llama.cpp distinguishes them by it, because llama.cpp aborts without layers of one
        kind. Stages also begin at multiples of a period if layers differ by their number.
        """
        key, rules = self.rules.period_key, self.rules
        period = lcm(rules.period, self.meta.count(key, 1, least=1) if key else 1)
        kinds = [
            "recurrent" if recurrent else "attention" if heads else ""
            for recurrent, heads in zip(self.recurrent, self.shape.n_heads_kv, strict=True)
        ]
        if any(self.windowed) and (rules.period > 1 or (rules.window and rules.window.both)):
            kinds = ["window" if windowed else "all" for windowed in self.windowed]
        needed = set(kinds) - {""}
        result = [0]
        for start in range(period, len(kinds), period):
            before, after = kinds[result[-1] : start], kinds[start:]
            if not self.own_index[start]:
                continue
            if needed <= set(before) and needed <= set(after) and not {len(before), len(after)} & set(self.no_stage_of):
                result.append(start)
        return tuple(result)

    @cached_property
    def own_index(self) -> tuple[bool, ...]:
        """For each layer, whether it selects its attended tokens itself, or attends to all."""
        layers, value = range(self.shape.n_layers), self.file.metadata.get(self.meta.key(INDEXES))
        if not self.rules.shares_index:
            return (True,) * len(layers)
        if isinstance(value, GgufArray):
            return tuple(bool(item) for item in value[: len(layers)])
        if value is not None or self.shape.context_length < _SHARED_FROM:
            return (bool(1 if value is None else value),) * len(layers)
        return tuple(layer < 2 or layer % 4 == 2 for layer in layers)  # same as llama.cpp's rule for GLM 5.2

    @cached_property
    def windowed(self) -> tuple[bool, ...]:
        """For each layer, whether its attention is limited to the window."""
        n_layers, window = self.shape.n_layers, self.rules.window
        if window is None or (window.optional and not self.meta.count(WINDOW, window.size)):
            return (False,) * n_layers
        value = self.file.metadata.get(self.meta.key(PATTERN))
        if isinstance(value, GgufArray):
            flags = [bool(item) for item in value[:n_layers]]
            return (*flags, *[False] * (n_layers - len(flags)))
        period = self.meta.count(PATTERN, window.period)
        full = 0 if window.full_first else period - 1
        return tuple(period == 0 or layer % period != full for layer in range(n_layers))

    def block(self, layer: int) -> dict[str, TensorInfo]:
        """Return the tensors of one layer in file order, by their names without "blk.<n>."."""
        return self._blocks[layer]

    @cached_property
    def _blocks(self) -> list[dict[str, TensorInfo]]:
        blocks: list[dict[str, TensorInfo]] = [{} for _ in range(self.shape.n_layers)]
        for name, tensor in self.file.tensors.items():
            layer = block_of(name)
            if layer is not None and layer < len(blocks):
                blocks[layer][name.split(".", 2)[2]] = tensor
        return blocks

    @cached_property
    def head_unit(self) -> int:
        """Unit of a rank's heads, so that attn_output is cut between quantization blocks."""
        block = _blocks(self.block(layer).get("attn_output.weight") for layer in range(self.shape.n_layers))
        return block // gcd(block, self.shape.head_v) if self.shape.head_v else 1

    @cached_property
    def ff_unit(self) -> int:
        """Unit of a rank's FFN columns."""
        return self._ff_units.get(self.ff, 1)

    def cut_of(self, name: str) -> Cut | None:
        """Return the part of a layer's tensor that a shard has; None if it is unknown. name: without "blk.<n>."."""
        if self.rules.shared_sum and name in SHARED:
            return SHARED[name]
        cut = CUTS.get(name)
        if not self.rules.whole_attention or cut in (Cut.FF_ROWS, Cut.FF_ITEMS, Cut.FIRST):
            return cut
        return Cut.WHOLE if cut or name in self._described else None

    @cached_property
    def _described(self) -> frozenset[str]:
        """Tensors that layers of the architecture have."""
        architecture = ARCHITECTURES[self.file.architecture]
        return frozenset().union(
            architecture.attention,
            architecture.dense,
            architecture.experts,
            architecture.recurrent,
            architecture.windowed,
        )

    def is_whole(self, cut: Slice) -> bool:
        """Return whether `cut` contains all heads and columns of its layers."""
        return cut.heads == Range(0, self.heads) and cut.ff == Range(0, self.ff)

    def query_scale(self, cut: Slice) -> float:
        """Return the factor for the slice's queries that gives the attention scores of the whole model.

        It differs from 1 if llama.cpp takes attention's scale from a number of layers and heads that the slice does not
        have.
        """
        other, shape = self.rules.layers_of_other_scale, self.shape
        if not other:
            return 1.0
        heads = shape.n_heads[0]
        local = heads if self.is_whole(cut) else len(cut.heads)
        needed = shape.n_embd // heads if shape.n_layers == other else shape.head_k
        actual = shape.n_embd // local if len(cut.layers) == other else shape.head_k
        return sqrt(actual / needed)  # attention divides by the square roots of these


def _blocks(tensors: Iterable[TensorInfo | None]) -> int:
    """Return the least number of values that is a multiple of the quantization block in each of these tensors."""
    return lcm(*(tensor.type.block for tensor in tensors if tensor))
