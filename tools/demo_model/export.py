"""Write a checkpoint as GGUF: `python -m tools.demo_model.export DIR --q8 FILE --f16 FILE`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind

from tools.demo_model.model import Config
from tools.demo_model.tokens import BOS, CONTROL, END, TEMPLATE

DESCRIPTION = (
    "A tiny demonstration model of the edge runtime. It knows devices, units, small sums and small talk; it is not a "
    "useful assistant."
)


def export(folder: Path, path: Path, kind: Kind) -> None:
    """Write the checkpoint and tokenizer in `folder` to `path`, its matrices as F16 or Q8_0 and its norms as F32."""
    config = Config()
    weights: dict[str, torch.Tensor] = torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("edge demo")
    writer.add_description(DESCRIPTION)
    writer.add_license("MIT")
    writer.add_size_label(f"{sum(w.numel() for w in weights.values()) / 1e6:.1f}M")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind == Kind.Q8_0 else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocabulary)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.eps)
    add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"])
    for name, weight in weights.items():
        array = weight.float().numpy()
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, bpe: dict[str, Any]) -> None:
    """Add the vocabulary and merges of a `tokenizer.json` model, and the chat template."""
    ids: dict[str, int] = bpe["vocab"]
    tokens = sorted(ids, key=ids.__getitem__)
    normal, control = int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in CONTROL else normal for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(ids[BOS])
    writer.add_eos_token_id(ids[END])
    writer.add_eot_token_id(ids[END])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def main() -> None:
    """Export to the files named."""
    parser = argparse.ArgumentParser(description="Write the trained demonstration model as GGUF.")
    parser.add_argument("folder", type=Path, help="the working folder of tools.demo_model.train")
    parser.add_argument("--q8", type=Path, help="where to write the Q8_0 file")
    parser.add_argument("--f16", type=Path, help="where to write the F16 file")
    options = parser.parse_args()
    for path, kind in ((options.q8, Kind.Q8_0), (options.f16, Kind.F16)):
        if path:
            export(options.folder, path, kind)


if __name__ == "__main__":
    main()
