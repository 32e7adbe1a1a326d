"""Metadata of a GGUF, from the config.json of a checkpoint: sizes, attention, experts."""

from quant.checkpoint.families import Model
from quant.checkpoint.rope import rope_pairs
from quant.gguf.writer import encoded

_QUANTIZATION_VERSION = 2  # version of ggml's block layouts
_FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32}  # llama.cpp's ids for files that are mostly of one type
_WINDOW_PERIOD = {"gemma2": 2, "gemma3": 6}  # by default, one layer in this many has no window


def general_pairs(model: Model, name: str, type_name: str) -> dict[str, bytes]:
    """Return the key-value pairs that every GGUF has. type_name: type of most weights: f32, f16 or bf16."""
    return {
        "general.architecture": encoded("str", model.arch),
        "general.type": encoded("str", "model"),
        "general.name": encoded("str", name),
        "general.file_type": encoded("u32", _FILE_TYPES[type_name]),
        "general.quantization_version": encoded("u32", _QUANTIZATION_VERSION),
    }


def model_pairs(model: Model) -> dict[str, bytes]:
    """Return the pairs of the computation. Raises ModelFileError if llama.cpp would compute it differently."""
    config = model.config
    pairs = {
        "vocab_size": encoded("u32", model.vocab),
        "context_length": encoded("u32", _context(model)),
        "embedding_length": encoded("u32", model.embd),
        "block_count": encoded("u32", model.layers),
        "feed_forward_length": encoded("u32", model.ff),
        "attention.head_count": encoded("u32", model.heads),
        "attention.head_count_kv": encoded("u32", model.kv),
        "attention.key_length": encoded("u32", model.head_size),
        "attention.value_length": encoded("u32", model.head_size),
        "attention.layer_norm_rms_epsilon": encoded("f32", config.number("rms_norm_eps")),
        **rope_pairs(model),
        **_window_pairs(model),
    }
    if model.experts:
        pairs["expert_count"] = encoded("u32", model.experts)
        pairs["expert_used_count"] = encoded("u32", model.experts_used)
        pairs["expert_feed_forward_length"] = encoded("u32", model.expert_ff)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if model.arch == "gemma2" and config.is_null(key):
            raise config.error(f"{key} is null, but llama.cpp always uses it for gemma2")
        if model.arch in ("gemma2", "gemma3") and key in config:
            pairs[key] = encoded("f32", config.number(key))
    return {f"{model.arch}.{key}": value for key, value in pairs.items()}


def _context(model: Model) -> int:
    """Return the context length in tokens.

    llama.cpp has no sliding window for Mistral and Qwen, so the context is cut to the length where it has no effect.
    """
    config = model.config
    context = config.count("max_position_embeddings")
    if model.arch in _WINDOW_PERIOD or config.is_null("sliding_window") or "sliding_window" not in config:
        return context
    if model.arch.startswith("qwen") and not config.flag("use_sliding_window"):
        return context
    return min(context, config.count("sliding_window"))


def _window_pairs(model: Model) -> dict[str, bytes]:
    """Return the pairs of Gemma's attention windows: their length and, if unusual, which layers have one."""
    usual = _WINDOW_PERIOD.get(model.arch)
    if not usual:
        return {}
    has_window = _windows(model, usual)
    if not any(has_window):
        if model.arch == "gemma2":
            raise model.config.error("no layer has sliding_attention, but llama.cpp computes gemma2 with a window")
        return {}
    pairs = {"attention.sliding_window": encoded("u32", model.config.count("sliding_window"))}
    if has_window != [(i + 1) % usual != 0 for i in range(model.layers)]:
        pairs["attention.sliding_window_pattern"] = encoded("arr[bool]", has_window)
    return pairs


def _windows(model: Model, usual: int) -> list[bool]:
    """Return for each layer whether it has a sliding window."""
    config = model.config
    kinds = config.items("layer_types")
    if not kinds:
        period = config.count("sliding_window_pattern", usual)
        return [(i + 1) % period != 0 for i in range(model.layers)]
    if len(kinds) != model.layers or not all(kind in ("sliding_attention", "full_attention") for kind in kinds):
        raise config.error(
            f"layer_types has {len(kinds)} entries, but needs {model.layers} of sliding_attention or full_attention"
        )
    return [kind == "sliding_attention" for kind in kinds]
