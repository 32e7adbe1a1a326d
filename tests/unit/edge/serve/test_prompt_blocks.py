"""Property tests of the blocks by which a conversation is recognized."""

from hypothesis import given
from hypothesis import strategies as st

from edge.serve import prompt_blocks
from edge.serve.prompt_blocks import BLOCK_CHARS, PromptBlocks, block_digests, prompt_text
from edge.serve.served import Generation

TEXTS = st.text("ab", max_size=4 * BLOCK_CHARS)


def digests(text: str, **fields: object) -> list[bytes]:
    return block_digests(Generation(prompt=text, **fields), text)  # type: ignore[arg-type]


@given(TEXTS, TEXTS, TEXTS)
def test_prompts_have_the_whole_blocks_in_common_in_which_they_agree(start: str, first: str, second: str) -> None:
    first, second = start + first, start + second
    n_equal = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    blocks = PromptBlocks()
    blocks.add(digests(first))
    assert blocks.n_common(digests(second)) == n_equal // BLOCK_CHARS


def test_the_next_turn_of_a_chat_begins_with_the_blocks_of_the_one_before() -> None:
    turn = [{"role": "user", "content": "Tell me " * 100}]
    later = [*turn, {"role": "assistant", "content": "Once " * 100}, {"role": "user", "content": "Go on"}]
    blocks = PromptBlocks()
    first, second = Generation(messages=turn), Generation(messages=later)
    blocks.add(own := block_digests(first, prompt_text(first)))
    assert blocks.n_common(block_digests(second, prompt_text(second))) == len(own) > 2


def test_other_namespaces_adapters_and_tools_have_nothing_in_common() -> None:
    text = "a" * BLOCK_CHARS
    blocks = PromptBlocks()
    blocks.add(digests(text))
    assert blocks.n_common(digests(text)) == 1
    assert blocks.n_common(digests(text, namespace="other")) == 0
    assert blocks.n_common(digests(text, adapters=(1.0,))) == 0
    chats = [Generation(messages=[{"content": text}], tools=tools) for tools in ((), ({"name": "f"},))]
    blocks.add(block_digests(chats[0], prompt_text(chats[0])))
    assert blocks.n_common(block_digests(chats[1], prompt_text(chats[1]))) == 0


def test_the_oldest_blocks_are_forgotten_and_their_ends_first(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(prompt_blocks, "_MOST_BLOCKS", 3)
    blocks, old, new = PromptBlocks(), digests("a" * 2 * BLOCK_CHARS), digests("b" * 2 * BLOCK_CHARS)
    blocks.add(old)
    blocks.add(new)
    assert (blocks.n_common(old), blocks.n_common(new)) == (1, 2)
    blocks.add(old)
    assert (blocks.n_common(old), blocks.n_common(new)) == (2, 1)
