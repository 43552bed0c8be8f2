"""The model's switches, each against what it is said to do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from speedrun.config.schema import ModelConfig
from speedrun.errors import ConfigError
from speedrun.model.attention import AttentionPlan, attend, plan_attention
from speedrun.model.block import offset_keys
from speedrun.model.embeddings import table_of_layer
from speedrun.model.gpt import GPT
from speedrun.model.rotary import Rotary, frequencies

V, T = 257, 256


def small(**switches: Any) -> ModelConfig:
    sizes = {"layers": 4, "width": 64, "heads": 4}
    return ModelConfig(**{**sizes, **switches})


def plan(documents_BT: Tensor, window: int | None = None) -> AttentionPlan:
    blocks = None if window is None else torch.tensor(window, dtype=torch.int32)
    return plan_attention("dense", documents_BT, blocks, "blocks")


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


# Full-size models of the records: parameters in millions, RECORDS.md section 1.
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


@pytest.mark.parametrize(("record", "scalars"), [(15, 54), (18, 52)])
def test_scalars_of_the_records(record: int, scalars: int) -> None:
    with torch.device("meta"):
        model = GPT(ModelConfig(**SWITCHES[record]), 50257, 1024)
    roles = model.roles()
    assert sum(p.numel() for n, p in model.named_parameters() if roles[n] == "scalar") == scalars


def test_every_parameter_has_the_role_of_what_it_is() -> None:
    model = GPT(small(value_embeddings="each", x0_mixing=True, norm="layer", bias=True), V, T)
    roles = model.roles()
    assert roles.keys() == dict(model.named_parameters()).keys()
    assert roles["embedding.weight"] == "embedding"
    assert roles["value_embeddings.tables.0.weight"] == "value_embedding"
    assert roles["head.weight"] == "head"
    assert roles["blocks.0.mlp.up.weight"] == "hidden"
    for name in ("blocks.0.mlp.up.bias", "blocks.1.mix", "norm.gain", "blocks.0.attention.blend"):
        assert roles[name] == "scalar"
    assert GPT(small(positions="learned"), V, T).roles()["positions.weight"] == "embedding"


@pytest.mark.parametrize("cap", [0.0, 5.0, 15.0, 30.0])
def test_loss_at_step_0_is_ln_v_with_a_zero_head(cap: float) -> None:
    torch.manual_seed(0)
    model = GPT(small(softcap=cap), V, T)
    loss = model(ids_of(2), causal(2), ids_of(2, seed=1))
    assert loss.item() == pytest.approx(math.log(384), abs=1e-5)


def test_softcap_bounds_and_slope() -> None:
    model = lively(softcap=15.0)
    free = lively(softcap=0.0)
    with torch.no_grad():
        capped, raw = model(ids_of(), causal()), free(ids_of(), causal())
    torch.testing.assert_close(capped, 15 * torch.tanh(raw / 15))
    x = torch.zeros(1, 1, 64, requires_grad=True)
    model.logits(x * 100)[0, 0, 3].backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0, 0], 100 * model.head.weight[3])  # type: ignore[union-attr]
    with torch.no_grad():
        assert model.logits(1000 * torch.randn(1, 8, 64)).abs().max() <= 15.0


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


def test_which_layer_reads_which_value_table() -> None:
    assert table_of_layer(ModelConfig(value_embeddings="each")) == list(range(12))
    mirrored = table_of_layer(ModelConfig(value_embeddings="mirrored"))
    assert mirrored == [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]
    ends = table_of_layer(ModelConfig(value_embeddings="ends"))
    assert ends == [0, 1, 2, None, None, None, None, None, None, 0, 1, 2]


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


def test_half_rotary_turns_half_the_coordinates_at_the_stated_angles() -> None:
    rotary, x = Rotary(128, 300, half=True), torch.randn(1, 2, 300, 128)
    y = rotary(x)
    still = [*range(32, 64), *range(96, 128)]
    assert torch.equal(y[..., still], x[..., still])
    for t, j in ((1, 0), (7, 5), (299, 31)):
        angle = t * 1024 ** (-j / 31)
        c, s = math.cos(angle), math.sin(angle)
        a, b = x[0, 0, t, j].item(), x[0, 0, t, j + 64].item()
        assert y[0, 0, t, j].item() == pytest.approx(a * c + b * s, abs=1e-4)
        assert y[0, 0, t, j + 64].item() == pytest.approx(b * c - a * s, abs=1e-4)


def test_rotary_angles_and_norms() -> None:
    f = frequencies(64, half=False)
    assert f[0] == 1.0
    assert f[5].item() == pytest.approx(10000 ** (-10 / 64), rel=1e-6)
    rotary, x = Rotary(64, 50, half=False), torch.randn(1, 1, 50, 64)
    torch.testing.assert_close(rotary(x).norm(dim=-1), x.norm(dim=-1))
    late = torch.randn(1, 1, 3, 64)
    padded = torch.cat([torch.zeros(1, 1, 20, 64), late], dim=2)
    torch.testing.assert_close(rotary(late, start=20), rotary(padded)[:, :, 20:])


def test_padding_rows_are_ordinary_logits() -> None:
    model = lively()
    with torch.no_grad():
        assert model(ids_of(), causal()).size(-1) == 384
    assert GPT(small(vocab_multiple=1), V, T).head.weight.size(0) == V  # type: ignore[union-attr]
    narrow = GPT(small(pad_embeddings=False), V, T)
    assert narrow.embedding.weight.size(0) == V


def test_a_bigram_row_is_found_by_the_pair_and_starts_at_zero() -> None:
    rows = 50
    model, plain = lively(bigram_rows=rows), lively()
    table = model.bigrams.table.weight  # type: ignore[union-attr]
    assert not table.any()
    ids, documents = ids_of(), torch.zeros(1, T, dtype=torch.int32)
    documents[:, 100:] = 1
    given: list[Tensor] = []
    model.bigrams.register_forward_hook(lambda *seen: given.append(seen[2]))  # type: ignore[union-attr]
    with torch.no_grad():
        plain.load_state_dict({k: v for k, v in model.state_dict().items() if "bigrams" not in k})
        assert torch.equal(model(ids, plan(documents)), plain(ids, plan(documents)))
        table.normal_()
        model(ids, plan(documents))
    for t in range(T):
        pair = (36313 * int(ids[0, t])) ^ (27191 * int(ids[0, t - 1]))
        row = rows - 1 if t in (0, 100) else pair % (rows - 1)
        assert torch.equal(given[1][0, t], table[row])


def test_key_offset_takes_the_still_half_from_the_token_before() -> None:
    opens = torch.zeros(1, 9, dtype=torch.bool)
    opens[0, 0] = opens[0, 5] = True
    k = torch.randn(1, 2, 9, 16)
    moved = offset_keys(k, opens, None)
    still = frequencies(16, half=True).repeat(2) == 0
    for t in range(9):
        source = t if opens[0, t] else t - 1
        assert torch.equal(moved[:, :, t, still], k[:, :, source, still])
        assert torch.equal(moved[:, :, t, ~still], k[:, :, t, ~still])


def test_one_layer_with_key_offset_can_copy_what_followed() -> None:
    """An induction head by hand: queries and keys are the token, values are the token too."""
    V, K = 32, 128
    codes = torch.randn(V, K)
    codes[:, frequencies(K, half=True).repeat(2) != 0] = 0  # match by content alone
    ids = torch.randperm(V)
    ids = torch.cat([ids, ids[:20]])
    x = codes[ids][None, None]
    documents = torch.zeros(1, len(ids), dtype=torch.int32)
    found = {}
    for name, k in (("offset", offset_keys(x, plan(documents).opens, None)), ("plain", x)):
        seen = attend(x, k, F.one_hot(ids, V).float()[None, None], plan(documents), 1.0)
        guess = seen[0, 0, V + 1 : -1].argmax(-1)  # the first token has none before
        found[name] = (guess == ids[V + 2 :]).float().mean().item()
    assert found["offset"] == 1.0
    assert found["plain"] < 0.2


def test_a_row_longer_than_the_model_is_refused() -> None:
    model = GPT(small(), V, 64)
    with pytest.raises((ValueError, RuntimeError), match=r"64"):
        model(ids_of(length=128), causal(length=128))


def test_no_value_table_for_a_layer_without_attention() -> None:
    config = small(value_embeddings="each", value_weights="pair", attention_free=(1,))
    assert table_of_layer(config) == [0, None, 1, 2]
    with pytest.raises(ConfigError, match="must attend"):
        small(value_residual=True, attention_free=(0,))
