"""The demonstration model's tokenizer and chat template.

Byte-level BPE over single digits, as Qwen2 splits text, so that sums are learnt digit by digit and llama.cpp tokenizes
with its "qwen2" rules. Control tokens frame the messages; the text of each message is tokenized on its own, so a
dialogue that grows only appends tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model.grammar import Message

BOS, SYSTEM, USER, ASSISTANT, END = CONTROL = ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def render(messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    """The text that `TEMPLATE` gives."""
    body = "".join(f"<|{message['role']}|>{message['content']}{END}" for message in messages)
    return BOS + body + (ASSISTANT if add_generation_prompt else "")


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `size` tokens, the control tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
