"""A model on ranks that are threads of this process, linked in memory: like a deployment, but without a worker."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from edge.cluster.model_slices import ModelSlices
from edge.llama import llama
from edge.llm.options import EngineOptions
from edge.llm.prefixes import name_histories, rank_key, seal
from edge.models.local_slices import OwnSlices
from edge.parallel.engine import DistributedEngine
from edge.parallel.follower import follow
from edge.parallel.shard import Shard
from edge.parallel.topology import place
from edge.weights.adapter_file import CheckedAdapter
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.slices.gguf_slice import limits
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
    file = ModelFile.open(model)
    n = len(how["shares"])
    plan = make_plan(limits(file), model.stem, "", ["local", *(f"rank-{i}" for i in range(1, n))], **how)
    widths = plan.widths
    links: list[dict[int, Link]] = [{} for _ in range(n)]
    for a, b in combinations(range(n), 2):
        ends = memory_link.pair((f"rank {a}", f"rank {b}"), PATIENT)
        links[a][b], links[b][a] = (ShapedLink(end, Shape(delay_s)) for end in ends) if delay_s else ends
    adapters = CheckedAdapter.all_from(options.lora, file)
    slices = ModelSlices(file, 64 * "0", adapters, OwnSlices(folder / "cache", folder / "state"))
    groups = [Group(rank, links[rank]) for rank in range(n)]
    shards = [] if shards is None else shards
    with ExitStack() as stack:
        vocabulary = stack.enter_context(closing(llama.Model(model, vocabulary_only=True)))
        for rank in range(n):
            here = place(rank, widths)
            own = options if here.last else replace(options, outputs=options.rows)
            if here.thin:
                shards.append(stack.enter_context(closing(Shard(file, own, here, vocabulary=vocabulary))))
                name_histories(shards[0].engine.states, OWNER if options.prefixes is not None else b"")
                continue
            target = folder / f"{model.stem}-{'-'.join(map(str, widths))}-{rank}.gguf"
            slice_ = write(model, plan.slice(rank), target, elastic=options.least_memory is not None)
            _, *of_adapters = slices.files(plan.slice(rank))
            own = replace(own, lora=tuple(str(slices.use(part, stack.enter_context)) for part in of_adapters))
            shards.append(stack.enter_context(closing(Shard(ModelFile.open(slice_), own, here))))
            if options.prefixes is not None:
                saved, states = options.prefixes, shards[rank].engine.states
                name_histories(states, OWNER)
                seal(states, saved.folder / str(rank), saved.max_bytes, rank_key(OWNER, str(rank)), None)
        following = [start(follow, shards[rank], groups[rank], "auto", wire) for rank in range(1, n)]
        engine = DistributedEngine(
            file, vocabulary, plan, shards[0], groups[0], wire=wire, outputs=options.outputs, adapters=adapters
        )
        try:
            yield engine
        finally:
            engine.end()
            errors = [done.exception(TIMEOUT_S) for done in following]
            for own_links in links:
                for link in own_links.values():
                    link.close()
        assert errors == [None] * (n - 1)
