"""Text from a trained run, one token at a time, with a key/value cache.

The cache holds as many tokens as the model was trained on. When it is full the older half is
forgotten and the rest is read again, so a text may be of any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from speedrun.config.schedule import settings_at
from speedrun.config.schema import Config, MachineConfig
from speedrun.data.tokenizer import StreamDecoder, Tokenizer, load_tokenizer
from speedrun.errors import RunError
from speedrun.model.cache import Cache
from speedrun.model.gpt import GPT
from speedrun.model.plan import AttentionPlanner
from speedrun.train import checkpoint
from speedrun.train.run import RunFolder


class Writer:
    """A model with its cache: feed tokens, get the next token's logits."""

    def __init__(self, model: GPT, config: Config, step: int) -> None:
        self._model, self._sizes = model, config.model
        # Whatever the run was trained with, one token at a time needs no backend of its own.
        here = config.model_copy(update={"machine": MachineConfig()})
        self._attention = AttentionPlanner(here, torch.device("cpu"))
        self._attention.apply_settings(settings_at(config, step))
        self._ids: list[int] = []
        self._forget(0)

    def _forget(self, keep: int) -> list[int]:
        kept, self._ids = self._ids[len(self._ids) - keep :], []
        self._cache = Cache(
            self._sizes.layers, 1, self._sizes.groups, self._model.length, self._sizes.size_of_head
        )
        return kept

    @torch.no_grad()
    def feed(self, ids: list[int]) -> Tensor:
        """Logits (V,) after the last of `ids`."""
        room = self._model.length
        if len(self._ids) + len(ids) > room:
            ids = (self._forget(min(room // 2, len(self._ids))) + ids)[-room:]
        self._ids += ids
        plan = self._attention.plan_last(
            torch.zeros(1, len(self._ids), dtype=torch.int32), len(ids)
        )
        logits_BTV = self._model(torch.tensor([ids]), plan, cache=self._cache)
        last: Tensor = logits_BTV[0, -1, : self._model.vocab_size].float()
        return last


def load_run(path: Path) -> tuple[Writer, Tokenizer]:
    """A writer with the weights of a run's newest whole checkpoint, and its tokenizer."""
    run = RunFolder(path)
    config = run.load_config()
    found, _ = checkpoint.latest(run.checkpoints)
    if found is None:
        raise RunError(f"{path} has no whole checkpoint to sample from; train it first")
    tokenizer = load_tokenizer(run.tokenizer)
    model = GPT(config.model, tokenizer.vocab_size, config.batch.length)
    model.load_state_dict(found.model())
    return Writer(model.eval(), config, found.step), tokenizer


def generate(
    writer: Writer,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[str]:
    """Pieces of text as they are drawn; temperature 0 takes the likeliest token."""
    source = torch.Generator().manual_seed(seed)
    decoder = StreamDecoder(tokenizer)
    ids = [tokenizer.eot, *tokenizer.encode(prompt).tolist()]
    for _ in range(tokens):
        logits_V = writer.feed(ids)
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            kept, which = logits_V.topk(min(top_k or len(logits_V), len(logits_V)))
            odds = torch.softmax(kept / temperature, dim=-1)
            token = int(which[torch.multinomial(odds, 1, generator=source)])
        if token == tokenizer.eot:
            break
        yield decoder.feed(token)
        ids = [token]
    yield decoder.finish()
