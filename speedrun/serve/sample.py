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
from speedrun.model.decode import decoder_for
from speedrun.model.gpt import GPT
from speedrun.model.plan import AttentionPlanner
from speedrun.train import checkpoint
from speedrun.train.run import RunFolder


class Writer:
    """A model with its cache: feed tokens, get the next token's logits.

    Several tokens are read in one pass of the model, a single one by the decoder where there is
    one: it computes the same in a tenth of the time.
    """

    def __init__(self, model: GPT, config: Config, step: int) -> None:
        self._model, self.room = model, model.length
        # Whatever the run was trained with, here it is one row on a CPU.
        here = config.model_copy(update={"machine": MachineConfig()})
        self._attention = AttentionPlanner(here, torch.device("cpu"))
        self._attention.apply_settings(settings_at(config, step))
        self._first = self._attention.first_keys(self.room)
        sizes = config.model
        self._cache = Cache(sizes.layers, 1, sizes.groups, self.room, sizes.size_of_head)
        self._decoder = decoder_for(model, self._cache)
        self._ids: list[int] = []

    def forget(self) -> None:
        """Begin a new text."""
        self._ids = []
        self._cache.clear()

    @torch.inference_mode()
    def feed(self, ids: list[int]) -> Tensor:
        """Logits (V,) after the last of `ids`."""
        if len(self._ids) + len(ids) > self.room:
            kept = self._ids[-(self.room // 2) :]
            self.forget()
            ids = (kept + ids)[-self.room :]
        self._ids += ids
        if len(ids) == 1 and self._decoder is not None:
            return self._decoder(ids[0], self._first[self._cache.length])
        return self._read(ids)

    def _read(self, ids: list[int]) -> Tensor:
        """Any number of tokens in one pass of the model."""
        documents_BT = torch.zeros(1, len(self._ids), dtype=torch.int32)
        if len(ids) == len(self._ids):
            plan = self._attention.plan(documents_BT)
        else:
            plan = self._attention.plan_last(documents_BT, len(ids))
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
        token = draw(writer.feed(ids), temperature, top_k, source)
        if token == tokenizer.eot:
            break
        yield decoder.feed(token)
        ids = [token]
    yield decoder.finish()


def draw(logits_V: Tensor, temperature: float, top_k: int, source: torch.Generator) -> int:
    """A token of the `top_k` likeliest (0: of all); temperature 0 takes the likeliest.

    A number below the sum of the odds falls on one of them; torch.multinomial, which can do more,
    takes ten times as long for 2,048.
    """
    if temperature == 0:
        return int(logits_V.argmax())
    which = None
    if 0 < top_k < len(logits_V):
        logits_V, which = logits_V.topk(top_k)
    sums_V = torch.softmax(logits_V / temperature, dim=-1).cumsum(dim=-1)
    place = torch.searchsorted(sums_V, torch.rand(1, generator=source) * sums_V[-1], right=True)
    place = place.clamp(max=len(sums_V) - 1)
    return int(place if which is None else which[place])
