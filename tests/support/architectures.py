"""The table of docs/architectures.md: `python -m tests.support.architectures` writes it.

What it says is what tests assert of a small model of each architecture: `tests/cluster/test_architectures.py` of stages
and shards, `tests/engine/paging/test_paging_architectures.py` and
`tests/engine/quantize/test_quantize_architectures.py` of the rest.
"""

from collections.abc import Iterator

from partition.architectures.dense import DENSE_ARCHITECTURES
from partition.architectures.indexed import INDEXED_ARCHITECTURES
from partition.architectures.moe import MOE_ARCHITECTURES
from partition.architectures.recurrent import RECURRENT_ARCHITECTURES
from partition.architectures.table import ARCHITECTURES, REFUSED
from tests.support import ROOT

PAGE = ROOT / "docs" / "architectures.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
SHARDED = tuple(arch for arch, architecture in ARCHITECTURES.items() if not architecture.rules.no_shards)
# How close logits of shards are to those of the whole, of their standard deviation, at F32. The last three are as far
# off on one device where a weight's last bit is another.
_GELU = (
    "gemma", "gemma2", "gemma3", "phi2", "starcoder2", "gpt2", "gptneox", "falcon", "bloom", "mpt", "starcoder",
    "codeshell", "grok", "spark2_5",
)  # fmt: skip
_DELTA = ("qwen35", "qwen35moe", "qwen3next", "jamba")
CLOSE = dict.fromkeys(SHARDED, 1e-5) | dict.fromkeys(_GELU, 1e-3) | dict.fromkeys(_DELTA, 2e-4) | {"gemma4": 5e-2}
_ONLY_HEAD = "only the head is read again, all layers have to fit"
# Those with recurrent layers that can forget the last rows of a step.
ROLLS_BACK = tuple(arch for arch in RECURRENT_ARCHITECTURES if ARCHITECTURES[arch].rules.rolls_back)
NOT_PAGED = dict.fromkeys(("mamba", "mamba2"), _ONLY_HEAD)
_KINDS = {
    "One feed-forward part in each layer": DENSE_ARCHITECTURES,
    "Experts": MOE_ARCHITECTURES,
    "Experts, and an index of what layers look at": INDEXED_ARCHITECTURES,
    "Recurrent layers": RECURRENT_ARCHITECTURES,
}


def table() -> str:
    """The tables, as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    for title, architectures in _KINDS.items():
        yield f"### {title}"
        yield ""
        yield "| architecture | one device | stages | shards | paged | quantized | prompts kept | drafts |"
        yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
        for name in architectures:
            yield (
                f"| {name} | yes | {_stages(name)} | {_shards(name)} | {_or_no(NOT_PAGED, name)} | yes"
                f" | {_kept(name)} | {_drafts(name)} |"
            )
        yield ""
    yield "### One device only"
    yield ""
    yield "| architecture | why it cannot be cut |"
    yield "| --- | --- |"
    yield from (f"| {name} | {row.why} |" for name, row in REFUSED.items())


def _stages(name: str) -> str:
    rules = ARCHITECTURES[name].rules
    limits = []
    if rules.period > 1:
        limits.append(f"of {rules.period} layers at once")
    hybrid = name in RECURRENT_ARCHITECTURES and ARCHITECTURES[name].attention and ARCHITECTURES[name].recurrent
    if hybrid or (rules.window is not None and rules.window.both):
        limits.append("with layers of both kinds")
    kinds = rules.layers_of_other_kind
    if kinds or rules.other_kind_from:
        limits.append(f"not of {kinds[0]} layers" if kinds else f"not of {rules.other_kind_from} layers and more")
    if rules.whole_with:
        limits.append("not where a file has " + " or ".join(f"`{key}`" for key in rules.whole_with))
    return ", ".join(["yes", *limits])


def _shards(name: str) -> str:
    rules = ARCHITECTURES[name].rules
    if rules.no_shards:
        return f"no: {rules.no_shards}"
    return f"yes, but for attention: {rules.whole_attention}" if rules.whole_attention else "yes"


def _kept(name: str) -> str:
    rules = ARCHITECTURES[name].rules
    if name in RECURRENT_ARCHITECTURES:
        return "in memory, by snapshots" if rules.no_states else "by snapshots"
    if rules.no_states:
        return f"no: {rules.no_states}"
    return "within the window" if rules.window is not None and rules.window.chunked else "yes"


def _drafts(name: str) -> str:
    if name not in RECURRENT_ARCHITECTURES:
        return "yes"
    return "one request at a time" if ARCHITECTURES[name].rules.rolls_back else "no"


def _or_no(reasons: dict[str, str], name: str) -> str:
    return f"no: {reasons[name]}" if name in reasons else "yes"


def page_with(table: str) -> str:
    """The page with this table in place of its own."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page_with(table()))
