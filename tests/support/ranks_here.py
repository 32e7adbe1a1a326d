"""A model spread over ranks that are threads of this process, linked in memory: as deployed, without any worker."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from edge.adapters.file import CheckedAdapter
from edge.cluster.model_slices import ModelSlices
from edge.llama import llama
from edge.llm.options import EngineOptions
from edge.llm.prefixes import name_histories, rank_key, seal
from edge.parallel.engine import DistributedEngine
from edge.parallel.follower import follow_groups
from edge.parallel.grouped import GroupedEngine
from edge.parallel.shard import Shard, load_shards
from edge.parallel.topology import place
from edge.slices.local import OwnSlices
from partition.model.model import ModelShape
from partition.plan.arrange import make_plan
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from tests.support import memory_link
from tests.support.helpers import TIMEOUT_S
from tests.support.links import PATIENT, start
from tests.support.shaped_link import Shape, ShapedLink
from tests.support.slices import write
from transport.collective import Group, Wire
from transport.link import Link

OWNER = bytes(range(32))  # the key


@contextmanager
def ranks_here(
    model: Path,
    how: dict[str, Any],
    options: EngineOptions,
    folder: Path,
    shards: list[Shard] | None = None,
    delay_s: float = 0.0,
    wire: Wire | None = None,
) -> Iterator[DistributedEngine]:
    """Rank 0's engine. how: as `tests.support.deployments` has it. Slices are written to `folder`, and what is kept of
    prompts goes to a folder of each rank in that of the options. shards: is filled with those of all ranks. delay_s: of
    every link, each way. wire: type of partial sums on their way.

    At the end the other ranks must have followed without an error.
    """
    options = replace(options, groups=options.groups or 1)
    file = GgufFile.open(model)
    n = len(how["shares"])
    plan = make_plan(limits(file), model.stem, "", ["local", *(f"rank-{i}" for i in range(1, n))], **how)
    widths = plan.widths
    links: list[dict[int, Link]] = [{} for _ in range(n)]
    for a, b in combinations(range(n), 2):
        ends = memory_link.pair((f"rank {a}", f"rank {b}"), PATIENT)
        links[a][b], links[b][a] = (ShapedLink(end, Shape(delay_s)) for end in ends) if delay_s else ends
    adapters = CheckedAdapter.all_from(options.lora, file, ModelShape.from_gguf(file))
    slices = ModelSlices(file, 64 * "0", adapters, OwnSlices(folder / "cache", folder / "state"))
    groups = [Group(rank, links[rank]) for rank in range(n)]
    shards = [] if shards is None else shards
    with ExitStack() as stack:
        vocabulary = stack.enter_context(closing(llama.Model(model, vocabulary_only=True)))
        each: list[list[Shard]] = []
        for rank in range(n):
            here = place(rank, widths)
            own = replace(options, sequences=-(-options.sequences // options.groups))
            own = own if here.last else replace(own, outputs=options.rows)
            if here.thin:
                each.append([stack.enter_context(closing(Shard(model, own, here, vocabulary=vocabulary)))])
                shards.append(each[rank][0])
                name_histories(shards[0].engine.states, OWNER if options.prefixes is not None else b"")
                continue
            target = folder / f"{model.stem}-{'-'.join(map(str, widths))}-{rank}.gguf"
            slice_ = write(model, plan.slice(rank), target, elastic=options.least_memory is not None)
            _, *of_adapters = slices.files(plan.slice(rank))
            own = replace(own, lora=tuple(str(slices.use(part, stack.enter_context)) for part in of_adapters))
            each.append(load_shards(slice_, own, here))
            for shard in each[rank]:
                stack.enter_context(closing(shard))
            shards.append(each[rank][0])
            if options.prefixes is not None:
                saved, states = options.prefixes, shards[rank].engine.states
                name_histories(states, OWNER)
                seal(states, saved.folder / str(rank), saved.max_bytes, rank_key(OWNER, str(rank)), None)
                for shard in each[rank][1:]:
                    shard.engine.states.share(states)
        following = [start(follow_groups, each[rank], groups[rank], "auto", wire) for rank in range(1, n)]
        over = groups[0].lanes(options.groups) if options.groups > 1 else groups[:1]
        engines = [
            DistributedEngine(
                file, vocabulary, plan, shard, lane, wire=wire, outputs=options.outputs, adapters=adapters
            )
            for shard, lane in zip(each[0], over, strict=True)
        ]
        engine = GroupedEngine(engines, options.sequences) if options.groups > 1 else engines[0]
        try:
            yield engine
        finally:
            engine.end()
            if isinstance(engine, GroupedEngine):
                engine.wait()
            errors = [done.exception(TIMEOUT_S) for done in following]
            for own_links in links:
                for link in own_links.values():
                    link.close()
        assert errors == [None] * (n - 1)
