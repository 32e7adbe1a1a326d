"""Train the demonstration model: `python -m tools.demo_model.train --out DIR --minutes 60 --seed 1`.

Needs the extra "train" (PyTorch, tokenizers). The learning rate falls to zero as the minutes run out, so a run of any
length ends annealed. DIR receives `tokenizer.json`, `log.txt` and, every few minutes, `checkpoint.pt`; the same command
goes on from there.
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model import corpus, grammar
from tools.demo_model.data import Rows, separate, weights
from tools.demo_model.grammar import CATEGORIES, Message
from tools.demo_model.model import Config, Llama
from tools.demo_model.tokens import END, render, train_tokenizer

WARM_UP = 100  # steps
RATE_MATRICES, RATE_REST = 4e-3, 3e-3
EVERY = 240  # seconds between checkpoints
LOG = 20  # steps between lines of the log
EXAM = 280  # held-out questions at each checkpoint


class Trainer:
    """The model, its optimizers and the time spent so far."""

    def __init__(self, config: Config, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Llama(config)
        named = list(self.model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and name.startswith("blk.")]
        rest = [p for name, p in named if p.ndim == 1 or not name.startswith("blk.")]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"), RATE_MATRICES),
            (torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0), RATE_REST),
        ]
        self.loss = torch.compile(self._loss, dynamic=False)
        self.step, self.tokens, self.seconds = 0, 0, 0.0

    def _loss(self, inputs: Tensor, targets: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
        """The weighted mean cross entropy, in nats."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(inputs, mask)
        each = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return (each * weight.flatten()).sum() / weight.sum()

    def update(self, ids: Any, tokenizer: Tokenizer, rate: float) -> float:
        """One step on rows of ids at `rate` times the full learning rate; returns the loss."""
        inputs, targets = torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(ids[:, 1:].copy())
        weight = torch.from_numpy(weights(ids, tokenizer)[:, 1:].copy())
        loss = self.loss(inputs, targets, weight, torch.from_numpy(separate(ids[:, :-1], tokenizer)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, full in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = full * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += inputs.numel()
        return float(loss.detach())

    def save(self, path: Path) -> None:
        """Write everything that going on needs."""
        state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o, _ in self.optimizers]}
        state |= {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Read what `save` wrote."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]


def accuracy(model: Llama, tokenizer: Tokenizer, exam: list[tuple[list[Message], str]]) -> list[float]:
    """The share of right answers in each category, for an exam that takes the categories in turn.

    Greedy decoding gives exactly the expected answer when each of its tokens is the likeliest after those before it,
    so one pass over question and answer is enough.
    """
    requests = [tokenizer.encode(render(messages, True), add_special_tokens=False).ids for messages, _ in exam]
    expected = [tokenizer.encode(answer + END, add_special_tokens=False).ids for _, answer in exam]
    right = [False] * len(exam)
    order = sorted(range(len(exam)), key=lambda i: len(requests[i]) + len(expected[i]))
    for batch in (order[i : i + 16] for i in range(0, len(order), 16)):
        rows = [torch.tensor(requests[i] + expected[i]) for i in batch]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            best = model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)).argmax(-1)
        for row, i in zip(best.tolist(), batch, strict=True):
            start = len(requests[i]) - 1
            right[i] = row[start : start + len(expected[i])] == expected[i]
    return [float(np.mean(right[i :: len(CATEGORIES)])) for i in range(len(CATEGORIES))]


def rate_at(step: int, seconds: float, budget: float) -> float:
    """The learning rate's share: up over the first steps, level, then down to zero over the last two thirds."""
    return min(1.0, (step + 1) / WARM_UP, max(0.0, 1.5 * (1 - seconds / budget)))


def main() -> None:
    """Train until the minutes are spent."""
    parser = argparse.ArgumentParser(description="Train the demonstration model.")
    parser.add_argument("--out", type=Path, required=True, help="working folder")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="one is best on a busy machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint, config, documents = options.out / "checkpoint.pt", Config(), corpus.documents()
    trainer = Trainer(config, options.seed)
    if checkpoint.exists():
        tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
        trainer.load(checkpoint)
    else:
        sample = islice(grammar.dialogues(random.Random(options.seed)), 20000)
        tokenizer = train_tokenizer([*map(render, sample), *documents], config.vocabulary)
        tokenizer.save(str(options.out / "tokenizer.json"))
    rows = Rows(tokenizer, documents, options.seed + trainer.step)
    exam = grammar.held_out(EXAM, options.seed)
    budget, last, losses = 60 * options.minutes, time.monotonic(), list[float]()
    saved = trainer.seconds
    with (options.out / "log.txt").open("a", encoding="utf-8") as log:
        while trainer.seconds < budget:
            rate = rate_at(trainer.step, trainer.seconds, budget)
            losses.append(trainer.update(rows.batch(), tokenizer, rate))
            now = time.monotonic()
            trainer.seconds, last = trainer.seconds + now - last, now
            if trainer.step % LOG == 0 or trainer.seconds >= budget:
                line = f"step {trainer.step} minutes {trainer.seconds / 60:.1f} tokens {trainer.tokens} rate {rate:.3f}"
                print(f"{line} loss {np.mean(losses[-LOG:]):.4f}", file=log, flush=True)
            if trainer.seconds - saved > EVERY or trainer.seconds >= budget:
                trainer.save(checkpoint)
                saved = trainer.seconds
                shares = zip(CATEGORIES, accuracy(trainer.model, tokenizer, exam), strict=True)
                print("right: " + ", ".join(f"{name} {share:.3f}" for name, share in shares), file=log, flush=True)


if __name__ == "__main__":
    main()
