"""`Model.tokenize`: with and without the tokens around a text, and with or without control tokens by their names."""

from pathlib import Path

import edge
from edge.models import synth


def test_control_tokens_are_made_of_their_names_only_where_that_is_asked_for() -> None:
    with edge.load(context=64) as model:
        token = model.engine.model.special_token("eos")
        assert token is not None
        name = model.engine.model.piece(token, special=True).decode()
        assert model.tokenize(name, add_special=False, parse_special=True) == [token]
        as_text = model.tokenize(name, add_special=False)
        assert token not in as_text
        assert model.detokenize(as_text).strip() == name
        around = model.tokenize(f"hello{name}", parse_special=True)
        assert around.count(token) == 1
        assert around[-1] == token


def test_what_belongs_around_a_text_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"  # the bundled model wants nothing around a text
    synth.synthesize(path, synth.shape("llama", layers=1, embd=64, ff=64, heads=2, vocab=300), "q8_0")
    with edge.load(path, context=64) as model:
        bos = model.engine.model.special_token("bos")
        assert model.tokenize("hello") == [bos, *model.tokenize("hello", add_special=False)]
