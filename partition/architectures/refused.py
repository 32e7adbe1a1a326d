"""Text architectures of the pinned llama.cpp whose models run on one device, and why they cannot be cut."""

from collections.abc import Mapping

_TOKENS = "each layer reads the token itself, beside what the layer before gives"
_STATES = "each layer reads values that the first layer made, beside what the layer before gives"
_KIND = "llama.cpp tells its kinds apart by their number of layers"
_INDEX = "its layers share an index of positions"
_UNCHECKED = "its stages have not been checked"

REFUSED: Mapping[str, str] = {
    "gemma3n": f"{_TOKENS}, and later layers read the keys and values of earlier ones",
    "gemma4": f"{_TOKENS}, and later layers read the keys and values of earlier ones",
    "baichuan": _KIND,
    "rwkv7": _STATES,
    "arwkv7": _STATES,
    "rwkv6": "llama.cpp scales weights by the number of a layer",
}
