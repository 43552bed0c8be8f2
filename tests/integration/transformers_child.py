"""What an exported folder does in the real transformers; run by the Python of a clean environment.

It imports nothing of ours. For every folder it is given it loads the model, compares it with what
our own model computed (`expected.safetensors` and `expected.json` beside the folder) and prints one
line of JSON with the differences it found.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, pipeline


@contextmanager
def heard() -> Iterator[list[str]]:
    """What transformers has to complain about meanwhile."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, ear = logging.getLogger("transformers"), Ear(logging.WARNING)
    logger.addHandler(ear)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield said
    logger.removeHandler(ear)
    said += [str(each.message) for each in found]


class Folder:
    """An exported folder, loaded, and what it should compute."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = json.loads((path.parent / "expected.json").read_text())
        tensors = load_file(path.parent / "expected.safetensors")
        self.ids, self.logits = tensors["ids"].long(), tensors["logits"]
        self.own = "auto_map" in json.loads((path / "config.json").read_text())
        self.trust = {"trust_remote_code": True} if self.own else {}
        self.model = AutoModelForCausalLM.from_pretrained(path, **self.trust).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path, **self.trust)
        self.eot: int = self.tokenizer.eos_token_id

    def off(self, found: Tensor, expected: Tensor) -> float:
        return float((found.float() - expected).abs().max())

    def positions(self, mask: Tensor, new: int) -> dict[str, Tensor]:
        """Stock models have to be told them; ours finds them in the mask."""
        if self.own:
            return {}
        return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -new:]}

    def whole(self) -> float:
        return self.off(self.model(self.ids, use_cache=False).logits, self.logits)

    def in_parts(self, cache: Any = None) -> float:
        """A token, a part, another, then one at a time, with what the last call gave back."""
        T = self.ids.size(1)
        ends = [1, 90, 261, *range(T - 8, T + 1)]
        worst, begin = 0.0, 0
        for end in ends:
            out = self.model(self.ids[:, begin:end], past_key_values=cache, use_cache=True)
            worst = max(worst, self.off(out.logits, self.logits[:, begin:end]))
            cache, begin = out.past_key_values, end
        return worst

    def padded(self, side: str) -> float:
        """Rows of different lengths in one batch, the last tokens by the cache."""
        T, new = self.ids.size(1), 4
        counts = [T, T - 37, T - 150]
        ids = torch.full_like(self.ids, self.eot)
        mask = torch.zeros_like(self.ids)
        where = [slice(T - n, T) if side == "left" else slice(0, n) for n in counts]
        for row, (n, place) in enumerate(zip(counts, where, strict=True)):
            ids[row, place], mask[row, place] = self.ids[row, :n], 1
        out = self.model(ids, attention_mask=mask, **self.positions(mask, T))
        logits = out.logits
        if side == "left":
            prompt = mask[:, : T - new]
            out = self.model(ids[:, : T - new], attention_mask=prompt, use_cache=True,
                             **self.positions(prompt, T - new))  # fmt: skip
            parts = [out.logits]
            for end in range(T - new + 1, T + 1):
                out = self.model(
                    ids[:, end - 1 : end], attention_mask=mask[:, :end],
                    past_key_values=out.past_key_values, **self.positions(mask[:, :end], 1),
                )  # fmt: skip
                parts.append(out.logits)
            again = torch.cat(parts, dim=1)
        else:  # nobody sees what comes later, so the mask can be left out
            again = self.model(ids).logits
        return max(
            self.off(found[row, place], self.logits[row, :n])
            for found in (logits, again)
            for row, (n, place) in enumerate(zip(counts, where, strict=True))
        )

    def batch(self) -> dict[str, Tensor]:
        """The prompts of the greedy texts, in one batch."""
        prompts = [{"input_ids": ids} for ids in self.facts["prompts"]]
        return dict(self.tokenizer.pad(prompts, return_tensors="pt"))

    def text_of(self, written: Tensor) -> list[list[int]]:
        """What follows the prompts, up to its end."""
        width = self.batch()["input_ids"].size(1)
        rows: list[list[int]] = [row[width:].tolist() for row in written]
        return [row[: row.index(self.eot)] if self.eot in row else row for row in rows]

    def greedy(self, **how: Any) -> bool:
        out = self.model.generate(
            **self.batch(), do_sample=False, max_new_tokens=self.facts["new"], **how
        )
        same: bool = self.text_of(out) == self.facts["greedy"]
        return same

    def alone(self, **how: Any) -> bool:
        """One text at a time."""
        for prompt, expected in zip(self.facts["prompts"], self.facts["greedy"], strict=True):
            out = self.model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=self.facts["new"], **how
            )
            row = out[0, len(prompt) :].tolist()
            if (row[: row.index(self.eot)] if self.eot in row else row) != expected:
                return False
        return True

    def beams(self) -> bool:
        """Beams change places in the cache; without one they are computed anew."""
        found = [
            self.model.generate(**self.batch(), num_beams=3, do_sample=False, max_new_tokens=12,
                                use_cache=use)
            for use in (True, False)
        ]  # fmt: skip
        return torch.equal(*found)

    def sampled(self) -> bool:
        torch.manual_seed(0)
        out = self.model.generate(
            **self.batch(), do_sample=True, temperature=5.0, top_k=0, max_new_tokens=30
        )
        return bool((out < self.facts["tokens"]).all())

    def loss(self) -> float:
        """With labels; its gradient must reach every weight."""
        self.model.train()
        out = self.model(self.ids, labels=self.ids)
        out.loss.backward()
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            assert gradient.isfinite().all(), name
            # Layer 0's values mixed with themselves are the same at any weight.
            assert gradient.any() or name == "blocks.0.attention.blend", name
            parameter.grad = None
        self.model.eval()
        shifted = self.logits[:, :-1].flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(shifted, self.ids[:, 1:].flatten())
        return self.off(out.loss.detach(), expected)

    @torch.no_grad()
    def saved_again(self) -> float:
        with tempfile.TemporaryDirectory() as place:
            self.model.save_pretrained(place)
            self.tokenizer.save_pretrained(place)
            again = AutoModelForCausalLM.from_pretrained(place, **self.trust).eval()
            tokenizer = AutoTokenizer.from_pretrained(place, **self.trust)
            assert tokenizer("a b")["input_ids"] == self.tokenizer("a b")["input_ids"]
            return self.off(again(self.ids).logits, self.logits)

    @torch.no_grad()
    def half(self, dtype: torch.dtype) -> float:
        """How far logits are off in a 16-bit type, by the cache too, against their spread."""
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype, **self.trust).eval()
        whole = model(self.ids, use_cache=False).logits.float()
        first = model(self.ids[:, :270], use_cache=True)
        rest = model(self.ids[:, 270:], past_key_values=first.past_key_values)
        found = torch.cat([first.logits, rest.logits], dim=1).float()
        assert model.generate(**self.batch(), max_new_tokens=3).size(0) == 3
        worst = max((each - self.logits).abs().mean() for each in (found, whole))
        return float(worst / self.logits.std())

    def tokens(self) -> bool:
        tokenizer = self.tokenizer
        assert tokenizer.is_fast
        assert tokenizer.bos_token_id == tokenizer.eos_token_id
        assert tokenizer.model_max_length == self.facts["length"]
        for text, ids in self.facts["texts"]:
            if len(ids) >= self.facts["length"]:
                continue  # it would complain, as it should
            found = tokenizer(text)
            assert sorted(found) == ["attention_mask", "input_ids"], sorted(found)
            if found["input_ids"] != [self.eot, *ids]:
                return False
            if tokenizer.decode(found["input_ids"], skip_special_tokens=True) != text:
                return False
        return True

    @torch.no_grad()
    def eager(self) -> float:
        """Asked for another attention; and the states between layers."""
        model = AutoModelForCausalLM.from_pretrained(
            self.path, attn_implementation="eager", **self.trust
        ).eval()
        out = model(self.ids, output_hidden_states=True)
        assert len(out.hidden_states) == 1 + model.config.num_hidden_layers
        return self.off(out.logits, self.logits)

    def piped(self) -> bool:
        write = pipeline("text-generation", model=str(self.path), **self.trust)
        texts = write(["1 + 1", "2"], max_new_tokens=8, batch_size=2)
        both: bool = texts[0][0]["generated_text"].startswith("1 + 1")
        return both and texts[1][0]["generated_text"].startswith("2")

    def untrusted(self) -> bool:
        """The tokenizer alone needs none of our code, though transformers asks about it."""
        with redirect_stdout(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(self.path)
        same: bool = tokenizer("a b")["input_ids"] == self.tokenizer("a b")["input_ids"]
        return same

    def refused(self) -> list[str]:
        """What ours cannot do it says."""
        if not self.own:
            return []
        said = []
        for wrong in (
            {"input_ids": self.ids, "position_ids": torch.zeros_like(self.ids)},
            {"input_ids": self.ids, "output_attentions": True},
            {"input_ids": self.ids, "attention_mask": torch.ones(3, 1, 1, self.ids.size(1))},
            {"inputs_embeds": torch.zeros(1, 1, 32)},
        ):
            try:
                self.model(**wrong)
            except (ValueError, TypeError) as error:
                said.append(str(error))
        try:
            self.model.generate(**self.batch(), cache_implementation="static", max_new_tokens=2)
        except ValueError as error:
            said.append(str(error))
        return said


def report(path: Path) -> dict[str, Any]:
    with heard() as said, torch.no_grad():
        folder = Folder(path)
        found: dict[str, Any] = {
            "class": type(folder.model).__name__,
            "whole": folder.whole(),
            "in parts": folder.in_parts(),
            "in parts, cache given": folder.in_parts(DynamicCache(config=folder.model.config)),
            "left": folder.padded("left"),
            "right": folder.padded("right"),
            "greedy": folder.greedy(),
            "greedy without cache": folder.greedy(use_cache=False),
            "greedy one at a time": folder.alone(),
            "guessed ahead": folder.alone(prompt_lookup_num_tokens=3),
            "beams": folder.beams(),
            "sampled": folder.sampled(),
            "tokens": folder.tokens(),
            "saved again": folder.saved_again(),
        }
    if folder.facts["thorough"]:
        with heard() as more:
            found["piped"] = folder.piped()
            found["eager"] = folder.eager()
        said += more
        found["untrusted"] = folder.untrusted()
        found["float16"] = folder.half(torch.float16)
    found["said"] = said
    found["loss"] = folder.loss()
    found["bfloat16"] = folder.half(torch.bfloat16)
    found["refused"] = folder.refused()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    for name in sys.argv[1:]:
        print(json.dumps({"folder": name, **report(Path(name))}), flush=True)
