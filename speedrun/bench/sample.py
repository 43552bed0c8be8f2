"""Sampling: tokens per second with the cache, against recomputing and against the products alone.

A text as long as the model's context is written one token at a time, drawing and decoding
included. Its rivals: reading the whole text again for each token, and the products of the model's
matrices with a vector each, by torch.mv and nothing else, which no token can do without. A prompt
is as long as the context. Texts that are written together share the reading of the weights: eight
of them are set against one. The weights are fresh: what they are makes no difference to the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from speedrun.bench.step import nano_config
from speedrun.bench.timing import Figures, take_turns
from speedrun.config.schedule import settings_at
from speedrun.data.dataset import TOKENIZER
from speedrun.data.find import find_dataset
from speedrun.data.tokenizer import StreamDecoder, Tokenizer, load_tokenizer
from speedrun.limits import threads
from speedrun.model import native
from speedrun.model.gpt import GPT
from speedrun.model.linear import Linear
from speedrun.model.parts import Parts
from speedrun.model.plan import AttentionPlanner
from speedrun.serve.sampling import Logits, Sampler, Sampling, draw
from speedrun.serve.slots import Slots

TOGETHER = 8  # texts at a time
EVERY = 16  # recomputing is timed at every 16th length of the text


class Samples:
    """A fresh model of a recipe, and what is timed of it."""

    def __init__(self, recipe: str, overrides: Sequence[str]) -> None:
        config = nano_config(recipe, overrides)
        self._tokenizer: Tokenizer = load_tokenizer(find_dataset(config) / TOKENIZER)
        self.model = GPT(
            config.model, self._tokenizer.vocab_size, config.batch.length, Parts.of(config)
        ).eval()
        planner = AttentionPlanner(config, torch.device("cpu"))
        planner.apply_settings(settings_at(config, config.steps))
        self._slots = Slots(self.model, planner, self._tokenizer.eot, TOGETHER)
        self._samplers = [Sampler(Sampling(seed=n)) for n in range(TOGETHER)]
        self._decoder = StreamDecoder(self._tokenizer)
        self.length = self._slots.room
        generator = torch.Generator().manual_seed(0)
        self.prompt: list[int] = torch.randint(
            self._tokenizer.vocab_size, (self.length,), generator=generator
        ).tolist()
        matrices = [m.weight.detach() for m in self.model.modules() if isinstance(m, Linear)]
        if self.model.head is None:
            matrices.append(self.model.embedding.weight.detach())
        self._products = [(matrix, torch.randn(matrix.size(1))) for matrix in matrices]

    def _tokens(self, logits: Mapping[int, Logits]) -> dict[int, int]:
        """The next token of each slot."""
        tokens = draw([*zip(self._samplers, logits.values(), strict=False)])
        for token in tokens:
            self._decoder.feed(token)
        return dict(zip(logits, tokens, strict=True))

    def write(self, count: int, texts: int = 1) -> None:
        """Texts of `count` tokens each; the end-of-text token does not end one here."""
        slots = [self._slots.take() for _ in range(texts)]
        tokens = dict.fromkeys(slots, 0)
        for _ in range(count):
            tokens = self._tokens(self._slots.feed({slot: [tokens[slot]] for slot in slots}))
        for slot in slots:
            self._slots.give_back(slot)

    def recompute(self) -> None:
        """The tokens at every 16th length of a text, each from the text so far."""
        for length in range(EVERY, self.length + 1, EVERY):
            self.read(length)

    def read(self, length: int) -> None:
        """A prompt of `length` tokens, and the token after it."""
        slot = self._slots.take()
        self._tokens(self._slots.feed({slot: self.prompt[:length]}))
        self._slots.give_back(slot)

    def multiply(self) -> None:
        """As many times the products alone as a text has tokens."""
        for _ in range(self.length):
            for matrix, x in self._products:
                torch.mv(matrix, x)

    def passes(self, run: Callable[[], object]) -> int:
        """How often the model is run through."""
        passed: list[None] = []
        handle = self.model.register_forward_hook(lambda *_: passed.append(None))
        run()
        handle.remove()
        return len(passed)


def measure_sample(
    turns: int = 7, recipes: Sequence[str] = ("best", "baseline"), overrides: Sequence[str] = ()
) -> Figures:
    """Keys of recipes other than the first end in its name."""
    torch.set_num_threads(threads())
    figures: Figures = {}
    for index, recipe in enumerate(recipes):
        ending = f"_{recipe}" if index else ""
        measured = measure_recipe(Samples(recipe, overrides), turns)
        figures |= {f"{name}{ending}": value for name, value in measured.items()}
    kernel = native.load()
    return {
        **figures,
        "threads": torch.get_num_threads(),
        "kernels": kernel if isinstance(kernel, str) else kernel.built,
    }


def measure_recipe(samples: Samples, turns: int) -> Figures:
    length = samples.length
    seconds = take_turns(
        {
            "write": partial(samples.write, length),
            "write together": partial(samples.write, length, TOGETHER),
            "write more": partial(samples.write, 2 * length),
            "recompute": samples.recompute,
            "multiply": samples.multiply,
            "read": partial(samples.read, length),
        },
        turns,
        times_per_turn={"read": 5},
    )
    token = seconds["write"] / length
    again = seconds["recompute"] / (length // EVERY)
    return {
        "tokens_per_second": 1 / token,
        "tokens_per_second_of_8_texts": TOGETHER * length / seconds["write together"],
        "speedup_of_8_texts": TOGETHER * seconds["write"] / seconds["write together"],
        "tokens_per_second_recomputing": 1 / again,
        "cache_speedup": again / token,
        "times_of_products": seconds["write"] / seconds["multiply"],
        "products_ms_per_token": seconds["multiply"] / length * 1e3,
        "tokens_per_second_beyond_the_context": 2 * length / seconds["write more"],
        "prompt_tokens": length,
        "prompt_tokens_per_second": length / seconds["read"],
        "prompt_passes": samples.passes(partial(samples.read, length)),
    }
