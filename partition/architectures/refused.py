"""Text architectures of the pinned llama.cpp whose models run on one device, and why they cannot be cut."""

from collections.abc import Mapping

_FIRST = "each layer reads values that the first one made, beside what the layer before gives"
_KIND = "llama.cpp tells its kinds apart by their number of layers"
_STREAMS = "several hidden states go from layer to layer"
_DIFFUSION = "it fills in a whole text at once, and does not go on with one; `edge` does not run it either"
_DRAFT = "it guesses tokens for another model, and is none itself; `edge` does not run it either"
_SCALED = "llama.cpp scales what layers give by their number"
_LOOPS = "its layers are passed through several times"
_CODER = "an encoder comes before its layers"

REFUSED: Mapping[str, str] = {
    "gemma3n": "four hidden states go from layer to layer, each layer reads a part of `inp_per_layer`, which llama.cpp "
    "makes of the token and of what the first layer is given, and layers from the 21st of a part on read the keys and "
    "values of earlier ones",
    "minicpm3": _SCALED,
    "graniteswitch": "llama.cpp takes tokens alone, which choose weights in each layer",
    "cohere2moe": "layers without experts are told apart by their number and their window at once",
    "rwkv6": _SCALED,
    "rwkv7": _FIRST,
    "arwkv7": _FIRST,
    "baichuan": _KIND,
    "chameleon": "llama.cpp writes over 8192 logits, of picture tokens, in a part without the head, too",
    "cogvlm": "llama.cpp takes hidden states for pictures, which have weights of their own",
    "deepseek4": _STREAMS,
    "glm5-next": _STREAMS,
    "kimi-k3": _FIRST,
    "hy_v4": _STREAMS,
    "minimax-01": "how fast a layer forgets follows from its number among all layers",
    "qwen4exp": _STREAMS,
    "talkie": _FIRST,
    "nanbeige": _LOOPS,
    "hrm_text": _LOOPS,
    "t5": _CODER,
    "dream": _DIFFUSION,
    "llada": _DIFFUSION,
    "llada-moe": _DIFFUSION,
    "rnd1": _DIFFUSION,
    "eagle3": _DRAFT,
    "dflash": _DRAFT,
    "gemma4-assistant": _DRAFT,
}
