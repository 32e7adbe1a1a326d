"""Description of one architecture: a row of the tables.

Every row of the tables was checked against `src/models/<architecture>.cpp` of the pinned llama.cpp, and its stages
against the whole by `tests/cluster/test_architectures.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Dims = tuple[str | int, ...]  # names of sizes, or numbers; slowest first, as numpy has them
Table = Mapping[str, Dims]  # tensor names, those of layers without "blk.<n>."
Number = str | int | float | bool | tuple[int, ...]  # of metadata; text names a size


@dataclass(frozen=True, slots=True)
class Window:
    """An architecture whose layers take turns: attention over a window of tokens, and over all of them."""

    period: int  # where the file gives no pattern: of so many layers one is without the window
    optional: bool = False  # a window of 0 tokens means that no layer has one; else llama.cpp asserts that one has
    size: int = 0  # tokens, where the file does not say
    full_first: bool = False  # the one without is the first of them, not the last
    listed: bool = False  # a file must say it of each layer
    chunked: bool = False  # tokens attend to those of their chunk: position 8192 to none before it
    both: bool = False  # a stage has layers of both kinds: sizes of one follow from its having the window


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for cutting models of one architecture."""

    needs_output: bool = False  # the loader insists on output.weight; else the token table may be the head
    needs_bias: bool = False  # the loader insists on output.bias
    ff_key: str = "feed_forward_length"  # how wide the FFN is, or one of its experts
    window: Window | None = None
    scales_input: bool = False  # hidden states are multiplied by the root of n_embd before the first layer
    # The node where what comes in has been changed (by a norm, a scale, positions), so that stages behind the first
    # put there what they were given; "": nothing is changed.
    input_node: str = ""
    takes_tokens: bool = False  # llama.cpp takes no hidden states: they are put at `input_node`, over those of a token
    end_node: str = "l_out-{}"  # what the last layer gives; {}: its number
    deepstack: bool = False  # rows of a picture go to the ends of the first layers, too
    # With so many layers the loader takes attention's scale from n_embd / heads instead of the head size.
    layers_of_other_scale: int = 0
    # With so many layers, or so many and more, the loader makes another model; no stage can say so.
    layers_of_other_kind: tuple[int, ...] = ()
    other_kind_from: int = 0
    # Stages begin at a multiple of it: every so many layers one differs, by its number alone.
    period: int = 1
    no_stage_of: tuple[int, ...] = ()  # layers: a stage of so many would be read as something else
    # Metadata that a loader guesses where a model has so many layers: without it such a model is not cut.
    guessed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    whole_with: Mapping[str, str] = field(default_factory=dict)  # metadata not 0: why such a model is not cut
    if_missing: Mapping[str, int] = field(default_factory=dict)  # metadata that a stage has where the model has none
    period_key: str = ""  # metadata that holds such a period
    recurrent_every: int = 0  # where the file does not say which layers are recurrent: all but every so many
    # Metadata that a loader takes from the number of layers: its value times the root of that number.
    by_root_of_layers: Mapping[str, float] = field(default_factory=dict)
    shares_index: bool = False  # some layers look at the tokens that the last one with an index of its own chose
    fused_gate_up: bool = False  # ffn_up holds the rows of gate and then those of up
    shards_as: str = ""  # the architecture a shard is written as; "": its own
    whole_attention: str = ""  # why each rank computes all of attention, so that shards have parts of the rest alone
    experts_sum: str = "ffn_moe_out-{}"  # the node with the sum of a layer's experts; {}: its number
    # The node with that sum and the expert that all tokens pass through, where shards have parts of that one, too, as
    # its width follows from that of the others; "": every rank computes it.
    shared_sum: str = ""
    no_shards: str = ""  # why there can be none
    no_states: str = ""  # why keys and values of a sequence cannot be read, moved and kept
    rolls_back: bool = True  # rows at the end of a step can be forgotten, so that tokens are drafted


WHOLE, PART, UNCHECKED = "whole", "part", "unchecked"  # of a head: what RoPE turns


@dataclass(frozen=True, slots=True)
class Predictors:
    """Layers behind the last one that predict further tokens (multi-token prediction, MTP), where llama.cpp computes
    them. It stops the process on a layer without what is said here."""

    needs: tuple[str, ...] = ()  # tensors of such a layer, without "blk.<n>.", beside those its loader insists on
    most: int = 1  # layers that a file may have; of several the first one drafts
    cuts: bool = False  # its graph gives the hidden states of rows with logits alone, not of all
    zero: tuple[str, ...] = ()  # metadata that a file must not have, or have as 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asserted:
    """Assertions of llama.cpp about an architecture's files, beside sizes: it stops the process if a file breaks
    one."""

    rope: str = WHOLE  # `GGML_ASSERT(n_embd_head == n_rot)`; PART: it turns a part of each head, or nothing
    plain: bool = False  # a plain decoder layer, whose shapes follow from the metadata alone
    needs_gate: bool = False  # of experts: the loader takes none, the graph needs one
    needs_window: bool = False  # a window of 0 tokens is refused
    default_window: int | None = None  # tokens, where the file does not say; None: as the row's window has it
    twice_as_wide: bool = False  # `GGML_ASSERT(2 * n_embd == d_inner)`
    one_expert_is_dense: bool = False  # an expert count of 1 is read as a dense model
    # Of metadata: the value where the file does not say, the least and the most; None: any.
    counts: Mapping[str, tuple[int, int, int | None]] = field(default_factory=dict)
    flash: bool = True  # else its graph gives values in a shape at which flash attention stops the process
    predictors: Predictors | None = None  # None: llama.cpp computes none
    generates: bool = True  # else llama.cpp keeps no keys and values, and stops where it is asked for the next token


@dataclass(frozen=True, slots=True)
class Refused(Asserted):
    """An architecture that runs on one device alone."""

    why: str  # it cannot be cut
    rope: str = field(default=UNCHECKED, kw_only=True)


@dataclass(frozen=True, slots=True)
class Architecture(Asserted):
    """The tensors of one layer, the figures all models of the architecture share, and how they are cut."""

    attention: Table  # with the layer's norms
    dense: Table = field(default_factory=dict)  # feed-forward part; empty: always experts
    experts: Table = field(default_factory=dict)  # the same with experts; empty: never
    recurrent: Table = field(default_factory=dict)  # what recurrent layers have in place of `attention`
    windowed: Table = field(default_factory=dict)  # what layers with a window have in its place, where they differ
    # What layers with a feed-forward part have in its place, where each layer has one part only; empty: all have one.
    alone: Table = field(default_factory=dict)
    outer: Table = field(default_factory=lambda: {"output_norm.weight": ("embd",)})  # beside token table and head
    common: Mapping[str, Any] = field(default_factory=dict)  # figures, fields of edge.models.shapes.Shape
    keys: Mapping[str, Number] = field(default_factory=dict)  # metadata beside that of all architectures
    equal_heads: bool = False  # as many key-value heads as heads
    square_q: bool = False  # llama.cpp wants heads * head_size = embd
    always_tied: bool = False
    never_tied: bool = False
    rules: Rules = field(default_factory=Rules)
