"""The bundled model answers held-out questions of its grammar, through the same engine people chat with."""

from collections import Counter
from pathlib import Path

from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.models.demo import MODEL_PATH
from partition.model.model import ModelShape
from quant.gguf.file import GgufFile
from tests.support import TESTS
from tests.support.thorough import some
from tools.demo_model.grammar import CATEGORIES, held_out

F16_PATH = TESTS / "data" / "edge-demo-f16.gguf"  # what quantizers start from
QUESTIONS = some(35, 350)  # five or fifty of each category
FEWER = some(21, 70)
AT_LEAST = 0.95
GREEDY = SamplingParams(temperature=0)


def wrong_answers(path: Path, questions: int) -> Counter[str]:
    """Count the held-out questions that are answered wrong, by category."""
    wrong: Counter[str] = Counter()
    with Engine(path, EngineOptions(threads=1)) as engine:
        chat = Chat(engine)
        for i, (messages, expected) in enumerate(held_out(questions, seed=2026)):
            chat.messages = [dict(m) for m in messages[:-1]]
            answer = "".join(r.text for r in chat.ask(messages[-1]["content"], GREEDY, max_tokens=100))
            wrong[CATEGORIES[i % len(CATEGORIES)]] += answer != expected
    return wrong


def test_held_out_questions_are_answered_right() -> None:
    wrong = wrong_answers(MODEL_PATH, QUESTIONS)
    right = 1 - wrong.total() / QUESTIONS
    assert right >= AT_LEAST, f"{right:.1%} right; wrong by category: {dict(wrong)}"


def test_the_f16_weights_it_was_quantized_from_answer_as_well() -> None:
    assert 1 - wrong_answers(F16_PATH, FEWER).total() / FEWER >= AT_LEAST


def test_it_is_small_and_cuts_well() -> None:
    file = GgufFile.open(MODEL_PATH)
    shape = ModelShape.from_gguf(file)
    assert file.size_bytes <= 12_000_000
    assert 5_000_000 <= shape.n_params <= 10_000_000
    assert shape.architecture == "llama"
    assert shape.n_heads[0] >= 8
    assert shape.n_heads_kv[0] >= 4
    assert all(n % 32 == 0 for n in (shape.n_embd, shape.head_k, shape.n_ff[0], shape.n_vocab))
    assert "q8_0" in shape.bytes_by_type
