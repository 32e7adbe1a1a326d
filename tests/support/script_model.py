"""A tiny model file whose template selects its answers from a script: real tool calls on a real server, quickly.

The chat template ends each prompt with a mark of the answer to give. Attention and feed-forward have zero weights, so
the next token depends on the last one alone: the mark leads to one token that holds the whole answer, and that token to
the end of the turn. The context is as large as wanted. All other tokens are those of the bundled model.

    script_model(path, {"mark": [("read_file", {"path": "a.txt"})], "other": "A text."})
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from edge.models.demo import MODEL_PATH
from quant.gguf.file import GgufFile
from quant.gguf.writer import NewTensor, encoded, header
from quant.types import TYPES

Call = tuple[str, Mapping[str, Any]]
Script = Mapping[str, "Sequence[Call] | str"]
NOTHING: Script = MappingProxyType({})
WIDTH, FEED_FORWARD, HEADS = 128, 32, 4
CONTEXT = 1 << 17
SAYS = "The script has no more for this turn."
_NORMAL, _CONTROL = 1, 3
_OWN_KEYS = (
    "general.architecture",
    "llama.",
    "tokenizer.chat_template",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_",
)
# A question that names marks of the script ("[codex 0]") is answered with those calls, one after the other, if there
# are tools. A last message, of whichever role, that names the mark of a text is answered with that. All others: SAYS.
TEMPLATE = (
    "{{ bos_token }}"
    '{% if tools %}<|system|>Tools, called as <tool_call>{"name": ..., "arguments": ...}</tool_call>:'
    "{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% set ns = namespace(question='', last='', answers=0) %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% set ns.last = m.content | string %}"
    "{% if m.role == 'user' %}{% set ns.question = ns.last %}{% set ns.answers = 0 %}"
    "{% elif m.role == 'assistant' %}{% set ns.answers = ns.answers + 1 %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% set found = namespace(mark='says', named=0) %}"
    "{% for mark in CALLS if tools and '[' ~ mark ~ ']' in ns.question %}"
    "{% if loop.index0 == ns.answers %}{% set found.mark = mark %}{% endif %}{% endfor %}"
    "{% for mark in TEXTS if '[' ~ mark ~ ']' in ns.last %}{% set found.mark = mark %}{% endfor %}"
    "<|{{ found.mark }}|>{% endif %}"
)


def script_model(path: Path, script: Script = NOTHING, context: int = CONTEXT) -> Path:
    """Write the model. `script`: calls that are made in one answer, or a text, by the mark that a message names."""
    file = GgufFile.open(MODEL_PATH)
    answers = {
        "says": SAYS,
        **{mark: item if isinstance(item, str) else _written(item) for mark, item in script.items()},
    }
    tokens, types = (list(file.metadata[f"tokenizer.ggml.{name}"]) for name in ("tokens", "token_type"))  # type: ignore[arg-type]
    end = int(file.metadata["tokenizer.ggml.eos_token_id"])  # type: ignore[arg-type]
    follows = {}  # which token comes after a token
    for mark, answer in answers.items():
        follows |= {len(tokens): len(tokens) + 1, len(tokens) + 1: end}
        tokens += [f"<|{mark}|>", _of_bytes(answer)]
        types += [_CONTROL, _NORMAL]
    assert len(follows) < WIDTH, "a script has at most 60 marks"
    pairs = {key: file.raw_value(key) for key in file.metadata if not key.startswith(_OWN_KEYS)}
    numbers = {
        "context_length": context, "embedding_length": WIDTH, "block_count": 1, "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS, "attention.head_count_kv": 1, "rope.dimension_count": WIDTH // HEADS,
    }  # fmt: skip
    pairs |= {f"llama.{key}": encoded("u32", value) for key, value in numbers.items()}
    pairs |= {
        "general.architecture": encoded("str", "llama"),
        "llama.attention.layer_norm_rms_epsilon": encoded("f32", 1e-5),
        "llama.vocab_size": encoded("u32", len(tokens)),
        "tokenizer.ggml.tokens": encoded("arr[str]", tokens),
        "tokenizer.ggml.token_type": encoded("arr[i32]", types),
        "tokenizer.chat_template": encoded("str", _template(script)),
    }
    write(path, pairs, _weights(follows, end, len(tokens)))
    return path


def with_context(source: Path, path: Path, context: int) -> Path:
    """Write a model that says that its context is so long; what it answers behind its own context is of no use."""
    file = GgufFile.open(source)
    pairs = {key: file.raw_value(key) for key in file.metadata}
    pairs[f"{file.metadata['general.architecture']}.context_length"] = encoded("u32", context)
    tensors = [NewTensor(name, tensor.shape, tensor.type) for name, tensor in file.tensors.items()]
    with path.open("wb") as out:
        out.write(header(pairs, tensors))
        for tensor in tensors:
            out.write(bytes(file.data(tensor.name)) + bytes(tensor.padding))
    return path


def _written(calls: Sequence[Call]) -> str:
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{item}\n</tool_call>" for item in objects)


def _template(script: Script) -> str:
    texts = [mark for mark, item in script.items() if isinstance(item, str)]
    calls = [mark for mark in script if mark not in texts]
    return TEMPLATE.replace("CALLS", json.dumps(calls)).replace("TEXTS", json.dumps(texts))


def write(path: Path, pairs: Mapping[str, bytes], weights: Mapping[str, Any]) -> None:
    """Write a file of these values and 32-bit weights."""
    tensors = [NewTensor(name, value.shape[::-1], TYPES["f32"]) for name, value in weights.items()]
    with path.open("wb") as out:
        out.write(header(pairs, tensors))
        for tensor, value in zip(tensors, weights.values(), strict=True):
            out.write(value.astype("<f4").tobytes() + bytes(tensor.padding))


def _weights(follows: Mapping[int, int], end: int, vocabulary: int) -> dict[str, Any]:
    embedded = np.zeros((vocabulary, WIDTH))
    scores = np.zeros((vocabulary, WIDTH))
    embedded[:, 0], scores[end, 0] = 1, 10  # after any other token the turn ends
    for place, (token, following) in enumerate(follows.items(), 1):
        embedded[token] = np.eye(WIDTH)[place]
        scores[following, place] = 10
    key_width = WIDTH // HEADS
    shapes = {
        "attn_q": (WIDTH, WIDTH), "attn_k": (key_width, WIDTH), "attn_v": (key_width, WIDTH),
        "attn_output": (WIDTH, WIDTH), "ffn_gate": (FEED_FORWARD, WIDTH), "ffn_up": (FEED_FORWARD, WIDTH),
        "ffn_down": (WIDTH, FEED_FORWARD),
    }  # fmt: skip
    layer = {f"blk.0.{name}.weight": np.zeros(shape) for name, shape in shapes.items()}
    norms = {name: np.ones(WIDTH) for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")}
    return {"token_embd.weight": embedded, **layer, **norms, "output.weight": scores}


def _of_bytes(text: str) -> str:
    """Return the text as vocabularies of GPT-2's kind write its bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + n) for n, byte in enumerate(others)}}
    return "".join(letters[byte] for byte in text.encode())
