"""Table of all architectures whose models can be cut, and reasons why others cannot."""

from __future__ import annotations

from collections.abc import Mapping

from partition.architectures.dense import DENSE_ARCHITECTURES
from partition.architectures.description import PART, WHOLE, Architecture, Asserted, Refused, Rules
from partition.architectures.indexed import INDEXED_ARCHITECTURES
from partition.architectures.moe import MOE_ARCHITECTURES
from partition.architectures.recurrent import RECURRENT_ARCHITECTURES

__all__ = ["ARCHITECTURES", "ASSERTED", "REFUSED", "RULES", "has_flash"]

_FIRST = "each layer reads values of the first layer as well as those of the layer before"
_KIND = "llama.cpp recognizes the variant by the number of layers"
_STREAMS = "each layer passes several hidden states to the next"
_DIFFUSION = "it fills in a whole text instead of continuing one; `edge` does not run it either"
_DRAFT = "it only drafts tokens for another model; `edge` does not run it either"
_SCALED = "llama.cpp scales the output of a layer by its index or by the number of layers"
_LOOPS = "each token passes through its layers several times"
_CODER = "an encoder comes before its layers"
_ENCODER = "it makes a vector of a text, in which each token attends to all others"

REFUSED: Mapping[str, Refused] = {
    "gemma3n": Refused(
        "each layer passes four hidden states to the next and reads a part of `inp_per_layer`, which llama.cpp "
        "computes from the tokens and the input of the first layer, and later layers read the keys and values of "
        "earlier ones",
        rope=PART,
        default_window=1,
    ),
    "minicpm3": Refused(_SCALED),
    "graniteswitch": Refused("the tokens themselves choose weights in each layer"),
    "cohere2moe": Refused("a layer depends both on its index (leading layers have no experts) and on its window"),
    "rwkv6": Refused(_SCALED),
    "rwkv7": Refused(_FIRST),
    "arwkv7": Refused(_FIRST),
    "baichuan": Refused(_KIND, rope=WHOLE),
    "chameleon": Refused("llama.cpp overwrites 8192 logits of picture tokens, even in a stage without the head"),
    "cogvlm": Refused("llama.cpp treats hidden states as pictures, which have weights of their own"),
    "deepseek4": Refused(_STREAMS),
    "glm5-next": Refused(_STREAMS),
    "kimi-k3": Refused(_FIRST),
    "hy_v4": Refused(_STREAMS),
    "minimax-01": Refused("the decay of a layer depends on its number among all layers"),
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
