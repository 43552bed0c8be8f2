"""The model's switches, each against what it is said to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from speedrun.config.architecture import ModelConfig
from speedrun.model.gpt import GPT
from speedrun.model.plan import AttentionPlan, plan_layer

V, T = 257, 256


def small(**switches: Any) -> ModelConfig:
    sizes = {"layers": 4, "width": 64, "heads": 4}
    return ModelConfig(**{**sizes, **switches})


def plan(documents_BT: Tensor, window: int | None = None) -> AttentionPlan:
    blocks = None if window is None else torch.tensor(window, dtype=torch.int32)
    return AttentionPlan((plan_layer("dense", documents_BT, blocks),))


def causal(rows: int = 1, length: int = T) -> AttentionPlan:
    return plan(torch.zeros(rows, length, dtype=torch.int32))


def ids_of(rows: int = 1, length: int = T, seed: int = 0) -> Tensor:
    return torch.randint(0, V - 1, (rows, length), generator=torch.Generator().manual_seed(seed))


def lively(**switches: Any) -> GPT:
    """A model whose every weight matters: nothing starts at zero."""
    torch.manual_seed(0)
    model = GPT(small(zero_init_projections=False, zero_init_head=False, **switches), V, T).eval()
    with torch.no_grad():
        for name, role in model.roles().items():
            if role == "scalar":
                parameter = model.get_parameter(name)
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


# What made the records' full-size models.
SWITCHES: dict[int, dict[str, Any]] = {
    3: {"heads": 12, "fused_qkv": True, "activation": "gelu", "qk_norm": False, "tied_head": True,
        "vocab_multiple": 1, "embedding_norm": False, "attention_output_factor": "depth",
        "zero_init_projections": False},
    8: {},
    14: {"x0_mixing": True, "unet_skips": True, "softcap": 30.0, "value_embeddings": "each"},
    15: {"x0_mixing": True, "unet_skips": True, "softcap": 30.0, "value_embeddings": "mirrored",
         "value_weights": "pair"},
    17: {"x0_mixing": True, "unet_skips": True, "softcap": 30.0, "value_embeddings": "ends",
         "value_weights": "pair", "positions": "half-rotary", "attention_free": (7,),
         "pad_embeddings": False},
    18: {"x0_mixing": True, "unet_skips": True, "softcap": 15.0, "value_embeddings": "ends",
         "value_weights": "pair", "positions": "half-rotary", "attention_free": (7,)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("record", "millions"),
    [(3, 123.5), (8, 162.2), (14, 625.8), (15, 394.0), (17, 275.6), (18, 275.7)],
)
def test_parameter_counts_of_the_records(record: int, millions: float) -> None:
    with torch.device("meta"):
        model = GPT(ModelConfig(**SWITCHES[record]), 50257, 1024)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert round(count / 1e6, 1) == millions


SWITCH_SETS: list[dict[str, Any]] = [
    {},
    {"x0_mixing": True, "unet_skips": True, "value_embeddings": "mirrored",
     "value_weights": "pair"},
    {"positions": "learned", "norm": "layer", "bias": True, "activation": "gelu",
     "tied_head": True},
    {"positions": "half-rotary", "value_residual": True, "kv_heads": 2, "attention_free": (1,)},
    {"fused_qkv": True, "kv_heads": 1, "head_dim": 32, "attention_output_factor": "depth"},
    {"value_embeddings": "ends", "value_tables": 1, "value_weights": "pair", "qk_norm": False},
    {"positions": "half-rotary", "key_offset": True, "bigram_rows": 50, "kv_heads": 2},
]  # fmt: skip


@pytest.mark.parametrize("switches", SWITCH_SETS)
def test_no_information_flows_from_the_future_or_across_documents(switches: dict[str, Any]) -> None:
    model = lively(**switches)
    documents = torch.zeros(1, T, dtype=torch.int32)
    documents[:, 100:] = 1
    changed_at = 60
    ids = ids_of()
    other = ids.clone()
    other[0, changed_at] = (other[0, changed_at] + 1) % (V - 1)
    with torch.no_grad():
        before, after = model(ids, plan(documents)), model(other, plan(documents))
    same = (before == after).all(dim=-1)[0]
    assert same[:changed_at].all()  # the past
    assert same[100:].all()  # the next document
    assert not same[changed_at:100].any()  # the rest of this one


def test_a_window_hides_what_is_older() -> None:
    model = lively()
    ids, documents = ids_of(), torch.zeros(1, T, dtype=torch.int32)
    other = ids.clone()
    other[0, 5] = (other[0, 5] + 1) % (V - 1)
    # Four layers look back one block each, so one layer is what can be tested exactly.
    one = lively(layers=1)
    with torch.no_grad():
        same = (one(ids, plan(documents, 1)) == one(other, plan(documents, 1))).all(-1)[0]
        wide = (model(ids, plan(documents, 2)) == model(other, plan(documents, 2))).all(-1)[0]
    assert not same[5:128].any()
    assert same[128:].all()
    assert not wide[128:].any()


@pytest.mark.parametrize("switches", SWITCH_SETS)
def test_every_parameter_gets_a_gradient(switches: dict[str, Any]) -> None:
    model = lively(**switches)
    model(ids_of(2), causal(2), ids_of(2, seed=1)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        # Layer 0 of a value residual mixes its values with themselves: used, but without effect.
        idle = name == "blocks.0.attention.blend" and model.config.value_residual
        assert (parameter.grad.abs().max() > 0) != idle, name


def test_fused_and_separate_projections_are_the_same_function() -> None:
    separate, fused = lively(kv_heads=2), lively(kv_heads=2, fused_qkv=True)
    state = fused.state_dict()
    for name, value in separate.state_dict().items():
        if ".qkv." not in name:
            state[name] = value
    for layer in range(4):
        names = [f"blocks.{layer}.attention.qkv.{part}.weight" for part in range(3)]
        state[names[0]] = torch.cat([separate.state_dict()[name] for name in names])
    fused.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(fused(ids_of(), causal()), separate(ids_of(), causal()))


def test_grouped_query_heads_share_keys_and_values() -> None:
    grouped, full = lively(kv_heads=2), lively()
    assert grouped.get_parameter("blocks.0.attention.qkv.1.weight").shape == (32, 64)
    state = full.state_dict()
    for name, value in grouped.state_dict().items():
        kv = ".qkv.1." in name or ".qkv.2." in name
        # Two query heads in a row read the same key/value head.
        state[name] = value.view(2, 16, 64).repeat_interleave(2, 0).reshape(64, 64) if kv else value
    full.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(grouped(ids_of(), causal()), full(ids_of(), causal()))


def test_unet_pairs_layers_from_the_middle_out() -> None:
    """Block 6+i of 12 gets the output of block 5-i, times its own weight."""
    model = lively(unet_skips=True)
    outputs: list[Tensor] = []
    inputs: list[Tensor] = []

    def keep(_: torch.nn.Module, args: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> None:
        inputs.append(args[0])
        outputs.append(out[0])

    for block in model.blocks:
        block.register_forward_hook(keep)
    with torch.no_grad():
        model(ids_of(), causal())
    assert model.skips is not None
    for index in (0, 1):
        expected = outputs[1 + index] + model.skips[index] * outputs[1 - index]
        torch.testing.assert_close(inputs[2 + index], expected)


def test_value_residual_hands_on_layer_0s_values() -> None:
    with torch.no_grad():
        model = lively(value_residual=True)
        for layer in range(1, 4):
            model.get_parameter(f"blocks.{layer}.attention.blend").fill_(1.0)
            model.get_parameter(f"blocks.{layer}.attention.qkv.2.weight").mul_(7.0)
        changed = model(ids_of(), causal())
        for layer in range(1, 4):
            model.get_parameter(f"blocks.{layer}.attention.qkv.2.weight").div_(7.0)
        assert torch.equal(changed, model(ids_of(), causal()))


def test_the_output_factor_scales_the_attention_branch() -> None:
    scaled, plain = lively(attention_output_factor="depth"), lively()
    with torch.no_grad():
        for layer in range(4):
            plain.get_parameter(f"blocks.{layer}.attention.output.weight").mul_(8**-0.5)
        torch.testing.assert_close(scaled(ids_of(), causal()), plain(ids_of(), causal()))


def test_attention_scale_is_a_factor_on_the_scores() -> None:
    scaled, plain = lively(attention_scale=0.5, qk_norm=False), lively(qk_norm=False)
    with torch.no_grad():
        for layer in range(4):  # head_dim 16: the default scale is 0.25
            plain.get_parameter(f"blocks.{layer}.attention.qkv.0.weight").mul_(2.0)
        torch.testing.assert_close(scaled(ids_of(), causal()), plain(ids_of(), causal()))


def test_padding_rows_are_ordinary_logits() -> None:
    model = lively()
    with torch.no_grad():
        assert model(ids_of(), causal()).size(-1) == 384
    assert GPT(small(vocab_multiple=1), V, T).head.weight.size(0) == V  # type: ignore[union-attr]
    narrow = GPT(small(pad_embeddings=False), V, T)
    assert narrow.embedding.weight.size(0) == V


def test_a_row_longer_than_the_model_is_refused() -> None:
    model = GPT(small(), V, 64)
    with pytest.raises((ValueError, RuntimeError), match=r"64"):
        model(ids_of(length=128), causal(length=128))
