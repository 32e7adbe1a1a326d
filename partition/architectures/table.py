"""Table of all architectures whose models can be cut, and the reasons why others cannot be."""

from __future__ import annotations

from collections.abc import Mapping

from partition.architectures.dense import DENSE_ARCHITECTURES
from partition.architectures.description import PART, WHOLE, Architecture, Asserted, Refused, Rules
from partition.architectures.indexed import INDEXED_ARCHITECTURES
from partition.architectures.moe import MOE_ARCHITECTURES
from partition.architectures.recurrent import RECURRENT_ARCHITECTURES

__all__ = ["ARCHITECTURES", "ASSERTED", "REFUSED", "RULES", "has_flash"]

_FIRST = "each layer reads values that the first one made, beside what the layer before gives"
_KIND = "llama.cpp tells its kinds apart by their number of layers"
_STREAMS = "several hidden states go from layer to layer"
_DIFFUSION = "it fills in a whole text at once, and does not go on with one; `edge` does not run it either"
_DRAFT = "it drafts tokens for another model, and is none itself; `edge` does not run it either"
_SCALED = "llama.cpp scales what layers give by their number"
_LOOPS = "its layers are passed through several times"
_CODER = "an encoder comes before its layers"
_ENCODER = "it makes a vector of a text, each token of which sees all others"

REFUSED: Mapping[str, Refused] = {
    "gemma3n": Refused(
        "four hidden states go from layer to layer, each layer reads a part of `inp_per_layer`, which llama.cpp "
        "makes of the token and of what the first layer is given, and layers from the 21st of a part on read the keys "
        "and values of earlier ones",
        rope=PART,
        default_window=1,
    ),
    "minicpm3": Refused(_SCALED),
    "graniteswitch": Refused("llama.cpp takes tokens alone, which choose weights in each layer"),
    "cohere2moe": Refused("layers without experts differ by their number and their window at once"),
    "rwkv6": Refused(_SCALED),
    "rwkv7": Refused(_FIRST),
    "arwkv7": Refused(_FIRST),
    "baichuan": Refused(_KIND, rope=WHOLE),
    "chameleon": Refused("llama.cpp writes over 8192 logits, of picture tokens, in a part without the head, too"),
    "cogvlm": Refused("llama.cpp takes hidden states for pictures, which have weights of their own"),
    "deepseek4": Refused(_STREAMS),
    "glm5-next": Refused(_STREAMS),
    "kimi-k3": Refused(_FIRST),
    "hy_v4": Refused(_STREAMS),
    "minimax-01": Refused("how fast a layer forgets follows from its number among all layers"),
    "qwen4exp": Refused(_STREAMS),
    "talkie": Refused(_FIRST),
    "nanbeige": Refused(_LOOPS),
    "hrm_text": Refused(_LOOPS),
    "t5": Refused(_CODER),
    "dream": Refused(_DIFFUSION, rope=WHOLE, generates=False),
    "llada": Refused(_DIFFUSION, rope=WHOLE, generates=False),
    "llada-moe": Refused(_DIFFUSION, rope=WHOLE, generates=False),
    "rnd1": Refused(_DIFFUSION, rope=WHOLE, generates=False),
    "eagle3": Refused(_DRAFT),
    "dflash": Refused(_DRAFT),
    "gemma4-assistant": Refused(_DRAFT),
    "bert": Refused(_ENCODER, rope=PART, generates=False),
    "eurobert": Refused(_ENCODER, rope=PART, generates=False),
    "gemma-embedding": Refused(_ENCODER, generates=False),
    "jina-bert-v2": Refused(_ENCODER, generates=False),
    "jina-bert-v3": Refused(_ENCODER, generates=False),
    "modern-bert": Refused(_ENCODER, generates=False),
    "neo-bert": Refused(_ENCODER, generates=False),
    "nomic-bert": Refused(_ENCODER, rope=PART, generates=False),
    "nomic-bert-moe": Refused(_ENCODER, rope=PART, generates=False),
    "t5encoder": Refused(_ENCODER, generates=False),
}

ARCHITECTURES: Mapping[str, Architecture] = {
    **DENSE_ARCHITECTURES,
    **MOE_ARCHITECTURES,
    **INDEXED_ARCHITECTURES,
    **RECURRENT_ARCHITECTURES,
}
RULES: Mapping[str, Rules] = {name: architecture.rules for name, architecture in ARCHITECTURES.items()}
ASSERTED: Mapping[str, Asserted] = {**ARCHITECTURES, **REFUSED}


def has_flash(architecture: str) -> bool:
    """Return whether llama.cpp has flash attention for models of an architecture."""
    return architecture not in ASSERTED or ASSERTED[architecture].flash
