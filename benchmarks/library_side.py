"""One side of bench_tpi.py: Transformers or Accelerate. It runs in an environment that has them, and not this project.

PYTHON benchmarks/library_side.py JSON
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_RUNTIME = 320 << 20  # bytes of Python and torch without weights


def main() -> None:
    target = json.loads(sys.argv[1])
    if target["do"] == "make":
        make(target)
    else:
        print(json.dumps(run(target)))


def make(target: dict[str, Any]) -> None:
    """Write the weights of a GGUF file as safetensors, dequantized. Transformers would keep them packed."""
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    reader, kind = GGUFReader(target["gguf"]), getattr(torch, target["type"])

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads = {"attn_q": value("attention.head_count"), "attn_k": value("attention.head_count_kv")}
    config = LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[-1]),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings="output.weight" not in tensors,
        dtype=kind,
    )
    state = {}
    for name, tensor in tensors.items():
        weight = dequantize(tensor.data, tensor.tensor_type)
        parts = name.split(".")
        if parts[0] == "blk" and parts[2] in heads:  # llama.cpp pairs the values of a head in another order
            n = heads[parts[2]]
            weight = weight.reshape(n, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
        new = f"model.layers.{parts[1]}.{_NAMES[parts[2]]}" if parts[0] == "blk" else _NAMES[parts[0]]
        state[f"{new}.weight"] = torch.tensor(weight, dtype=kind)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.save_pretrained(target["folder"])


def run(target: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds until the model is loaded, of the first token, and of each token then."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    began = time.perf_counter()
    model = loaded(target)
    load_s = time.perf_counter() - began
    model(input_ids=torch.tensor([[1]]), use_cache=False)  # warms up
    tokens = torch.tensor([[3 + 97 * i % 1000 for i in range(target["prompt"])]])
    times, cache, answer = [], None, []
    for _ in range(target["tokens"] + 1):
        began = time.perf_counter()
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        times.append(time.perf_counter() - began)
        answer.append(int(tokens[0, 0]))
    return {
        "answer": answer,
        "load_s": load_s,
        "ttft_s": times[0],
        "token_s": sorted(times[1:])[len(times[1:]) // 2],
        "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def loaded(target: dict[str, Any]) -> Any:
    """Load the model: whole, or with the layers that exceed the limit on disk. Without a limit, all layers that
    Accelerate lets out are on disk, as its memory is least then."""
    from transformers import AutoModelForCausalLM

    if target["do"] == "transformers":
        return AutoModelForCausalLM.from_pretrained(target["folder"], dtype="auto")
    room = max(1, (target["limit"] or 0) - _RUNTIME)
    return AutoModelForCausalLM.from_pretrained(
        target["folder"], dtype="auto", device_map="auto", max_memory={"cpu": room}, offload_folder=target["offload"]
    )


if __name__ == "__main__":
    main()
