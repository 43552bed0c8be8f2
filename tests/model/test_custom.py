"""Code of a user's own in the model: what it may be, and what is said of code that does not fit."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from speedrun.config.architecture import ModelConfig
from speedrun.config.code import CustomConfig, UsedCode, found
from speedrun.config.resolve import resolve
from speedrun.config.schema import BatchConfig, Config
from speedrun.errors import ConfigError
from speedrun.model.attention import Attention
from speedrun.model.block import MLP, Block
from speedrun.model.cache import Cache
from speedrun.model.decode import decoder_for
from speedrun.model.gpt import GPT
from speedrun.model.loss import Loss
from speedrun.model.parts import Parts
from speedrun.model.trial import follows_cache, try_out
from speedrun.train.build import build_model
from tests.documents import ROOT, files, write_files

from .test_gpt import causal, ids_of

V, T = 257, 64
SCHEDULE = {"custom.schedule"}
CODED: dict[str, tuple[Any, Any]] = {
    "mlp": (MLP, MLP.forward),
    "attention": (Attention, Attention.forward),
    "block": (Block, Block.forward),
    "loss": (Loss, Loss.training_loss),
    "schedule": (None, None),
}
HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
from speedrun.model.attention import Attention
from speedrun.model.block import MLP, Block
from speedrun.model.linear import Linear
from speedrun.model.loss import Loss
"""
GATED = """
class Gated(MLP):
    parameter_roles = {"gate.weight": "hidden"}

    def __init__(self, config, ratio=1.0):
        super().__init__(config)
        hidden = int(ratio * config.mlp_ratio * config.width)
        self.gate = nn.Linear(config.width, hidden, bias=False)

    def forward(self, x, norm):
        h = norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))
"""
SAME = """
class Same(nn.Module):
    def __init__(self, inner, layer):
        super().__init__()
        self.inner = inner
    def forward(self, *given):
        return self.inner(*given)
"""


def config_of(folder: Path, source: str, args: Mapping[str, Any], **named: str) -> Config:
    (folder / "mine.py").write_text(HEAD + source)
    parts = {
        kind: UsedCode(args=dict(args), **found(f"mine.py:{name}", folder))
        for kind, name in named.items()
    }
    sizes = ModelConfig(layers=2, width=32, heads=2, x0_mixing=True)
    batch = BatchConfig(length=T, tokens=2 * T)
    return Config(model=sizes, batch=batch, custom=CustomConfig(**parts))


def build(config: Config, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config.model, V, T, Parts.of(config))


def test_a_subclass_takes_the_place_of_ours(tmp_path: Path) -> None:
    config = config_of(tmp_path, GATED, {}, mlp="Gated")
    model, ours = build(config), GPT(config.model, V, T)
    torch.manual_seed(0)
    ours = GPT(config.model, V, T)
    assert [*model.custom] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert model.roles()["blocks.1.mlp.gate.weight"] == "hidden"
    for name, weight in ours.named_parameters():  # all others begin as they do without it
        if ".mlp." not in name:
            assert torch.equal(weight, model.get_parameter(name)), name
    gates = [model.get_parameter(f"blocks.{layer}.mlp.gate.weight") for layer in (0, 1)]
    assert not torch.equal(*gates)
    assert torch.equal(gates[0], build(config).get_parameter("blocks.0.mlp.gate.weight"))
    assert not torch.equal(gates[0], build(config, 1).get_parameter("blocks.0.mlp.gate.weight"))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    state = torch.get_rng_state()
    try_out(model, "blocks", trains=True)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["block", "attention", "mlp"])
def test_what_wraps_without_a_change_changes_nothing(tmp_path: Path, kind: str) -> None:
    model = build(config_of(tmp_path, SAME, {}, **{kind: "Same"}))
    try_out(model, "blocks", trains=True)
    torch.manual_seed(0)
    ours = GPT(model.config, V, T)
    losses = [each(ids_of(2, T), causal(2, T), ids_of(2, T, 1)) for each in (model, ours)]
    assert torch.equal(*losses)
    assert len([*model.parameters()]) == len([*ours.parameters()])
    assert model.roles().keys() == dict(model.named_parameters()).keys()
    cache = Cache(2, 1, 2, T, 16)
    assert decoder_for(model, cache) is None
    assert follows_cache(model)


def test_parts_of_parts(tmp_path: Path) -> None:
    """A block of one's own, whose MLP another code takes the place of, and all of it wrapped."""
    block = """
class Halved(Block):
    def __init__(self, config, layer, factor=0.5):
        super().__init__(config, layer)
        self.factor = factor
    def forward(self, x, *rest):
        y, values = super().forward(x, *rest)
        return x + self.factor * (y - x), values
"""
    both = config_of(tmp_path, GATED + block, {}, block="Halved", mlp="Gated")
    model = build(both)
    try_out(model, "blocks", trains=True)
    assert [*model.custom] == ["blocks.0.mlp", "blocks.0", "blocks.1.mlp", "blocks.1"]
    kinds = [type(model.get_submodule(name)).__name__ for name in ("blocks.1", "blocks.1.mlp")]
    assert kinds == ["Halved", "Gated"]


LOSSES = """
class Smoothed(Loss):
    def __init__(self, config, share=0.1):
        super().__init__(config)
        self.share = share
    def training_loss(self, x, head, targets):
        return (1 - self.share) * super().training_loss(x, head, targets) + self.share

def smoothed(logits, targets, share=0.1):
    usual = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return (1 - share) * usual + share
"""


@pytest.mark.parametrize("name", ["Smoothed", "smoothed"])
def test_a_loss_is_trained_by_and_not_judged_by(tmp_path: Path, name: str) -> None:
    model = build(config_of(tmp_path, LOSSES, {"share": 0.25}, loss=name))
    try_out(model, "blocks", trains=True)
    ids, plan, targets = ids_of(2, T), causal(2, T), ids_of(2, T, 1)
    judged, trained = model.eval()(ids, plan, targets), model.train()(ids, plan, targets)
    torch.testing.assert_close(trained, 0.75 * judged + 0.25)
    assert follows_cache(model)
    cache = Cache(2, 1, 2, T, 16)
    fast = GPT(model.config, V, T)
    assert (decoder_for(model, cache) is None) == (decoder_for(fast, cache) is None)


BROKEN = {
    "an argument": ("mlp", GATED, "Gated", {"rat": 2}, r"takes \(config, ratio=1.0\) .*\(rat\)"),
    "in its constructor": ("mlp", """
class Mine(MLP):
    def __init__(self, config):
        super().__init__(config)
        self.up = None.weight
""", "Mine", {}, r"custom.mlp \(mine.py:Mine\) fails for layer 0, in line 13 of mine.py: Attr"),
    "in its forward": ("mlp", """
class Mine(MLP):
    def forward(self, x, norm):
        return x + self.gone(x)
""", "Mine", {}, r"custom.mlp \(mine.py:Mine\) fails on made-up tokens, in line 12 of mine.py"),
    "another shape": ("mlp", """
class Mine(MLP):
    def forward(self, x, norm):
        return super().forward(x, norm)[:, :1]
""", "Mine", {}, r"gives a float32 tensor of \(2, 1, 32\) for a float32 tensor of \(2, 64, 32\)"),
    "another dtype": ("mlp", """
class Mine(MLP):
    def forward(self, x, norm):
        return super().forward(x, norm).double()
""", "Mine", {}, r"gives a float64 tensor"),
    "one of two": ("attention", """
class Mine(Attention):
    def forward(self, *given):
        return super().forward(*given)[0]
""", "Mine", {}, r"must give two"),
    "a role": ("mlp", """
class Mine(MLP):
    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Linear(config.width, config.width)
    def forward(self, x, norm):
        return super().forward(self.gate(x), norm)
""", "Mine", {}, r'blocks.0.mlp.gate.weight has the role None .*write parameter_roles = '
        r'\{"gate.weight": "hidden", "gate.bias": "scalar"\}'),
    "no gradient": ("block", """
class Mine(Block):
    def forward(self, x, *rest):
        return self.mlp(x, self.norm2), None
""", "Mine", {}, r"parameter blocks.0.mix gets no gradient"),
    "looks ahead": ("attention", """
class Mine(Attention):
    def forward(self, x, *rest):
        y, values = super().forward(x, *rest)
        return y + 0.01 * x.mean(1, keepdim=True), values
""", "Mine", {}, r"lets a token see those after it"),
    "looks ahead where weights are zero": ("mlp", """
class Mine(MLP):
    def forward(self, x, norm):
        mean = x.mean(1, keepdim=True).expand_as(x)
        return x + (super().forward(mean, norm) - mean)
""", "Mine", {}, r"lets a token see those after it"),
    "dropout that stays on": ("mlp", """
class Mine(MLP):
    def forward(self, x, norm):
        return x + F.dropout(super().forward(x, norm) - x, 0.2)
""", "Mine", {}, r"gives the same tokens other logits the next time in eval mode.*self.training"),
    "looks ahead in long rows": ("mlp", """
class Mine(MLP):
    def forward(self, x, norm):
        later = torch.cat([x[:, 1:], x[:, :1]], 1) if x.size(1) >= 256 else 0 * x
        return super().forward(x + 0.1 * later, norm)
""", "Mine", {}, r"lets a token see those after it: logits of the first 128 tokens"),
    "looks at its neighbours": ("mlp", """
class Mine(MLP):
    def forward(self, x, norm):
        return super().forward(x + 0.1 * x.flip(0), norm)
""", "Mine", {}, r"lets texts of a batch see each other"),
    "a number in its module": ("loss", """
COUNT = [0]
def mine(logits, targets):
    COUNT[0] += 1
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) * COUNT[0]
""", "mine", {}, r"changes speedrun_used_\w+\.COUNT in every forward, which no checkpoint holds"),
    "bytes of its own": ("mlp", """
class Mine(MLP):
    def __init__(self, config):
        super().__init__(config)
        self.seen = bytearray(1)
    def forward(self, x, norm):
        self.seen[0] = (self.seen[0] + 1) % 256
        return super().forward(x, norm)
""", "Mine", {}, r"changes its seen in every forward"),
    "leaves": ("mlp", """
class Mine(MLP):
    def forward(self, x, norm):
        raise SystemExit
""", "Mine", {}, r"fails on made-up tokens, in line \d+ of mine.py: SystemExit"),
    "judges itself": ("loss", """
class Mine(Loss):
    def validation_loss(self, x, head, targets):
        return 0 * super().validation_loss(x, head, targets)
""", "Mine", {}, r"overrides validation_loss, .*override training_loss alone"),
    "no number": ("loss", """
def mine(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
""", "mine", {}, r"gives a float32 tensor of \(128,\), and must give one number"),
    "not finite": ("loss", """
def mine(logits, targets):
    return logits.mean() / 0
""", "mine", {}, r"gives .* for made-up tokens: it must be finite"),
    "a count": ("mlp", """
class Mine(MLP):
    calls = 0

    def forward(self, x, norm):
        self.calls += 1
        return super().forward(x, norm) * (1 + 1e-3 * self.calls)
""", "Mine", {}, r"changes its calls in every forward, which no checkpoint holds.*register_buffer"),
    "a tensor beside the buffers": ("mlp", """
class Mine(MLP):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(1), persistent=False)

    def forward(self, x, norm):
        self.mean += 1
        return super().forward(x, norm)
""", "Mine", {}, r"changes its mean in every forward"),
    "no module": ("mlp", """
def mine(inner, layer):
    return layer
""", "mine", {}, r"gives 0 where a torch.nn.Module is needed"),
    "a late buffer": ("mlp", """
class Mine(MLP):
    def forward(self, x, norm):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(()))
        return super().forward(x, norm) + self.mean
""", "Mine", {}, r"\(mine.py:Mine\) makes blocks.\d.mlp.mean in its first forward pass"),
    "no place": ("mlp+block", """
class Mine(Block):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        del self.mlp
""", "Mine", {}, r"custom.block \(mine.py:Mine\) has no mlp that custom.mlp"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_code_that_does_not_fit_is_told_in_a_sentence(tmp_path: Path, case: str) -> None:
    kinds, source, name, args, complaint = BROKEN[case]
    config = config_of(tmp_path, source, args, **dict.fromkeys(kinds.split("+"), name))
    if "long rows" in case:
        config = config.model_copy(update={"batch": BatchConfig(length=256, tokens=256)})
    with pytest.raises(ConfigError, match=complaint):
        build_model(config, V, torch.float32, torch.device("cpu"))


def test_what_is_kept_from_the_first_forward_may_be_kept(tmp_path: Path) -> None:
    source = """
class Mine(MLP):
    seen = 0

    def forward(self, x, norm):
        if x.size(1) > self.seen:
            self.seen, self.kept = x.size(1), torch.ones(x.size(1), 1)
        return super().forward(x, norm) * self.kept[: x.size(1)]
"""
    model = build(config_of(tmp_path, source, {}, mlp="Mine"))
    try_out(model, "blocks", trains=True)


def test_a_module_that_leaves_the_cache_aside_is_found_out(tmp_path: Path) -> None:
    shifted = """
class Shifted(MLP):
    def forward(self, x, norm):
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return super().forward(x, norm) + 0.1 * before
"""
    model = build(config_of(tmp_path, shifted, {}, mlp="Shifted"))
    torch.nn.init.normal_(model.head.weight)  # type: ignore[union-attr]
    try_out(model, "blocks", trains=False)
    assert not follows_cache(model)


PAGE = ROOT / "docs/own-technique.md"


@pytest.mark.parametrize("recipe", ["swiglu.toml", "around.toml"])
def test_the_documented_techniques_work(tmp_path: Path, recipe: str) -> None:
    write_files(PAGE, tmp_path)
    config = resolve(str(tmp_path / recipe), "pico", ["model.width=64", "model.heads=2"]).config
    model = build_model(config, V, torch.float32, torch.device("cpu"))
    assert {part.key for part in model.custom.values()} == {*config.used_code()} - SCHEDULE
    assert {*config.used_code()} & SCHEDULE == (SCHEDULE if recipe == "around.toml" else set())
    assert follows_cache(model)
    assert len(files(PAGE)["gated.py"].splitlines()) <= 20


def test_the_documented_signatures_are_those_of_the_code() -> None:
    rows = dict(re.findall(r"^\| `custom\.(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert [*rows] == ["mlp", "attention", "block", "loss", "schedule"] == [*CODED]
    for name, (ours, method) in CODED.items():
        if ours is not None:
            made = ", ".join(inspect.signature(ours).parameters)
            assert f"`{ours.__name__}({made}, **args)`" in rows[name]
            taken = [re.sub("_[A-Z]+$", "", one) for one in inspect.signature(method).parameters]
            assert f"({', '.join(taken[1:])})`" in rows[name]
