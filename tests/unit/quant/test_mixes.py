"""Test llama.cpp's mixes: each has the right name and id, and gives most weights its type."""

import json
import subprocess
import sys
from collections import Counter

import llama_cpp
import pytest

from quant.errors import UnknownTypeError
from quant.gguf.file import GgufFile
from quant.mixes import MIXES, mix_by_name
from tests.support.helpers import ROOT

F16 = ROOT / "tests" / "data" / "edge-demo-f16.gguf"
PREFIXES = ("LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_")
NOT_OFFERED = {"nvfp4"}  # a file may say that it is one; the quantizer makes none

# Tells, for each number that may be a mix, the types that llama.cpp would give the tensors; null where it knows none.
DRY_RUN = """
import ctypes, json, re, sys
import llama_cpp as L
import numpy as np

source, sizes = sys.argv[1], json.loads(sys.argv[2])
found, lines = {}, []
entries = (L.llama_model_imatrix_data * (len(sizes) + 1))()
kept = [np.ones(n, np.float32) for n in sizes.values()]
for entry, name, values in zip(entries, sizes, kept):
    entry.name, entry.size = name.encode(), values.size
    entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

@L.llama_log_callback
def log(level, text, user):
    lines.append(text.decode())

L.llama_log_set(log, None)
for number in range(64):
    params = L.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.dry_run, params.imatrix = number, 1, True, entries
    lines.clear()
    failed = L.llama_model_quantize(source.encode(), b"", ctypes.byref(params))
    types = re.findall(r"\\] +(\\S+) +- .*?(?:MiB \\((\\w+)\\)|size = +[\\d.]+ MiB)\\n", "".join(lines))
    found[number] = None if failed else dict(types)
print(json.dumps(found))
"""

Types = dict[int, dict[str, str] | None]


@pytest.fixture(scope="module")
def llama_types() -> Types:
    """Types that llama.cpp makes of the bundled model: by mix, the types of the tensors that change."""
    sizes = {name: t.shape[0] for name, t in GgufFile.open(F16).tensors.items() if len(t.shape) > 1}
    command = [sys.executable, "-c", DRY_RUN, str(F16), json.dumps(sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return {int(number): types for number, types in json.loads(done.stdout).items()}


def test_names_and_ids_are_those_of_llama_cpp() -> None:
    known = {}
    for name in dir(llama_cpp):
        for prefix in PREFIXES:
            if name.startswith(prefix):
                known[name.removeprefix(prefix).lower()] = getattr(llama_cpp, name)
    assert {name: mix.id for name, mix in MIXES.items()} == {n: i for n, i in known.items() if n not in NOT_OFFERED}
    assert all(mix.name == name for name, mix in MIXES.items())


def test_all_that_llama_cpp_makes_are_there_and_no_others(llama_types: Types) -> None:
    assert {number for number, types in llama_types.items() if types is not None} == {mix.id for mix in MIXES.values()}


@pytest.mark.parametrize("name", MIXES)
def test_most_tensors_get_the_main_type(llama_types: Types, name: str) -> None:
    types = llama_types[MIXES[name].id]
    assert types is not None
    counts = Counter(kind.lower() for kind in types.values() if kind)
    if name == "f16":
        assert not counts  # the model has it already
    elif name == "mxfp4_moe":
        assert set(counts) == {"q8_0"}  # its main type is for experts
    else:
        assert counts.most_common(1)[0][0] == MIXES[name].type.name


def test_names_are_read_in_any_case_and_short() -> None:
    assert mix_by_name("Q4_K_M") is MIXES["q4_k_m"]
    assert [mix_by_name(name).name for name in ("q3_k", "Q4_K", "q5_k")] == ["q3_k_m", "q4_k_m", "q5_k_m"]
    assert mix_by_name("q6_k") is MIXES["q6_k"]


@pytest.mark.parametrize("name", ["", "q4", "q4_k_m ", "nvfp4", "q9_9", "q4_k_m\n", "\x00"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownTypeError) as raised:
        mix_by_name(name)
    assert repr(name) in str(raised.value)
    assert all(known in str(raised.value) for known in MIXES)
