"""Test `--mmproj FILE`, `--image FILE`, `--media-urls`, and the command `/image` in a conversation."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from apps import distributed
from apps.commands import serve
from apps.options import Parser
from apps.show.terminal import _attach
from edge.api.config import EngineConfig
from edge.errors import Interrupted, MediaError
from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.media.encoder import MediaEncoder
from tests.support import projectors
from tests.support.helpers import assert_one_line_error, chat_json, edge_here
from tests.support.multimodal import png

QUESTION = ("-p", "What is it?", "--temperature", "0", "--seed", "1", "--max-tokens", "4")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("m")
    (picture := folder / "a.png").write_bytes(png())
    return (*projectors.write("mrope", folder), picture)


def test_an_answer_about_a_picture(files: tuple[Path, Path, Path]) -> None:
    """With a projector that is named, or lies beside the model under its name."""
    model, projector, picture = files
    without = chat_json(str(model), *QUESTION)
    named = chat_json(str(model), *QUESTION, "--mmproj", str(projector), "--image", str(picture))
    baseline = chat_json(str(model), *QUESTION, "--image", str(picture))
    twice = chat_json(str(model), *QUESTION, "--image", str(picture), "--image", str(picture))
    counts = [answer["usage"]["prompt_tokens"] for answer in (without, named, baseline, twice)]
    assert counts[1] == counts[2] > counts[0] + 12
    assert counts[3] > counts[1] + 12


def test_what_cannot_be_is_an_error(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, projector, picture = files
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(model.read_bytes())
    done = edge_here("chat", str(alone), *QUESTION, "--image", str(picture))
    assert_one_line_error(done, 2, "--mmproj")
    done = edge_here("chat", str(alone), *QUESTION, "--mmproj", str(model))
    assert_one_line_error(done, 2, "not a projector")
    done = edge_here("chat", str(model), *QUESTION, "--image", str(projector))
    assert_one_line_error(done, 2, "no PNG")


def test_a_conversation_about_a_picture(
    files: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, projector, picture = files
    greedy = SamplingParams(temperature=0, allow_repetition=True)
    with (
        Engine(model, EngineOptions(context=512, threads=1)) as engine,
        MediaEncoder(model, projector) as encoder,
    ):
        chat = Chat(engine, encoder=encoder)
        _attach(chat, str(picture))
        assert "a.png" in capsys.readouterr().out
        [*_, last] = chat.ask("What is it?", greedy, max_tokens=4)
        [*_, again] = chat.ask("And now?", greedy, max_tokens=4)
        assert again.usage.cached_tokens >= last.usage.prompt_tokens - 8
        chat.save(tmp_path / "chat.json")
        assert "[picture or sound] What is it?" in (tmp_path / "chat.json").read_text()
        with pytest.raises(MediaError, match="damaged"):
            chat.attach(b"nothing")
        chat.clear()
        [*_, plain] = chat.ask("What is it?", greedy, max_tokens=4)
        assert plain.usage.prompt_tokens < last.usage.prompt_tokens


def test_a_server_has_the_projector_and_the_leave_to_fetch(files: tuple[Path, Path, Path]) -> None:
    def config(*words: str) -> EngineConfig:
        parser = Parser()
        serve.add_arguments(parser)
        args: Namespace = parser.parse_args([str(files[0]), *words])
        assert args.media_urls == ("public" if words else None)
        return distributed.engine_config(args, files[0], None, 1)

    named = config("--mmproj", str(files[1]), "--media-urls", "public", "--encoder", "here")
    assert config().mmproj == named.mmproj == str(files[1])
    assert (config().encoder, named.encoder) == ("auto", "here")


def test_a_question_that_is_not_answered_keeps_its_picture(files: tuple[Path, Path, Path]) -> None:
    model, projector, picture = files
    greedy = SamplingParams(temperature=0, allow_repetition=True)
    with (
        Engine(model, EngineOptions(context=512, threads=1)) as engine,
        MediaEncoder(model, projector) as encoder,
    ):
        chat = Chat(engine, encoder=encoder)
        [*_, plain] = chat.ask("What is it?", greedy, max_tokens=2)
        chat.clear()
        _attach(chat, str(picture))
        engine.stop()
        with pytest.raises(Interrupted):
            next(chat.ask("What is it?", greedy, max_tokens=2))
        engine.resume()
        [*_, request] = chat.ask("What is it?", greedy, max_tokens=2)
        [*_, next_one] = chat.ask("And?", greedy, max_tokens=2)
        n_rows = request.usage.prompt_tokens - plain.usage.prompt_tokens
        assert n_rows > 12
        assert next_one.usage.prompt_tokens < request.usage.prompt_tokens + n_rows
        for forget in (chat.detach, chat.clear):
            _attach(chat, str(picture))
            forget()
            chat.clear()
            [*_, without] = chat.ask("What is it?", greedy, max_tokens=2)
            assert without.usage.prompt_tokens == plain.usage.prompt_tokens


def test_a_budget_has_room_for_the_projector(files: tuple[Path, Path, Path]) -> None:
    config = EngineConfig(str(files[0]), EngineOptions(memory=1 << 30), prefix_cache=0)
    with_projector = replace(config, mmproj=str(files[1]))
    assert config.engine_options().reserved == 0
    assert with_projector.engine_options().reserved == files[1].stat().st_size
    assert replace(with_projector, options=EngineOptions()).engine_options().reserved == 0
