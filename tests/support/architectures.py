"""The tables of docs/architectures.md: `python -m tests.support.architectures` writes them.

Tests check every cell with a small model of each architecture: `tests/cluster/test_architectures.py` checks stages and
shards, `tests/engine/paging/test_paging_architectures.py` and `tests/engine/quantize/test_quantize_architectures.py`
check the rest.
"""

from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

from partition.architectures.dense import DENSE_ARCHITECTURES
from partition.architectures.indexed import INDEXED_ARCHITECTURES
from partition.architectures.moe import MOE_ARCHITECTURES
from partition.architectures.recurrent import RECURRENT_ARCHITECTURES
from partition.architectures.table import ARCHITECTURES, REFUSED
from tests.support import ROOT

Key = TypeVar("Key", bound=Hashable)
PAGE = ROOT / "docs" / "architectures.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
SHARDED = tuple(arch for arch, architecture in ARCHITECTURES.items() if not architecture.rules.no_shards)
# Largest difference between logits of shards and of the whole model at F32, as a fraction of their standard deviation.
# Changing the last bit of a weight changes logits of the last three kinds as much on one device.
_GELU = (
    "gemma", "gemma2", "gemma3", "phi2", "starcoder2", "gpt2", "gptneox", "falcon", "bloom", "mpt", "starcoder",
    "codeshell", "grok", "spark2_5",
)  # fmt: skip
_DELTA = ("qwen35", "qwen35moe", "qwen3next", "jamba")
CLOSE = dict.fromkeys(SHARDED, 1e-5) | dict.fromkeys(_GELU, 1e-3) | dict.fromkeys(_DELTA, 2e-4) | {"gemma4": 5e-2}
_ONLY_HEAD = "only the head is read again, all layers have to fit"
# Architectures with recurrent layers whose last rows of a step can be forgotten.
ROLLS_BACK = tuple(arch for arch in RECURRENT_ARCHITECTURES if ARCHITECTURES[arch].rules.rolls_back)
NOT_PAGED = dict.fromkeys(("mamba", "mamba2"), _ONLY_HEAD)
_KINDS = {
    "One feed-forward part in each layer": DENSE_ARCHITECTURES,
    "Experts": MOE_ARCHITECTURES,
    "Experts, and an index for attention": INDEXED_ARCHITECTURES,
    "Recurrent layers": RECURRENT_ARCHITECTURES,
}


def table() -> str:
    """Return the tables as Markdown: a row for all architectures with the same properties, and the reasons."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    for title, architectures in _KINDS.items():
        yield f"### {title}"
        yield ""
        yield "| architectures | stages | shards | paged | prompts kept | drafts |"
        yield "| --- | --- | --- | --- | --- | --- |"
        rows = _grouped((_properties(name), name) for name in architectures)
        yield from (f"| {', '.join(names)} | {' | '.join(properties)} |" for properties, names in rows.items())
        yield ""
    rules = {name: architecture.rules for name, architecture in ARCHITECTURES.items()}
    without = ((rule.whole_attention, name) for name, rule in rules.items() if not rule.no_shards)
    yield from _reasons("Why shards do not divide attention", without)
    yield ""
    yield from _reasons("Why there are no shards", ((rule.no_shards, name) for name, rule in rules.items()))
    yield ""
    yield from _reasons("One device only", ((row.why, name) for name, row in REFUSED.items()))


def _reasons(title: str, pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"### {title}"
    yield ""
    yield "| reason | architectures |"
    yield "| --- | --- |"
    rows = _grouped((reason, name) for reason, name in pairs if reason)
    yield from (f"| {reason} | {', '.join(names)} |" for reason, names in rows.items())


def _grouped(pairs: Iterable[tuple[Key, str]]) -> dict[Key, list[str]]:
    """Return the names of each key, both in the order in which they come."""
    names: dict[Key, list[str]] = {}
    for key, name in pairs:
        names.setdefault(key, []).append(name)
    return names


def _properties(name: str) -> tuple[str, ...]:
    return _stages(name), _shards(name), "no" if name in NOT_PAGED else "yes", _kept(name), _drafts(name)


def _stages(name: str) -> str:
    rules = ARCHITECTURES[name].rules
    limits = []
    if rules.period > 1:
        limits.append(f"of {rules.period} layers each")
    hybrid = name in RECURRENT_ARCHITECTURES and ARCHITECTURES[name].attention and ARCHITECTURES[name].recurrent
    if hybrid or (rules.window is not None and rules.window.both):
        limits.append("with layers of both kinds")
    kinds = rules.layers_of_other_kind
    if kinds or rules.other_kind_from:
        limits.append(f"not of {kinds[0]} layers" if kinds else f"not of {rules.other_kind_from} layers and more")
    if rules.whole_with:
        limits.append("not if a file has " + " or ".join(f"`{key}`" for key in rules.whole_with))
    return ", ".join(["yes", *limits])


def _shards(name: str) -> str:
    rules = ARCHITECTURES[name].rules
    if rules.no_shards:
        return "no"
    return "without attention" if rules.whole_attention else "yes"


def _kept(name: str) -> str:
    rules = ARCHITECTURES[name].rules
    if name in RECURRENT_ARCHITECTURES:
        return "snapshots in memory" if rules.no_states else "snapshots"
    if rules.no_states:
        return "no"
    return "within the window" if rules.window is not None and rules.window.chunked else "yes"


def _drafts(name: str) -> str:
    if name not in RECURRENT_ARCHITECTURES:
        return "yes"
    return "one request" if ARCHITECTURES[name].rules.rolls_back else "no"


def page_with(table: str) -> str:
    """Return the page with these tables instead of its own."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page_with(table()))
