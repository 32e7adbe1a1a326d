"""Rank 0 as an engine: it has the methods of `Engine` and leads the other ranks.

Rank 0 holds everything that must not leave the device: the tokens, the token table and the sampler. Other ranks see
hidden states and return logits.
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
from partition.model.file import ModelFile
from partition.plan.plan import Plan
from quant.gguf.elastic import elastic_sizes
from transport.collective import Group, Wire

Floats = NDArray[np.float32]


class DistributedEngine(RankRows, Leader, DecodesBySteps):
    """A model spread over ranks, with the methods of `Engine`. The deployment owns and closes its parts."""

    def __init__(
        self,
        file: ModelFile,
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
        """Lead the ranks of a group.

        model: vocabulary of `file`.
        shard: slice of this rank.
        group: links to all other ranks, which follow.
        outputs: as in EngineOptions, for the last stage.
        explain: returns an error with its cause, for example that a device has died.
        links: states of the links of all ranks.
        adapters: adapters that the ranks have loaded.
        """
        self.path: Path = file.path
        self.plan, self.model = plan, model
        self.shape = file.shape
        self.context, self.batch = shard.engine.context, shard.engine.batch
        self.memory, self.paging = shard.engine.memory, shard.engine.paging
        self.threads, self.gpu_layers = shard.engine.threads, shard.engine.gpu_layers
        self.sequences, self.attention_window = shard.engine.sequences, shard.engine.attention_window
        self.outputs = min(outputs or self.sequences, self.batch)
        self.stages = len(plan.computing)
        # One stage has one step at a time.
        self.microbatches = (plan.microbatches or self.stages) if self.stages > 1 else 1
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
        """Compute a decode step on this rank and send it to the next stage. All arrays are [n].

        `collect` returns the logits of the step, if any, in the order of submission. Raises Interrupted after `stop`.
        """
        if self._stopped:
            raise Interrupted("stopped on request")
        # A stage of several ranks would receive those logits during this step's all-reduces.
        if self.pending and self.stages == 1:
            raise EngineError("collect the logits of the last step first")
        n, n_outputs = len(tokens), int(np.count_nonzero(outputs))
        if not 0 < n <= self.batch:
            raise EngineError(f"a decode takes 1 to {self.batch} tokens, got {n}")
        if n_outputs > self.outputs:
            raise EngineError(
                f"{n_outputs} rows should produce logits, but the engine was made for {self.outputs}; set outputs"
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
        """Same as `Engine.rollback`."""
        return self.shard.engine.rollback

    @property
    def uncollected(self) -> int:
        """Number of steps whose logits have not been collected."""
        return len(self.pending)

    def chunk(self, n: int) -> int:
        """Return the tokens per step of a prompt of `n` tokens. Several chunks keep all stages busy."""
        return steps.chunk_rows(n, self.batch, self.stages)

    def stop(self) -> None:
        """Make later steps raise Interrupted. A step in progress is completed, because otherwise the caches of the
        ranks would differ.
        """
        self._stopped = True

    def resume(self) -> None:
        """Allow steps again after `stop`."""
        self._stopped = False

    def listen(self, listener: HiddenListener) -> None:
        """Same as `Engine.listen`. If another stage is the last one, only hidden states of rows with logits arrive,
        in the wire type.
        """
        if self.shard.place.last:
            self.shard.engine.hidden.give()
        self.listener = self.shard.engine.hidden.listener = listener

    # --- all ranks ---

    @property
    def links(self) -> dict[int, str]:
        """Transport of the link to each other rank: "tcp" or "grpc"."""
        return {rank: link.kind for rank, link in sorted(self.group.links.items())}

    @property
    def logits_cross(self) -> bool:
        """True if other ranks have logits. Then few logits should be requested."""
        return list(self.heads) != [0]

    @property
    def own_times(self) -> StepTimes:
        """Step times of this rank."""
        return self.shard.times

    def times(self, *, clear: bool = False, last: int = 0, rows: int = 0) -> list[dict[str, Summary]]:
        """Return the step times of each rank, as `StepTimes.summaries`. clear: forget them afterwards."""
        own = self.own_times.summaries(last, rows)
        others = self.ordered(Times(clear, last, rows), lambda: self.reports(summaries_of))
        if clear:
            self.own_times.clear()
        return [own, *others]
