"""`--to weights`: the tensors under our names, and a table from which the model can be rebuilt.

The text follows the config: a switch that is off is not spoken of.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from speedrun.config.architecture import ModelConfig
from speedrun.config.code import UsedCode
from speedrun.config.resolve import to_toml
from speedrun.model.embeddings import table_of_layer
from speedrun.model.parts import Part
from speedrun.serve.export.architecture import as_ours
from speedrun.serve.export.facts import portable
from speedrun.serve.export.hf import WEIGHTS, write_weights
from speedrun.serve.export.tokenizer import library_of
from speedrun.serve.load import LoadedRun

# What a tensor is, by its name; the first that fits.
MEANINGS: tuple[tuple[str, str], ...] = (
    (r"embedding\.weight", "E: x = E[id]{tied}"),
    (r"positions\.weight", "P: x = x + P[t] at position t"),
    (r"bigrams\.table\.weight", "G: x = x + G[row of the pair (token before, token)]"),
    (r"value_embeddings\.tables\.(\d+)\.weight", "U{0}: rows by id, mixed into values{readers}"),
    (r"skips", "s: before layer {half} + i, x = x + s[i] * (output of layer {half} - 1 - i)"),
    (r"blocks\.(\d+)\.mix", "m: x = m[0] x + m[1] x0, first thing in layer {0}"),
    (r"blocks\.(\d+)\.attention\.blend", "b: {blend}"),
    (r"blocks\.(\d+)\.attention\.qkv\.(\d)\.(weight|bias)", "{qkv}"),
    (r"blocks\.(\d+)\.attention\.output\.weight", "Wo: x = x + {factor}y Wo^T{bias}"),
    (r"blocks\.(\d+)\.attention\.output\.bias", "bo, see Wo"),
    (r"blocks\.(\d+)\.mlp\.up\.weight", "Wu: h = f(norm(x) Wu^T{bias}), f = {activation}"),
    (r"blocks\.(\d+)\.mlp\.down\.weight", "Wd: x = x + h Wd^T{bias}"),
    (r"blocks\.(\d+)\.mlp\.(up|down)\.bias", "added after the product, see the weight"),
    (r"blocks\.(\d+)\.norm1\.gain", "gain of the norm before attention"),
    (r"blocks\.(\d+)\.norm2\.gain", "gain of the norm before the MLP"),
    (r"norm\.gain", "gain of the last norm"),
    (r"(blocks\.\d+\.norm[12]|norm)\.bias", "bias of that norm"),
    (r"head\.weight", "Wh: logits = {cap}norm(x) Wh^T{uncap}"),
)


def write_plain(folder: Path, loaded: LoadedRun) -> None:
    write_weights(folder / WEIGHTS, loaded, as_ours(loaded))
    library_of(loaded.tokenizer).save(str(folder / "tokenizer.json"))
    (folder / "config.toml").write_text(to_toml(portable(loaded.config)), encoding="utf-8")
    for used in loaded.config.used_code().values():
        if used.named.is_file:
            shutil.copyfile(Path(used.place) / used.named.where, folder / code_name(used))
    table = names(loaded)
    (folder / "names.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    (folder / "NAMES.md").write_text(as_text(loaded, table), encoding="utf-8")


def code_name(used: UsedCode) -> str:
    """What a file of a user's own is called in the folder: its hash tells it from all others."""
    return f"{used.code[:12]}-{used.named.where}"


def names(loaded: LoadedRun) -> list[dict[str, Any]]:
    """Of each tensor the name, shape, dtype, role to the optimizer, and what it is."""
    return [
        {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": "float32",
            "role": role,
            "meaning": meaning_of(name, loaded.config.model, loaded.model.custom),
        }
        for name, tensor, role in loaded.model.named_roles()
    ]


def meaning_of(name: str, model: ModelConfig, custom: Mapping[str, Part]) -> str:
    for place, part in custom.items():
        if name.startswith(f"{place}."):
            return f"as {part.used.text} has it"
    for pattern, text in MEANINGS:
        if match := re.fullmatch(pattern, name):
            return text.format(*match.groups(), **_words(match, model))
    raise AssertionError(f"{name} has no meaning: add a line to MEANINGS")


def _words(match: re.Match[str], model: ModelConfig) -> dict[str, Any]:
    number = int(match[1]) if match.lastindex and match[1].isdigit() else 0
    tables = table_of_layer(model)
    readers = [str(layer) for layer, table in enumerate(tables) if table == number]
    groups, C, cap = model.groups, model.size_of_head, model.softcap
    parts = ("q", "k", "v") if not model.fused_qkv else ("q, k and v, one below the other",)
    which = parts[int(match[2])] if match.lastindex == 3 else ""
    kind = "bias" if match.string.endswith("bias") else "matrix"
    own = "(1 - b[0])" if model.value_weights == "blend" else "b[0]"
    other = "b[0]" if model.value_weights == "blend" else "b[1]"
    source = "layer 0's v" if model.value_residual else f"U{tables[number]}[id]"
    alone = not model.value_residual and tables[number] is None
    begin, end = (f"{cap} tanh(", f" / {cap})") if cap else ("", "")
    capped = f"{begin}norm(x) E^T{end}"
    return {
        "tied": f"; the head is tied to it: logits = {capped}" if model.tied_head else "",
        "readers": f" of layers {', '.join(readers)}",
        "half": model.layers // 2,
        "blend": f"v = {own} v" + ("" if alone else f" + {other} {source}"),
        "qkv": f"{kind} of {which}: norm(x) W^T, in heads of {C}; {model.heads} for q, "
        f"{groups} for k and v",
        "factor": f"{(2 * model.layers) ** -0.5:.9g} * "
        if model.attention_output_factor == "depth"
        else "",
        "bias": " + bias" if model.bias else "",
        "activation": "gelu (exact)" if model.activation == "gelu" else "relu(z)^2",
        "cap": begin,
        "uncap": end,
    }


def as_text(loaded: LoadedRun, table: list[dict[str, Any]]) -> str:
    lines = [
        f"# The tensors of {loaded.name}",
        "",
        f"`{WEIGHTS}` holds them in fp32, matrices as (outputs, inputs), so a linear layer is "
        "x W^T. `config.toml` has every switch of the run, `tokenizer.json` is for the "
        "`tokenizers` library. The same table is in `names.json`.",
        "",
        "## From ids to logits",
        "",
        *(f"{number}. {line}" for number, line in enumerate(forward(loaded), start=1)),
        "",
        "## Names",
        "",
        "| name | shape | role | what it is |",
        "|---|---|---|---|",
        *(
            f"| `{row['name']}` | {' x '.join(map(str, row['shape']))} | {row['role']} "
            f"| {row['meaning']} |"
            for row in table
        ),
        "",
    ]
    return "\n".join(lines)


def forward(loaded: LoadedRun) -> Iterator[str]:
    """The computation in sentences, in its order."""
    model, config = loaded.config.model, as_ours(loaded).config
    tokens, eps, C = loaded.tokenizer.vocab_size, model.norm_eps, model.size_of_head
    padded = len(loaded.model.head_weight) - tokens
    unit = "document" if config["documents"] else "row"
    yield f"A text opens with id {loaded.tokenizer.eot}, end-of-text; documents in a row likewise."
    rms = f"norm(x) = x / sqrt(mean(x^2) + {eps:g})"
    layer = f"norm(x) = gain (x - mean) / sqrt(variance + {eps:g})" + (" + bias" * model.bias)
    yield rms if model.norm == "rms" else layer
    yield "x = E[id]" + {"learned": " + P[t]"}.get(model.positions, "")
    if model.bigram_rows:
        last = model.bigram_rows - 1
        yield (
            f"x = x + G[(36313 * id XOR 27191 * before) mod {last}], or G[{last}] for a token with "
            f"none before it in its {unit}"
        )
    if model.embedding_norm:
        yield f"x = x / sqrt(mean(x^2) + {eps:g}); x0 = x"
    elif model.x0_mixing:
        yield "x0 = x"
    yield (
        "Each layer in turn: what its tensors below say, in the order mix, attention, MLP"
        + "".join(f"; layer {i} has no attention" for i in model.attention_free)
    )
    for part in dict.fromkeys(map(str, loaded.model.custom.values())):
        yield f"where {part} stands in the place of ours, what follows holds for ours alone"
    if model.qk_norm:
        yield f"each head of q and of k is divided by sqrt(mean(z^2) + {eps:g})"
    if model.positions != "learned":
        full = f"f_i = 10000^(-2i/{C})"
        half = f"f_i = 1024^(-i/{max(1, C // 4 - 1)}) for i < {C // 4}, else 0"
        yield (
            f"the pair (z_i, z_(i+{C // 2})) of each head of q and k becomes (z_i cos a + "
            f"z_(i+{C // 2}) sin a, z_(i+{C // 2}) cos a - z_i sin a), a = t f_i, "
            + (half if model.positions == "half-rotary" else full)
        )
    if model.key_offset:
        yield (
            f"channels {C // 4} to {C // 2 - 1} and {3 * C // 4} to {C - 1} of each key are those "
            f"of the token before, unless it is the first of its {unit}"
        )
    window = loaded.planner.window
    limits = {
        "none": "",
        "tokens": f", q - k < {window}",
        "blocks": f", q // 128 - k // 128 < {window}",
        "tokens_in_blocks": f", q - k < {window}, q // 128 - k // 128 < ceil({window} / 128)",
    }[config["window_unit"]]
    inside = ", k in the document of q" if config["documents"] else ""
    sharing = f"; {model.heads // model.groups} neighbouring heads of q share one of k and v"
    yield (
        f"y = softmax({config['attention_scale']:.9g} q k^T) v over keys k <= q{limits}{inside}, "
        "head by head, put side by side" + (sharing if model.groups < model.heads else "")
    )
    yield "the last norm and the head, as the table says"
    if padded:
        yield (
            f"{padded} of the logits, from {tokens} on, are of no token: they count in the softmax "
            "as in training, and are never drawn"
        )
