"""What transformers is to build: a model it knows, where ours is one, else our own modelling file.

Whether a stock model computes what ours computes is decided by the config, switch by switch, never
by a recipe's name: one switch too many, and the run goes to our own file. Every tensor of ours has
one place in what is exported, as it is or transposed, so what was written can be read back and
compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from speedrun.config.architecture import ModelConfig
from speedrun.config.schema import Config
from speedrun.model.embeddings import table_of_layer
from speedrun.serve.load import LoadedRun

MODELLING = "modeling_speedrun.py"


@dataclass(frozen=True)
class Place:
    """Where one of our tensors goes: under which name, and whether rows become columns."""

    ours: str
    transposed: bool = False

    def moved(self, tensor: Tensor) -> Tensor:
        return tensor.T.contiguous() if self.transposed else tensor.contiguous()


@dataclass(frozen=True)
class Architecture:
    title: str
    config: Mapping[str, Any]  # config.json
    places: Mapping[str, Place]  # by the name in the exported file
    own_code: bool = False  # needs our modelling file, and so trust_remote_code


def architecture_of(loaded: LoadedRun) -> Architecture:
    return as_gpt2(loaded) or as_nanochat(loaded) or as_ours(loaded)


# What a stock model may have any value of: sizes, how weights began, and what is looked at apart.
ANY = {
    "layers", "width", "heads", "head_dim", "kv_heads", "mlp_ratio", "norm_eps", "attention_scale",
    "tied_head", "vocab_multiple", "pad_embeddings", "init", "zero_init_projections",
    "zero_init_head", "value_tables", "value_weights", "softcap",
}  # fmt: skip


def is_plain(config: Config, **switches: Any) -> bool:
    """Whether a model has these switches, and all others as the schema has them: off."""
    model, attention = config.model, config.attention
    wanted = {key: field.default for key, field in ModelConfig.model_fields.items()} | switches
    scale = model.attention_scale or model.size_of_head**-0.5
    return (
        all(getattr(model, key) == value for key, value in wanted.items() if key not in ANY)
        and scale == model.size_of_head**-0.5
        and attention.window == "none"
        and not attention.documents
    )


def as_gpt2(loaded: LoadedRun) -> Architecture | None:
    model = loaded.config.model
    if not is_plain(
        loaded.config, positions="learned", norm="layer", bias=True, activation="gelu",
        qk_norm=False, embedding_norm=False, fused_qkv=True,
    ):  # fmt: skip
        return None
    if not model.tied_head or model.softcap:
        return None
    if model.groups != model.heads or model.size_of_head * model.heads != model.width:
        return None
    places = {
        "transformer.wte.weight": Place("embedding.weight"),
        "transformer.wpe.weight": Place("positions.weight"),
        "transformer.ln_f.weight": Place("norm.gain"),
        "transformer.ln_f.bias": Place("norm.bias"),
    }
    for layer in range(model.layers):
        theirs, ours = f"transformer.h.{layer}", f"blocks.{layer}"
        for linear, name in (
            ("attn.c_attn", "attention.qkv.0"), ("attn.c_proj", "attention.output"),
            ("mlp.c_fc", "mlp.up"), ("mlp.c_proj", "mlp.down"),
        ):  # fmt: skip
            # GPT-2 in transformers multiplies by its matrices from the right.
            places[f"{theirs}.{linear}.weight"] = Place(f"{ours}.{name}.weight", transposed=True)
            places[f"{theirs}.{linear}.bias"] = Place(f"{ours}.{name}.bias")
        for norm, name in (("ln_1", "norm1"), ("ln_2", "norm2")):
            places[f"{theirs}.{norm}.weight"] = Place(f"{ours}.{name}.gain")
            places[f"{theirs}.{norm}.bias"] = Place(f"{ours}.{name}.bias")
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu",
        "layer_norm_epsilon": model.norm_eps,
        "n_positions": loaded.model.length,
        "n_embd": model.width,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.mlp_ratio * model.width,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
        **common(loaded),
    }
    return Architecture("GPT-2, which transformers knows", config, places)


def as_nanochat(loaded: LoadedRun) -> Architecture | None:
    """transformers' nanochat norms queries and keys after it rotates them, which is the same."""
    model = loaded.config.model
    if not is_plain(
        loaded.config, positions="rotary", norm="rms", bias=False, activation="relu2",
        qk_norm=True, embedding_norm=True, fused_qkv=False,
    ):  # fmt: skip
        return None
    if len(loaded.model.embedding.weight) != len(loaded.model.head_weight):
        return None
    places = {"model.embed_tokens.weight": Place("embedding.weight")}
    if not model.tied_head:
        places["lm_head.weight"] = Place("head.weight")
    for layer in range(model.layers):
        for theirs, ours in (
            ("self_attn.q_proj", "attention.qkv.0"), ("self_attn.k_proj", "attention.qkv.1"),
            ("self_attn.v_proj", "attention.qkv.2"), ("self_attn.o_proj", "attention.output"),
            ("mlp.fc1", "mlp.up"), ("mlp.fc2", "mlp.down"),
        ):  # fmt: skip
            places[f"model.layers.{layer}.{theirs}.weight"] = Place(f"blocks.{layer}.{ours}.weight")
    config = {
        "model_type": "nanochat",
        "architectures": ["NanoChatForCausalLM"],
        "hidden_size": model.width,
        "intermediate_size": model.mlp_ratio * model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups,
        "head_dim": model.size_of_head,
        "max_position_embeddings": loaded.model.length,
        "hidden_act": "relu2",
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "final_logit_softcapping": model.softcap or None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tied_head,
        **common(loaded),
    }
    title = "nanochat, which transformers knows from version 5 on"
    return Architecture(title, config, places)


def as_ours(loaded: LoadedRun) -> Architecture:
    """All switches, with what they come to here: sizes, the window of the last validation."""
    model, attention = loaded.config.model, loaded.config.attention
    window = loaded.planner.window
    mixed = model.value_residual or model.value_embeddings != "none"
    weights = 2 if model.value_weights == "pair" else 1
    same = (
        "layers", "width", "heads", "bias", "positions", "norm", "norm_eps", "activation",
        "qk_norm", "fused_qkv", "embedding_norm", "x0_mixing", "value_residual", "unet_skips",
        "bigram_rows", "key_offset", "softcap",
    )  # fmt: skip
    depth = model.attention_output_factor == "depth"
    config = {
        "model_type": "speedrun",
        "architectures": ["SpeedrunForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_speedrun.SpeedrunConfig",
            "AutoModelForCausalLM": "modeling_speedrun.SpeedrunForCausalLM",
        },
        **{key: getattr(model, key) for key in same},
        "length": loaded.model.length,
        "tokens": loaded.tokenizer.vocab_size,
        "table_rows": len(loaded.model.embedding.weight),
        "end_of_text": loaded.tokenizer.eot,
        "kv_heads": model.groups,
        "head_dim": model.size_of_head,
        "mlp_width": model.mlp_ratio * model.width,
        "attention_scale": model.attention_scale or model.size_of_head**-0.5,
        "attention_output_factor": (2 * model.layers) ** -0.5 if depth else 1.0,
        "attention_free": list(model.attention_free),
        "tie_word_embeddings": model.tied_head,
        "value_tables": table_of_layer(model),
        "value_weights": weights if mixed else 0,
        "documents": attention.documents,
        "window_unit": attention.window,
        "window": None if window is None else int(window),
        **common(loaded),
    }
    places = {name: Place(name) for name in loaded.model.state_dict()}
    return Architecture("our own modelling file", config, places, own_code=True)


def common(loaded: LoadedRun) -> dict[str, Any]:
    eot = loaded.tokenizer.eot
    return {
        "vocab_size": len(loaded.model.head_weight),
        "bos_token_id": eot,
        "eos_token_id": eot,
        # Padding is known by its mask, and by the tokenizer's settings: a model that was told would
        # take every text that opens with end-of-text for a padded one, or keep its row from
        # learning.
        "pad_token_id": None,
        "dtype": "float32",
    }
