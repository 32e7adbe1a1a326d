"""Makes tests/data/hf: tiny random checkpoints of each family, with the logits and tokens of the transformers library.

Made once, with torch 2.13.0 (CPU), transformers 5.23.0, tokenizers and sentencepiece 0.2.3; no test needs them.

    python -m venv hf && hf/bin/pip install torch transformers sentencepiece protobuf
    hf/bin/python tests/support/make_checkpoints.py

Weights are rounded to the type they are stored in; logits are computed in float32 from the folder as it was written.
Norms are not at their neutral value, biases not at zero, and no figure is at the default of llama.cpp or the library:
whatever is forgotten in a conversion shows.
"""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
import transformers  # type: ignore[import-not-found]
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support import TESTS

OUT = TESTS / "data" / "hf"
TEXTS = [
    "Hello, world!",
    "  two spaces  and   three ",
    "12345 + 67 = 12412, or 3.14159",
    "line one\nline two\n\n\nend\t.",
    "na\u00efve caf\u00e9 \u4f60\u597d \U0001f600 \u03b1\u03b2\u03b3",
    "",
    " ",
    "don't we'll I'M THEY'RE",
    "def f(x):\n    return x ** 2\r\n",
]
CORPUS = (
    "The device reads the model and the model reads the text. A small device can run a large model when the weights "
    "are read again and again. How many tokens are in this line? There are ten of them, or eleven. I'm sure we'll see "
    "that they're not the same. Numbers such as 1, 12, 123 and 2024 are cut in their own way. def add(a, b): return "
    "a + b. The quick brown fox jumps over the lazy dog, and the dog does not mind. Hello, hello world! "
    "What is the time? It is the time to think about the thing that other things think of. "
) * 3
VOCAB = 336
ROWS = 8  # logits are kept of so many last positions
SPLIT = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPLIT
QWEN = LLAMA_3.replace("{1,3}", "")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPLIT
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 128, "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
}  # fmt: skip


# Tokenizers.


def sentencepiece_model(pieces: list[str], user: list[str], prefix: bool) -> bytes:
    """A trained model with these control tokens at 0, 1, ..."""
    ids = {f"{name}_id": pieces.index(piece) if piece in pieces else -1 for name, piece in (
        ("unk", "<unk>"), ("bos", pieces[2] if pieces[0] == "<pad>" else "<s>"),
        ("eos", pieces[1] if pieces[0] == "<pad>" else "</s>"), ("pad", "<pad>"),
    )}  # fmt: skip
    names = {
        f"{name}_piece": pieces[ids[f"{name}_id"]] for name in ("unk", "bos", "eos", "pad") if ids[f"{name}_id"] >= 0
    }
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.split(". ")), model_writer=out, model_type="bpe", vocab_size=VOCAB - 6,
        byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=prefix, character_coverage=1.0,
        remove_extra_whitespaces=False, split_digits=True, user_defined_symbols=user, minloglevel=2,
        hard_vocab_limit=True, **ids, **names,
    )  # fmt: skip
    return out.getvalue()


def bpe_of(model: bytes) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary, merges) of a sentencepiece model, as the library converts one."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocab = {processor.id_to_piece(i): i for i in range(len(processor))}
    merges = [
        (i, len(piece[:cut]), piece[:cut], piece[cut:])
        for piece, i in vocab.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    return vocab, [(left, right) for *_, left, right in sorted(merges)]


def llama_tokenizer(folder: Path) -> None:
    """tokenizer.model alone, as Llama 2 came."""
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(["<unk>", "<s>", "</s>"], [], True))
    settings = {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "add_bos_token": True, "add_eos_token": False, "legacy": False, "chat_template": CHAT,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def mistral_tokenizer(folder: Path) -> None:
    """tokenizer.json alone, with the normalizer of older files."""
    vocab, merges = bpe_of(sentencepiece_model(["<unk>", "<s>", "</s>"], [], True))
    built = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    built.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    built.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")])
    built.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    save(built, folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def gemma_tokenizer(folder: Path, with_model: bool) -> None:
    """As Gemma came: no space in front, tokens for turns."""
    turns = ["<start_of_turn>", "<end_of_turn>", "<table>"]
    raw = sentencepiece_model(["<pad>", "<eos>", "<bos>", "<unk>"], turns, False)
    vocab, merges = bpe_of(raw)
    built = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    built.normalizer = normalizers.Replace(" ", "\u2581")
    built.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    built.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *turns[:2]]
    built.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    built.add_tokens([AddedToken(turns[2], normalized=False)])
    built.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
    save(built, folder, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>", add_bos_token=True)
    if with_model:
        (folder / "tokenizer.model").write_bytes(raw)


def byte_tokenizer(
    pattern: str, special: list[str], bos: str | None, *, whole: bool, **names: str
) -> Callable[[Path], None]:
    """Byte-level BPE; with `whole`, a word that is a token is not cut first."""

    def write(folder: Path) -> None:
        built = Tokenizer(models.BPE(ignore_merges=whole))
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        built.pre_tokenizer = pre_tokenizers.Sequence(steps)
        built.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB - 8, initial_alphabet=alphabet, special_tokens=[], show_progress=False
        )
        built.train_from_iterator(CORPUS.split(". "), trainer)
        built.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        built.add_tokens([AddedToken("<tool_call>", normalized=False)])
        if bos:
            template = [(bos, built.token_to_id(bos))]
            built.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=template)
        save(built, folder, **({"bos_token": bos} if bos else {}), **names)

    return write


def save(tokenizer: Tokenizer, folder: Path, **names: Any) -> None:
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT)


# Models.


def fill(model: torch.nn.Module, offset: bool) -> None:
    """Random weights of a sensible size, the same in every run."""
    generator = torch.Generator().manual_seed(6)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = noise * 0.2 + (0.0 if offset else 1.0)
        elif name.endswith("bias"):
            value = noise * 0.3
        elif "embed_tokens" in name:
            value = noise * (0.08 if offset else 0.2)  # Gemma scales it up
        else:
            value = noise * weight.shape[-1] ** -0.5
            if "q_proj" in name or "k_proj" in name:
                value *= 2  # so that positions count
            if offset and "mlp" in name:
                value *= 0.7  # ggml computes GELU with 16 bits
        weight.data.copy_(value)


def make(
    name: str,
    kind: str,
    figures: dict[str, Any],
    tokenizer: Callable[[Path], None],
    dtype: torch.dtype,
    special: list[str],
    change: Callable[[dict[str, Any]], None] = lambda config: None,
    shard: str = "5GB",
) -> None:
    """Write one folder. `change` edits config.json, for instance into what older versions of the library wrote."""
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**figures)
    model = model_class(config)
    fill(model, "Gemma" in kind)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values, indent=1))
    tokenizer(folder)
    written = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = np.random.default_rng(6).integers(3, VOCAB - 10, 16)
    with torch.no_grad():
        logits = written(input_ids=torch.tensor(ids[None])).logits[0, -ROWS:].float().numpy()
    reads = transformers.AutoTokenizer.from_pretrained(folder)
    texts = TEXTS + special
    tokens = [reads(text)["input_ids"] for text in texts]
    if not (folder / "tokenizer.json").exists():  # what defines the tokens; the library forgets a space before a space
        pieces = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
        defined = [[pieces.bos_id(), *pieces.encode(text)] for text in TEXTS]
        for text, have, need in zip(TEXTS, tokens, defined, strict=False):
            if have != need and not text.startswith(" "):
                raise SystemExit(f"{name}: {text!r} gives {have}, its tokenizer.model {need}")
        tokens[: len(TEXTS)] = defined
    expected = {"input_ids": ids.tolist(), "texts": [[text, token] for text, token in zip(texts, tokens, strict=True)]}
    (folder / "expected.json").write_text(json.dumps(expected))
    np.save(folder / "logits.npy", logits)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: logits deviate by {logits.std():.2f}, {size / 1024:.0f} KiB", file=sys.stderr)


def old_llama_3(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope


def old_gemma_3(config: dict[str, Any]) -> None:
    config.pop("rope_parameters")
    config.pop("layer_types", None)
    config |= {"rope_theta": 1e6, "rope_local_base_freq": 2e3, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    config["sliding_window_pattern"] = 3


def main() -> None:
    bf16, f16 = torch.bfloat16, torch.float16
    gemma = SIZES | {"head_dim": 16, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    windows = {"sliding_window": 6, "query_pre_attn_scalar": 16}
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
    gemma_texts = ["<start_of_turn>user\nHi<end_of_turn>\n", "a <table> b", "x<eos>"]
    qwen_special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    qwen_texts = ["<|im_start|>user\nHi<|im_end|>\n", "a <tool_call> b"]
    qwen = byte_tokenizer(QWEN, qwen_special, None, whole=False, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    llama_3 = byte_tokenizer(
        LLAMA_3, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], "<|begin_of_text|>", whole=True,
        eos_token="<|eot_id|>",
    )  # fmt: skip
    stretched = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    make("llama", "LlamaForCausalLM", SIZES, llama_tokenizer, f16, ["x</s>"])
    make(
        "llama3", "LlamaForCausalLM", SIZES | {"rope_parameters": stretched, "attention_bias": True, "head_dim": 16,
        "mlp_bias": True, "tie_word_embeddings": True}, llama_3, bf16, ["a<|eot_id|>b"], old_llama_3, "40KB",
    )  # fmt: skip
    make(
        "mistral",
        "MistralForCausalLM",
        SIZES | {"sliding_window": None, "tie_word_embeddings": True},
        mistral_tokenizer,
        bf16,
        ["[INST] a [/INST]b"],
    )
    tekken = byte_tokenizer(TEKKEN, ["<unk>", "<s>", "</s>", "[INST]"], "<s>", whole=True, eos_token="</s>")
    make(
        "mistral-nemo", "MistralForCausalLM", SIZES | {"sliding_window": None, "head_dim": 16,
        "tie_word_embeddings": True}, tekken, bf16, ["[INST] CamelCase aBCd\u00c9t\u00e9"],
    )  # fmt: skip
    yarn = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    make("qwen2", "Qwen2ForCausalLM", SIZES | {"rope_parameters": yarn}, qwen, bf16, qwen_texts)
    make("qwen3", "Qwen3ForCausalLM", SIZES | {"head_dim": 16, "tie_word_embeddings": True}, qwen, bf16, qwen_texts)
    moe = {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    }
    make("qwen3moe", "Qwen3MoeForCausalLM", SIZES | moe, qwen, bf16, qwen_texts)
    make("gemma", "GemmaForCausalLM", gemma, lambda f: gemma_tokenizer(f, True), bf16, gemma_texts)
    make("gemma2", "Gemma2ForCausalLM", gemma | windows | caps, lambda f: gemma_tokenizer(f, False), bf16, gemma_texts)
    deep = gemma | windows | {"num_hidden_layers": 3}
    linear = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
              "sliding_attention": {"rope_type": "default", "rope_theta": 2e3}}  # fmt: skip
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    text = deep | {"rope_parameters": linear, "layer_types": kinds}
    make(
        "gemma3",
        "Gemma3ForCausalLM",
        text | {"final_logit_softcapping": 2.0},
        lambda f: gemma_tokenizer(f, True),
        bf16,
        gemma_texts,
        old_gemma_3,
    )
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    make(
        "gemma3-vision", "Gemma3ForConditionalGeneration", {"text_config": text, "vision_config": vision,
        "mm_tokens_per_image": 1, "image_token_index": VOCAB - 1},
        lambda f: gemma_tokenizer(f, False), bf16, gemma_texts,
    )  # fmt: skip


if __name__ == "__main__":
    main()
