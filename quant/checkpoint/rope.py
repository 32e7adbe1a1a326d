"""Rotary position embedding: its settings in config.json as the metadata and the table of factors of a GGUF."""

import math

from quant.checkpoint.config import Config
from quant.checkpoint.families import Model
from quant.gguf.writer import encoded

_DEFAULT_BASE = 10_000.0
_DEFAULT_LOCAL_BASE = 10_000.0  # llama.cpp's default for layers with a window


def rope_pairs(model: Model) -> dict[str, bytes]:
    """Return the key-value pairs about rotation, without the architecture's name in the keys.

    Raises ModelFileError for a kind of context extension that llama.cpp lacks.
    """
    rope = _global(model)
    pairs = {
        "rope.dimension_count": encoded("u32", model.head_size),
        "rope.freq_base": encoded("f32", _base(model)),
    }
    if model.arch == "gemma3":
        pairs["rope.freq_base_swa"] = encoded("f32", _local_base(model))
    kind = _kind(rope)
    if kind == "linear":
        pairs["rope.scaling.type"] = encoded("str", "linear")
        pairs["rope.scaling.factor"] = encoded("f32", rope.number("factor"))
    elif kind == "yarn":
        pairs |= _yarn_pairs(model, rope)
    elif kind == "llama3" and model.arch != "llama":
        raise rope.error(f"rope_type is llama3, which llama.cpp supports only for Llama, not for {model.arch}")
    elif kind not in ("default", "llama3"):
        raise rope.error(f"rope_type is {kind!r:.40}, but supported are default, linear, yarn, llama3")
    return pairs


def rope_factors(model: Model) -> list[float]:
    """Return the divisors of the frequencies [head_size / 2] that extend the context of Llama 3, or [] for other kinds.

    High frequencies stay, low ones are divided by the factor, and those between two bounds are interpolated. Formula:
    https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py (apply_scaling).
    """
    rope = _global(model)
    if _kind(rope) != "llama3":
        return []
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    context = rope.count("original_max_position_embeddings")
    if high <= low:
        raise rope.error(f"high_freq_factor is {high:g}, but must be more than low_freq_factor, {low:g}")
    base = _base(model)
    factors = []
    for i in range(0, model.head_size, 2):
        # Turns of this frequency in the context with which the model was first trained.
        turns = context / (2 * math.pi * base ** (i / model.head_size))
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / (share + (1 - share) / factor))
    return factors


def _yarn_pairs(model: Model, rope: Config) -> dict[str, bytes]:
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if key in rope:
            raise rope.error(f"{key} is set, but llama.cpp computes this factor of YaRN itself")
    if not rope.flag("truncate", True):
        raise rope.error("truncate is false, but llama.cpp rounds the bounds of YaRN")
    context = rope.count("original_max_position_embeddings", model.config.count("max_position_embeddings"))
    return {
        "rope.scaling.type": encoded("str", "yarn"),
        "rope.scaling.factor": encoded("f32", rope.number("factor")),
        "rope.scaling.original_context_length": encoded("u32", context),
        "rope.scaling.yarn_beta_fast": encoded("f32", rope.number("beta_fast", 32.0)),
        "rope.scaling.yarn_beta_slow": encoded("f32", rope.number("beta_slow", 1.0)),
    }


def _section(model: Model) -> Config:
    """Return `rope_parameters` of newer files, or `rope_scaling` of older ones."""
    return model.config.section("rope_parameters" if "rope_parameters" in model.config else "rope_scaling")


def _global(model: Model) -> Config:
    """Return the rotation settings of layers without a window. Newer files have separate settings for both kinds."""
    section = _section(model)
    return section.section("full_attention") if "full_attention" in section else section


def _kind(rope: Config) -> str:
    return rope.text("rope_type", rope.text("type", "default"))


def _base(model: Model) -> float:
    return _global(model).number("rope_theta", model.config.number("rope_theta", _DEFAULT_BASE))


def _local_base(model: Model) -> float:
    """Return the base of layers with a window. Their context is never extended."""
    local = _section(model).section("sliding_attention")
    if _kind(local) != "default":
        raise local.error(
            f"rope_type is {_kind(local)!r:.40}, but llama.cpp cannot extend the context of layers with a window;"
            " expected 'default'"
        )
    return local.number("rope_theta", model.config.number("rope_local_base_freq", _DEFAULT_LOCAL_BASE))
