"""Rank 0 as an engine: it has the methods of `Engine`, and leads the other ranks.

It has what must not leave the device: the tokens, the token table, the sampler. Others see hidden states and return
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError, Interrupted
from edge.llama import llama
from edge.llama.predicting import HiddenListener
from edge.llama.vocabulary import TokenTable
from edge.llm.interface import DecodesBySteps
from edge.media.placing import RankRows
from edge.net.dialling import LinkState
from edge.parallel import steps
from edge.parallel.leader import Leader
from edge.parallel.shard import Shard
from edge.parallel.states import SpreadStates
from edge.parallel.step_times import StepTimes, Summary, summaries_of
from edge.parallel.steps import Times
from edge.text.constraints.constraint import Mask
from edge.weights.adapter import Scales
from edge.weights.adapter_file import CheckedAdapter
from edge.weights.elastic.weights import next_pass
from partition.model.model import ModelShape
from partition.plan.plan import Plan
from quant.gguf.elastic import elastic_sizes
from quant.gguf.file import GgufFile
from transport.collective import Group, Wire

Floats = NDArray[np.float32]


class DistributedEngine(RankRows, Leader, DecodesBySteps):
    """A model spread over ranks, with the methods of `Engine`. Not closed by itself: the deployment owns it."""

    def __init__(
        self,
        file: GgufFile,
        model: llama.Model,
        plan: Plan,
        shard: Shard,
        group: Group,
        algorithm: str = "auto",
        wire: Wire | None = None,
        outputs: int | None = None,
        explain: Callable[[Exception], Exception] = lambda error: error,
        links: Sequence[LinkState] = (),
        adapters: Sequence[CheckedAdapter] = (),
    ) -> None:
        """model: the vocabulary of `file`. group: links to all ranks, which follow. outputs: as in EngineOptions, of
        the last stage. explain: adds a cause to an error, such as that a device has died. links: states of the links of
        all ranks. adapters: each rank has loaded its part of them."""
        self.path: Path = file.path
        self.plan, self.model = plan, model
        self.shape = ModelShape.from_gguf(file)
        self.context, self.batch = shard.engine.context, shard.engine.batch
        self.memory, self.paging = shard.engine.memory, shard.engine.paging
        self.threads, self.gpu_layers = shard.engine.threads, shard.engine.gpu_layers
        self.sequences, self.attention_window = shard.engine.sequences, shard.engine.attention_window
        self.outputs = min(outputs or self.sequences, self.batch)
        self.stages = len(plan.computing)
        # One stage has one step at a time.
        self.groups = (plan.microbatches or self.stages) if self.stages > 1 else 1
        self._tables = [TokenTable(file.with_tensors(size.tensors)) for size in elastic_sizes(file)]
        heads = {rank: plan.shard(rank).vocab for rank in shard.place.heads}
        super().__init__(file, shard, group, heads, self.shape.n_vocab, algorithm, wire, explain, adapters)
        self.link_states = tuple(links)
        self.states = SpreadStates(self, plan)
        self._stopped = False
        self.listener: HiddenListener | None = None

    # --- decoding, as Engine has it ---

    def submit(
        self,
        tokens: Sequence[int] | NDArray[np.int32],
        positions: NDArray[np.int_],
        sequences: NDArray[np.int_],
        outputs: NDArray[np.int8],
        *,
        top: int = 0,
        masks: Sequence[Mask | None] = (),
        adapters: Scales | None = None,
    ) -> None:
        """Begin a decode step: it is computed here, and goes on to the other stages. All arrays are [n]. `collect`
        returns its logits, if any, in the order of submission. Interrupted after `stop`."""
        if self._stopped:
            raise Interrupted("stopped on request")
        if self.pending and self.stages == 1:  # its logits would come among the sums of this step
            raise EngineError("the last step's logits are still to be collected")
        n, n_outputs = len(tokens), int(np.count_nonzero(outputs))
        if not 0 < n <= self.batch:
            raise EngineError(f"a decode takes 1 to {self.batch} tokens, {n} were given")
        if n_outputs > self.outputs:
            raise EngineError(
                f"{n_outputs} rows are to give logits, the engine was made for {self.outputs}; set outputs"
            )
        if masks and len(masks) != n_outputs:
            raise EngineError(f"{len(masks)} masks were given for {n_outputs} rows that give logits")
        self.adapters.choose(adapters)
        rows = self.shard.rows
        rows.outputs[:n] = outputs
        self.place_rows(rows, tokens, positions, sequences)
        heard = None
        with next_pass(self.paging) as size:
            if tokens[0] >= 0:
                self._tables[size].look_up(tokens, rows.embeddings[:n])
                heard = np.array(tokens, np.int32) if self.listener is not None else None
            self.guarded(lambda: self.submit_rows(n, n_outputs, top, masks, heard))

    @property
    def rollback(self) -> int | None:
        """As `Engine.rollback`."""
        return self.shard.engine.rollback

    @property
    def uncollected(self) -> int:
        """Steps whose logits wait to be collected."""
        return len(self.pending)

    def chunk(self, n: int) -> int:
        """Tokens of a prompt of `n` that should go into one step: several chunks keep all stages busy."""
        return steps.chunk_rows(n, self.batch, self.stages)

    def stop(self) -> None:
        """Make later steps raise Interrupted. One that is under way is completed, or the ranks would differ."""
        self._stopped = True

    def resume(self) -> None:
        """Decode again after `stop`."""
        self._stopped = False

    def listen(self, listener: HiddenListener) -> None:
        """As `Engine.listen`. Of what another stage computes, the hidden states of rows that give logits come, in the
        type that crosses between stages."""
        if self.shard.place.last:
            self.shard.engine.hidden.give()
        self.listener = self.shard.engine.hidden.listener = listener

    # --- all ranks ---

    @property
    def links(self) -> dict[int, str]:
        """Way of the link to each other rank: tcp or grpc."""
        return {rank: link.kind for rank, link in sorted(self.group.links.items())}

    @property
    def logits_cross(self) -> bool:
        """True if other ranks have logits: then few should be requested."""
        return list(self.heads) != [0]

    @property
    def own_times(self) -> StepTimes:
        """Step times of this rank."""
        return self.shard.times

    def times(self, *, clear: bool = False, last: int = 0, rows: int = 0) -> list[dict[str, Summary]]:
        """Return the step times of each rank, as `StepTimes.summaries`. clear: begin anew."""
        own = self.own_times.summaries(last, rows)
        others = self.ordered(Times(clear, last, rows), lambda: self.reports(summaries_of))
        if clear:
            self.own_times.clear()
        return [own, *others]
