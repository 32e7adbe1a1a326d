"""Tiny embedding models with random weights, in the file formats of `bert` and `nomic-bert`."""

from pathlib import Path

import gguf
import numpy as np

WIDTH, INNER, LAYERS, CONTEXT = 64, 128, 2, 128
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("one", "two", "kilobyte", "hello", "world", "rome")


def encoder(
    path: Path,
    architecture: str = "bert",
    pooling: int = gguf.PoolingType.MEAN,
    types: int = 2,
    head: bool = False,
    ends: bool = False,
    **metadata: int,
) -> Path:
    """Write one. types: of tokens, as is said of them, where there are 2. head: it scores texts. ends: texts end
    with [SEP]. metadata: numbers under the architecture's name, in place of those that fit the tensors."""
    random, is_bert = np.random.default_rng(0), architecture == "bert"
    writer = gguf.GGUFWriter(str(path), architecture)
    numbers = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": 4,
        "pooling_type": int(pooling),
    }
    for name, number in {**numbers, **metadata}.items():
        writer.add_uint32(f"{architecture}.{name}", number)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    tokens = [*SPECIAL, *(f"\u2581{word}" for word in WORDS)]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * len(WORDS))
    writer.add_token_type_count(types)
    for add, name in (
        (writer.add_unk_token_id, "[UNK]"),
        (writer.add_sep_token_id, "[SEP]"),
        (writer.add_pad_token_id, "[PAD]"),
        (writer.add_bos_token_id, "[CLS]"),
        (writer.add_eos_token_id, "[SEP]"),
    ):
        add(SPECIAL.index(name))

    if ends:
        writer.add_add_eos_token(True)

    def matrix(name: str, *shape: int) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) * 0.1).astype(np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(WIDTH, np.float32))

    matrix("token_embd.weight", len(tokens), WIDTH)
    matrix("token_types.weight", 2, WIDTH)
    norm("token_embd_norm")
    if is_bert:
        matrix("position_embd.weight", CONTEXT, WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        if is_bert:
            for part in "qkv":
                matrix(f"{block}.attn_{part}.weight", WIDTH, WIDTH)
                matrix(f"{block}.attn_{part}.bias", WIDTH)
            for part, width in (("attn_output", WIDTH), ("ffn_up", INNER), ("ffn_down", WIDTH)):
                matrix(f"{block}.{part}.bias", width)
        else:
            matrix(f"{block}.attn_qkv.weight", 3 * WIDTH, WIDTH)
            matrix(f"{block}.ffn_gate.weight", INNER, WIDTH)
        matrix(f"{block}.attn_output.weight", WIDTH, WIDTH)
        matrix(f"{block}.ffn_up.weight", INNER, WIDTH)
        matrix(f"{block}.ffn_down.weight", WIDTH, INNER)
        norm(f"{block}.attn_output_norm")
        norm(f"{block}.layer_output_norm")
    if head:
        for name, width in (("cls", WIDTH), ("cls.output", 1)):
            matrix(f"{name}.weight", width, WIDTH)
            matrix(f"{name}.bias", width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
