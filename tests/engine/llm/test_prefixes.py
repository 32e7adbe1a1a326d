"""Test prefix blocks on disk: another engine finds them, and an engine that must not use them does not."""

import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.llama.address_space import AddressSpace
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import Response, generate
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.prefixes import fingerprint
from edge.llm.sampler import SamplingParams
from edge.llm.slot import Slot
from edge.llm.states import BLOCK_TOKENS
from edge.models.demo import MODEL_PATH
from edge.prefixes import reading
from partition.plan.plan import Range
from quant.gguf.file import GgufFile
from tests.support.drafting import one_slot

GREEDY = SamplingParams(temperature=0)
PROMPT = [10 + (7 * i * i + 3 * i) % 400 for i in range(100)]
WHOLE = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    saved = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own")
    # One row at a time: rows of a batch are computed by other kernels, and so to other last bits.
    return EngineOptions(threads=1, context=256, batch=1, prefixes=saved)


def answered(options: EngineOptions, prompt: list[int], path: Path = MODEL_PATH) -> tuple[list[int | None], Response]:
    """An answer's tokens, and its last response, of an engine that begins anew."""
    with Engine(path, options) as engine:
        responses = list(generate(one_slot(engine), Request(prompt, 8, GREEDY)))
    return [response.token_id for response in responses], responses[-1]


def restored(options: EngineOptions, prompt: list[int] = PROMPT, path: Path = MODEL_PATH) -> int:
    return answered(options, prompt, path)[1].usage.restored_tokens


@pytest.mark.parametrize(
    "kinds", [{}, {"kv_type": "q8_0"}, {"flash_attention": "off"}, {"memory": 2 << 30}], ids=lambda kinds: str(kinds)
)
def test_a_restart_continues_where_the_prompt_was(options: EngineOptions, kinds: dict[str, object]) -> None:
    options = replace(options, **kinds)  # type: ignore[arg-type]
    first, fresh = answered(options, PROMPT)
    second, again = answered(options, PROMPT)
    assert fresh.usage.restored_tokens == 0
    assert again.usage.restored_tokens == again.usage.cached_tokens == WHOLE
    assert second == first == answered(replace(options, prefixes=None), PROMPT)[0]


def test_a_prompt_that_begins_alike_pays_for_the_rest(options: EngineOptions) -> None:
    answered(options, PROMPT)
    other = [*PROMPT[:70], *reversed(PROMPT[70:])]
    result, last = answered(options, other)
    assert last.usage.restored_tokens == 64
    assert result == answered(replace(options, prefixes=None), other)[0]
    again, last = answered(options, other)  # eight blocks of one file, and what another one has behind them
    assert last.usage.restored_tokens == WHOLE
    assert again == result
    with Engine(MODEL_PATH, options) as engine:
        slot = Slot(engine)
        slot.prefill(other)
        assert slot.restored == WHOLE
        engine.states.read(0, Range(0, WHOLE))  # refuses positions that are held twice


def test_the_answer_is_part_of_the_next_prompt(options: EngineOptions) -> None:
    tokens, _ = answered(options, PROMPT)
    said = [token for token in tokens if token is not None]
    current = len(PROMPT) + len(said) - 1  # the last token was not computed any more
    assert restored(options, [*PROMPT, *said, *PROMPT[:20]]) == current // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_session_continues_its_own_tokens_with_kept_ones(options: EngineOptions) -> None:
    answered(options, PROMPT)
    with Engine(MODEL_PATH, options) as engine:
        slot = Slot(engine)
        slot.prefill(PROMPT[:20])
        slot.prefill(PROMPT)
        assert (slot.restored, slot.computed) == (WHOLE - 20, len(PROMPT) - WHOLE)
        slot.prefill(PROMPT[:50])
        assert (slot.restored, slot.computed) == (0, 1)


def test_a_session_continues_in_the_middle_of_a_file(options: EngineOptions) -> None:
    """Files hold sixteen blocks, so those of the second are read from its beginning on."""
    prompt = [*PROMPT, *PROMPT]
    expected, _ = answered(options, prompt)
    with Engine(MODEL_PATH, options) as engine:
        scheduler = one_slot(engine)
        list(generate(scheduler, Request(prompt[:150], 1, GREEDY)))
        responses = list(generate(scheduler, Request(prompt, 8, GREEDY)))
        assert responses[-1].usage.restored_tokens == 192 - 150
    assert [response.token_id for response in responses] == expected


def test_within_a_budget_files_are_read_into_the_memory_that_is_counted(
    options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is too large for it: what is in a file beside keys and values has room there, too."""
    built: list[int] = []

    def noted(n_bytes: int, **how: bool) -> AddressSpace:
        built.append(n_bytes)
        return AddressSpace(n_bytes, **how)

    monkeypatch.setattr(reading, "AddressSpace", noted)
    options, prompt = replace(options, memory=2 << 30), [*PROMPT, *PROMPT]
    answered(options, prompt)
    built.clear()
    assert restored(options, prompt) == 192
    assert len(built) == 2


def test_a_cache_without_room_in_one_piece_takes_block_after_block(options: EngineOptions) -> None:
    expected, _ = answered(options, PROMPT)
    with Engine(MODEL_PATH, options) as engine:
        context, sizes = engine.states._context, []
        write = context.write_state

        def only_small(sequence: int, data: NDArray[np.uint8]) -> bool:
            sizes.append(data.size)
            return data.size < 2 * min(sizes) and len(sizes) > 1 and write(sequence, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(context, "write_state", only_small)
            result = list(generate(one_slot(engine), Request(PROMPT, 8, GREEDY)))
    assert [response.token_id for response in result] == expected
    assert result[-1].usage.restored_tokens == WHOLE
    assert len(sizes) == 2 + WHOLE // BLOCK_TOKENS  # what is wanted of a file, of either kind, then each block


def test_what_replaces_a_part_of_a_session_is_kept_as_well(options: EngineOptions) -> None:
    other = [*PROMPT[:40], *reversed(PROMPT[40:])]
    with Engine(MODEL_PATH, options) as engine:
        slot = Slot(engine)
        for prompt in (PROMPT, other):
            slot.prefill(prompt)
            slot.keep()
    assert restored(options, other) == restored(options) == WHOLE


def test_another_model_build_type_or_owner_finds_nothing(options: EngineOptions, tmp_path: Path) -> None:
    answered(options, PROMPT)
    assert options.prefixes is not None
    copy = tmp_path / MODEL_PATH.name
    data = bytearray(MODEL_PATH.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    assert restored(options, path=copy) == 0
    assert restored(replace(options, kv_type="f32")) == 0
    stranger = replace(options.prefixes, key_folder=tmp_path / "stranger")
    assert restored(replace(options, prefixes=stranger)) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.llm.prefixes.PINNED_VERSION", "0.0.1")
        assert restored(options) == 0
    assert restored(options) == WHOLE


def test_a_model_whose_metadata_were_edited_is_another(tmp_path: Path) -> None:
    """Also where neither its size nor its time shows that."""
    path, data = tmp_path / "model.gguf", MODEL_PATH.read_bytes()
    fingerprints = set()
    for changed in (data, data.replace(struct.pack("<f", 10000.0), struct.pack("<f", 20000.0), 1)):
        path.write_bytes(changed)
        os.utime(path, ns=(10**18, 10**18))
        fingerprints.add((fingerprint(GgufFile.open(path)), path.stat().st_size))
    assert len(fingerprints) == 2
    assert len({size for _, size in fingerprints}) == 1


def test_damage_ends_what_is_used_of_a_prompt(options: EngineOptions) -> None:
    expected, _ = answered(options, PROMPT)
    assert options.prefixes is not None
    files = sorted(options.prefixes.folder.glob("*.kv"))
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    result, last = answered(options, PROMPT)
    assert result == expected
    assert last.usage.restored_tokens == 0


def test_nothing_on_disk_shows_tokens_keys_or_values(options: EngineOptions) -> None:
    """Twice the same, with two owners: nothing that could be compared is the same."""
    answered(options, PROMPT)
    assert options.prefixes is not None
    names = {file.name for file in options.prefixes.folder.iterdir()}
    with Engine(MODEL_PATH, replace(options, prefixes=None)) as engine:
        engine.decode(PROMPT[:1], 0)
        plain = engine._context.read_state(0, 0, 1).tobytes()[-64:]
    assert any(plain)
    assert all(plain not in file.read_bytes() for file in options.prefixes.folder.iterdir())
    other = replace(options.prefixes, folder=options.prefixes.folder / "b", key_folder=options.prefixes.folder / "k")
    answered(replace(options, prefixes=other), PROMPT)
    assert not names & {file.name for file in other.folder.iterdir()}


def test_a_folder_that_cannot_be_used_is_one_that_has_nothing(options: EngineOptions, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert options.prefixes is not None
    options = replace(options, prefixes=replace(options.prefixes, folder=tmp_path / "file" / "kept"))
    assert restored(options) == restored(options) == 0
