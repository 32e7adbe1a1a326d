"""Test the catalog of published models: its shapes equal the published files, and wrong entries are refused."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from edge.errors import CatalogError
from edge.models.catalog import KnownModel, catalog, known_models, read_catalog
from edge.models.mix_types import types_in_mix
from edge.models.shapes import Shape
from edge.models.synth import layout, synthesize, write_outline
from edge.planning.candidates import candidates
from edge.quantization.gguf import types_of_each
from partition.model.check import check_loadable
from partition.model.model import ModelShape
from quant.gguf.file import GgufFile
from quant.mixes import Mix, mix_by_name
from quant.types import TYPES

SHAPED = [model for model in known_models() if model.shape is not None]
EXACT = [model for model in SHAPED if model.about_bytes % 1_000_000]  # sizes that were published to the byte
VOCABULARY_BYTES = 50  # of a token: its text, a merge, a score and a type; an outline has none
ENTRY = """
[[model]]
name = "mine"
parameters = 1.84e6
shape = { arch = "llama", layers = 2, embd = 256, ff = 512, heads = 4, vocab = 1024 }
"""


def test_it_has_the_models_that_people_run() -> None:
    assert 20 <= len(SHAPED) <= 40
    assert len(EXACT) >= 8
    assert {"smollm2-135m", "qwen3-30b-a3b", "llama-3.1-8b", "gemma-3-12b", "gpt-oss-20b", "mistral-small-24b"} <= {
        model.name for model in SHAPED
    }
    for model in SHAPED:
        assert model.types
        for score in model.scores:
            assert score.source.startswith("https://")
            assert len(score.date) == len("2024-09-25")


def test_outlines_are_as_large_as_the_published_files(tmp_path: Path) -> None:
    """Types are llama.cpp's own choice, so a wrong figure, or a wrong type of the file, shows in its bytes."""
    outlines = [outline(tmp_path, model) for model in EXACT]
    jobs = [(file, mix_by_name(model.types[0])) for model, file in zip(EXACT, outlines, strict=True)]
    for model, outcome in zip(EXACT, types_of_each(jobs), strict=True):
        assert model.shape is not None
        assert outcome.n_bytes < model.about_bytes
        assert outcome.n_bytes + VOCABULARY_BYTES * model.shape.vocab == pytest.approx(model.about_bytes, rel=0.01), (
            model.name
        )


def test_types_in_a_mix_equal_the_types_of_the_quantizer(tmp_path: Path) -> None:
    """Shapes are those of the catalog, and others with numbers of layers and columns at the edges of the rules."""
    jobs, expected = [], []
    for i, (shape, mix) in enumerate(_shapes_in_mixes()):
        types = types_in_mix(shape, mix)
        if types is not None:
            jobs.append((write_outline(tmp_path / f"{i}.gguf", shape, "outline"), mix))
            expected.append(types)
    assert len(jobs) > len(SHAPED)
    for (_, mix), types, outcome in zip(jobs, expected, types_of_each(jobs), strict=True):
        assert types == outcome.types, mix.name


def _shapes_in_mixes() -> Iterator[tuple[Shape, Mix]]:
    shaped = [(model.shape, model.types) for model in catalog() if model.shape is not None]
    for shape, types in shaped:
        yield from ((shape, mix_by_name(name)) for name in types)
    architectures = {shape.arch: shape for shape, _ in shaped}
    for number, (shape, layers) in enumerate(product(architectures.values(), (1, 7, 8, 9, 80))):
        for name in ("q4_k_m", "q4_0", "mxfp4_moe"):
            yield replace(shape, layers=layers, ff=shape.ff + (0, 32, 16)[number % 3]), mix_by_name(name)


def test_models_of_the_catalog_need_no_quantizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("edge.quantization.gguf._child")
    with candidates(known_models()) as result:
        assert len(result) == sum(len(model.types) for model in SHAPED)


def outline(folder: Path, model: KnownModel) -> GgufFile:
    assert model.shape is not None
    return write_outline(folder / f"{model.name}.gguf", model.shape, model.name)


@pytest.mark.parametrize(
    "model", [model for model in catalog() if model.shape is not None], ids=lambda model: model.name
)
def test_an_outline_has_all_that_the_shape_makes_and_takes_no_room(tmp_path: Path, model: KnownModel) -> None:
    file = outline(tmp_path, model)
    assert model.shape is not None
    check_loadable(file)
    shape = ModelShape.from_gguf(file)
    assert shape.n_params == model.shape.parameters == pytest.approx(model.parameters, rel=0.02)
    assert shape.weight_bytes == sum(tensor.n_bytes for tensor in layout(model.shape, "f16", "f16"))
    assert (shape.n_layers, shape.n_embd, shape.n_vocab) == (model.shape.layers, model.shape.embd, model.shape.vocab)
    assert file.path.stat().st_blocks * 512 < 1 << 20


def test_an_outline_is_as_a_file_of_the_same_shape(tmp_path: Path) -> None:
    """All that a planner reads is the same."""
    model = read_catalog(written(tmp_path, ENTRY))[0]
    assert model.shape is not None
    synthesize(tmp_path / "whole.gguf", model.shape, "q4_0")
    whole = GgufFile.open(tmp_path / "whole.gguf")
    types = {name: tensor.type for name, tensor in whole.tensors.items()}
    file = write_outline(tmp_path / "outline.gguf", model.shape, "llama random 0", types)
    assert ModelShape.from_gguf(file) == ModelShape.from_gguf(whole)
    assert file.tensors.keys() == whole.tensors.keys()


def test_factors_of_the_rotation_are_not_zero(tmp_path: Path) -> None:
    model = next(model for model in SHAPED if model.shape is not None and model.shape.rope_freqs)
    file = outline(tmp_path, model)
    assert file.tensors["rope_freqs.weight"].type == TYPES["f32"]
    assert set(memoryview(file.data("rope_freqs.weight")).cast("f")) == {1.0}


def written(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text)
    return path


def test_entries_of_a_person_are_read(tmp_path: Path) -> None:
    more = (
        'licence = "mit"\nrepo = "me/mine-GGUF"\nfile = "mine-Q4_K_M.gguf"\nabout_bytes = 1_000_000\ntypes = ["q4_k"]\n'
    )
    scores = 'scores = [{ name = "MMLU", value = 1.5, date = 2026-01-02, source = "https://example.org" }]\n'
    [model] = read_catalog(written(tmp_path, ENTRY + more + scores))
    assert (model.source, model.types, model.licence) == ("me/mine-GGUF:mine-Q4_K_M.gguf", ("q4_k_m",), "mit")
    assert model.scores[0].to_json() == {
        "name": "MMLU", "value": 1.5, "date": "2026-01-02", "source": "https://example.org",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"mine"', '"Mine"', r"model\[0\]\.name needs lower-case"),
        ('"mine"', "7", r"model\[0\]\.name needs a name, in quotes; got 7"),
        ("[[model]]", "[model]", "model needs to be tables"),
        ("parameters = 1.84e6", "", r"model\[0\]\.parameters needs the published number"),
        ("1.84e6", "1.95e6", r"parameters needs what the shape makes, 1\.84 M: one of the two is wrong"),
        ("1.84e6", '"1.84M"', r"parameters needs a number from 1 to 1e\+15, without a unit; got '1.84M'"),
        ("layers = 2", "layers = 3", "one of the two is wrong"),
        ("layers = 2", "layers = 0", r"model\[0\]\.shape: layers is 0, and must be at least 1"),
        ("layers = 2", "layers = 2.5", r"shape\.layers needs a whole number, without a unit; got 2\.5"),
        ("layers = 2", 'layers = "2"', r"shape\.layers needs a whole number, without a unit; got '2'"),
        ("layers = 2", "layers = true", r"shape\.layers needs a whole number, without a unit; got True"),
        ("layers = 2, ", "", r"model\[0\]\.shape: .*'layers'; give it"),
        ("layers = 2", "depth = 2", r"shape has an unknown key 'depth'; known keys are arch, layers"),
        ('arch = "llama"', 'arch = "lama"', r"shape: unknown architecture 'lama'; known: llama"),
        ("heads = 4", "heads = 3", r"shape: embd 256 does not divide into 3 heads"),
        ("shape = {", "form = {", r"model\[0\] has an unknown key 'form'"),
        ('name = "mine"', 'name = "mine"\nwheel = "x"', "unknown key 'wheel'"),
        ('name = "mine"', 'name = "mine"\nrepo = "me"', r"repo needs OWNER/NAME on the hub, with file; got 'me'"),
        ('name = "mine"', 'name = "mine"\nrepo = "me/it"\nfile = "x.gguf"', "licence needs a licence, in quotes"),
        ('name = "mine"', 'name = "mine"\ntypes = ["q4_x"]', r"types: unknown type 'q4_x'; known: "),
        ('name = "mine"', 'name = "mine"\ntypes = "q4_0"', r"types needs a list; got 'q4_0'"),
        ('name = "mine"', 'name = "mine"\nabout_bytes = "1GB"', "about_bytes needs a number .* without a unit"),
        ('name = "mine"', 'name = "mine"\nscores = [{ name = "a", value = 1 }]', r"scores\[0\]\.date needs a date"),
        ('name = "mine"', 'name = "mine"\nscores = [{ name = "a", date = 2026-01-02 }]', "value needs a number"),
        ("[[model]]", "[[modle]]", "the file has an unknown key 'modle'; known keys are model"),
        ("[[model]]", "[[model", "models.toml is not valid TOML: "),
    ],
)  # fmt: skip
def test_wrong_entries_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in ENTRY
    with pytest.raises(CatalogError, match=message) as refused:
        read_catalog(written(tmp_path, ENTRY.replace(old, new)))
    assert "\n" not in str(refused.value)
    assert "models.toml" in str(refused.value)


def test_a_name_is_there_once(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"model\[1\]\.name: another model is called 'mine'; use another name"):
        read_catalog(written(tmp_path, ENTRY + ENTRY))
