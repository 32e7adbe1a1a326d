"""Description of one architecture, which is a row of the tables.

Every row was checked against `src/models/<architecture>.cpp` of the pinned llama.cpp. Its stages were checked against
the whole model by `tests/cluster/test_architectures.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Dims = tuple[str | int, ...]  # size names or numbers, slowest first as in numpy
Table = Mapping[str, Dims]  # dimensions by tensor name; names in layers are without "blk.<n>."
Number = str | int | float | bool | tuple[int, ...]  # type of metadata values; text names a size


SCALED_INPUT = "inp_scaled"  # node where Gemma scales the embeddings, including embeddings passed in directly


@dataclass(frozen=True, slots=True)
class Window:
    """Attention windows of an architecture whose layers alternate between a window of tokens and all tokens."""

    period: int  # default if the file has no pattern: one of this number of layers has no window
    # True if a window of 0 tokens means no windows; otherwise llama.cpp asserts that a layer has one.
    optional: bool = False
    size: int = 0  # default in tokens if the file has none
    full_first: bool = False  # true if the first layer of a period has no window, instead of the last
    listed: bool = False  # true if a file must list the layers with a window
    chunked: bool = False  # true if tokens attend to their chunk only, so that position 8192 attends to no earlier one
    both: bool = False  # true if every stage needs layers of both kinds, because some sizes depend on the window


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for cutting models of one architecture."""

    needs_output: bool = False  # the loader requires output.weight; otherwise the token table may be the head
    needs_bias: bool = False  # the loader requires output.bias
    ff_key: str = "feed_forward_length"  # metadata key with the width of the FFN, or of an expert
    window: Window | None = None
    scales_input: bool = False  # hidden states are multiplied by the root of n_embd before the first layer
    # Node at which the input has been changed (by a norm, a scale or positions). Later stages put their input there.
    # "": no change.
    input_node: str = ""
    takes_tokens: bool = False  # llama.cpp takes no hidden states, so they overwrite a token's rows at `input_node`
    end_node: str = "l_out-{}"  # output node of the last layer; {}: its number
    deepstack: bool = False  # rows of a picture are also added after each of the first layers
    # With this number of layers, the loader takes attention's scale from n_embd / heads instead of the head size.
    layers_of_other_scale: int = 0
    # With these numbers of layers, or from a number on, the loader makes another kind of model, which stages cannot
    # prevent.
    layers_of_other_kind: tuple[int, ...] = ()
    other_kind_from: int = 0
    # Stages begin at multiples of this period, because layers differ by their number alone.
    period: int = 1
    # A stage with one of these numbers of layers would be read as another kind of model.
    no_stage_of: tuple[int, ...] = ()
    # Metadata that the loader guesses for models of these numbers of layers. Without it, such a model is not cut.
    guessed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # Metadata that prevent cutting if they are not 0, with the reason.
    whole_with: Mapping[str, str] = field(default_factory=dict)
    if_missing: Mapping[str, int] = field(default_factory=dict)  # metadata that a stage gets if the model has none
    period_key: str = ""  # metadata key of a period for stages
    recurrent_every: int = 0  # default period of layers with attention; others are recurrent
    # Metadata that the loader computes from the number of layers: this value divided by the root of that number.
    by_root_of_layers: Mapping[str, float] = field(default_factory=dict)
    shares_index: bool = False  # some layers attend to tokens that an earlier layer's index selected
    fused_gate_up: bool = False  # ffn_up holds the rows of gate, then those of up
    shards_as: str = ""  # architecture that a shard is written as; "": the model's own
    # Reason why each rank computes all of attention, and only the rest is divided; "": attention is divided.
    whole_attention: str = ""
    experts_sum: str = "ffn_moe_out-{}"  # node with the sum of a layer's experts; {}: its number
    # Node with that sum plus the shared expert, if the shared expert is divided, too, because its width depends on the
    # width of the others. "": every rank computes the whole shared expert.
    shared_sum: str = ""
    no_shards: str = ""  # reason why layers cannot be divided
    no_states: str = ""  # reason why the KV cache of a sequence cannot be read, moved and stored
    rolls_back: bool = True  # rows at the end of a step can be removed, so that drafting is possible


WHOLE, PART, UNCHECKED = "whole", "part", "unchecked"  # part of a head that RoPE rotates


@dataclass(frozen=True, slots=True)
class Predictors:
    """Layers after the last one that predict further tokens (multi-token prediction, MTP), if llama.cpp computes them.

    llama.cpp aborts on a layer that breaks these conditions.
    """

    needs: tuple[str, ...] = ()  # required tensors of such a layer, without "blk.<n>.", in addition to the loader's own
    most: int = 1  # limit of such layers in a file; the first one drafts
    cuts: bool = False  # its graph returns hidden states only of rows with logits
    zero: tuple[str, ...] = ()  # metadata that must be missing or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asserted:
    """Assertions of llama.cpp about an architecture's files, besides sizes. llama.cpp aborts if a file breaks one."""

    rope: str = WHOLE  # WHOLE: `GGML_ASSERT(n_embd_head == n_rot)`; PART: RoPE rotates a part of each head, or nothing
    plain: bool = False  # a plain decoder layer, whose shapes follow from the metadata
    needs_gate: bool = False  # the graph needs a gating function of experts, and the loader has no default
    needs_window: bool = False  # a window of 0 tokens is refused
    default_window: int | None = None  # default window in tokens; None: as in the row's window
    twice_as_wide: bool = False  # `GGML_ASSERT(2 * n_embd == d_inner)`
    one_expert_is_dense: bool = False  # a model with one expert is read as a dense model
    # Metadata key to default, minimum and maximum (None: no maximum).
    counts: Mapping[str, tuple[int, int, int | None]] = field(default_factory=dict)
    flash: bool = True  # false if its values have a shape at which flash attention aborts
    predictors: Predictors | None = None  # None if llama.cpp does not compute predictor layers
    generates: bool = True  # false if llama.cpp has no KV cache and aborts when the next token is requested


@dataclass(frozen=True, slots=True)
class Refused(Asserted):
    """An architecture that runs on one device only."""

    why: str  # reason why it cannot be cut
    rope: str = field(default=UNCHECKED, kw_only=True)


@dataclass(frozen=True, slots=True)
class Architecture(Asserted):
    """Tensors of a layer, common figures of all models of the architecture, and the rules for cutting them."""

    attention: Table  # attention and the layer's norms
    dense: Table = field(default_factory=dict)  # feed-forward part; empty: always experts
    experts: Table = field(default_factory=dict)  # feed-forward part with experts; empty: never experts
    recurrent: Table = field(default_factory=dict)  # tensors that replace `attention` in recurrent layers
    # Tensors that replace `attention` in layers with a window, if they differ.
    windowed: Table = field(default_factory=dict)
    # Tensors that replace `attention` in feed-forward layers, if each layer has only one part. Empty: layers have all
    # parts.
    alone: Table = field(default_factory=dict)
    # Tensors outside layers, besides token table and head.
    outer: Table = field(default_factory=lambda: {"output_norm.weight": ("embd",)})
    # Common figures, which are fields of edge.models.shapes.Shape.
    common: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Number] = field(default_factory=dict)  # metadata in addition to the common ones
    equal_heads: bool = False  # the number of KV heads equals the number of heads
    square_q: bool = False  # llama.cpp requires heads * head_size = embd
    always_tied: bool = False
    never_tied: bool = False
    rules: Rules = field(default_factory=Rules)
