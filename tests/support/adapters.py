"""LoRA adapters with random values for small models, and logits that llama.cpp computes with an adapter."""

import ctypes as C
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import gguf
import llama_cpp as L
import numpy as np
from numpy.typing import NDArray

from quant.gguf.file import GgufFile
from quant.gguf.writer import NewTensor, Scalar, encoded, header
from quant.types import TYPES

Floats = NDArray[np.float32]

_TYPE_IDS = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}


def write_adapter(
    path: Path,
    model: Path,
    weights: Collection[str] | None = None,
    *,
    rank: int = 4,
    type_name: str = "f32",
    size: float = 0.2,
    seed: int = 0,
    values: Mapping[str, tuple[str, Scalar | Sequence[Scalar]]] = MappingProxyType({}),
    drop: Collection[str] = (),
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Path:
    """Write an adapter of a model. weights: those that it changes, by their names without "blk.<n>."; None: all
    matrices of layers. size: of its noise. values: metadata (type, value) in place of the usual. drop: metadata and
    tensors that are left out. shapes: of tensors, in place of those that fit."""
    file, noise = GgufFile.open(model), np.random.default_rng(seed)
    pairs: dict[str, tuple[str, Scalar | Sequence[Scalar]]] = {
        "general.type": ("str", "adapter"),
        "general.architecture": ("str", file.architecture),
        "adapter.type": ("str", "lora"),
        "adapter.lora.alpha": ("f32", 2.0 * rank),
        **values,
    }
    tensors: list[NewTensor] = []
    data: list[bytes] = []
    for name, tensor in file.tensors.items():
        short = name.split(".", 2)[2] if name.startswith("blk.") else name
        is_matrix = len(tensor.shape) > 1 and name.startswith("blk.") and name.endswith(".weight")
        is_chosen = is_matrix if weights is None else short in weights
        if not is_chosen:
            continue
        n_in, n_out, *matrices = tensor.shape
        if name == "token_embd.weight":
            fitting: tuple[tuple[int, ...], tuple[int, ...]] = ((rank, n_out), (rank, n_in))
        else:
            fitting = ((n_in, rank, *matrices), (rank, n_out, *matrices))
        for suffix, usual in zip((".lora_a", ".lora_b"), fitting, strict=True):
            if name + suffix in drop:
                continue
            shape = shapes.get(name + suffix, usual)
            raw = (size * noise.standard_normal(shape[::-1])).astype(np.float32)
            tensors.append(NewTensor(name + suffix, shape, TYPES[type_name]))
            data.append(gguf.quantize(raw, _TYPE_IDS[type_name]).tobytes())
    head = header({key: encoded(*value) for key, value in pairs.items() if key not in drop}, tensors)
    body = b"".join(raw + bytes(tensor.padding) for raw, tensor in zip(data, tensors, strict=True))
    path.write_bytes(head + body)
    return path


def native_logits(
    model: Path, adapters: Sequence[tuple[Path, float]], tokens: Sequence[int], *, context: int = 128, batch: int = 32
) -> Floats:
    """Logits [n, n_vocab] of all tokens, by llama-cpp-python alone: one thread, 32-bit keys and values, plain
    attention."""
    with ExitStack() as stack:
        params = L.llama_model_default_params()
        params.n_gpu_layers, params.use_extra_bufts = 0, False
        native = L.llama_model_load_from_file(str(model).encode(), params)
        assert native
        stack.callback(L.llama_model_free, native)
        handles = [L.llama_adapter_lora_init(native, str(path).encode()) for path, _ in adapters]
        assert all(handles)
        own = L.llama_context_default_params()
        own.n_ctx, own.n_batch, own.n_ubatch, own.n_threads, own.n_threads_batch = context, batch, batch, 1, 1
        own.type_k = own.type_v = TYPES["f32"].id
        own.flash_attn_type = L.LLAMA_FLASH_ATTN_TYPE_DISABLED
        own.n_outputs_max = batch
        built = L.llama_init_from_model(native, own)
        assert built
        stack.callback(L.llama_free, built)
        scales = (C.c_float * len(handles))(*(scale for _, scale in adapters))
        assert not L.llama_set_adapters_lora(
            built, (L.llama_adapter_lora_p_ctypes * len(handles))(*handles), len(handles), scales
        )
        n = len(tokens)
        rows = L.llama_batch_init(n, 0, 1)
        stack.callback(L.llama_batch_free, rows)
        rows.n_tokens = n
        for i, token in enumerate(tokens):
            rows.token[i], rows.pos[i], rows.n_seq_id[i], rows.logits[i] = token, i, 1, 1
            rows.seq_id[i][0] = 0
        assert not L.llama_decode(built, rows)
        n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(native))
        return np.stack(
            [np.ctypeslib.as_array(L.llama_get_logits_ith(built, i), shape=(n_vocab,)).copy() for i in range(n)]
        )
