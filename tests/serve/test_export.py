"""Exports without transformers: what is written, what is refused, and that it says the truth."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speedrun.config.architecture import ModelConfig
from speedrun.config.files import names as names_of
from speedrun.config.resolve import from_toml
from speedrun.errors import ConfigError, RunError, SpeedrunError
from speedrun.serve.export import architecture, hf
from speedrun.serve.export.architecture import MODELLING, architecture_of
from speedrun.serve.export.export import export
from speedrun.serve.export.folder import FACTS
from speedrun.serve.export.weights import meaning_of
from speedrun.serve.load import load_run
from speedrun.train.checkpoint import MODEL
from tests.serve.exporting import Make, contents, maker, read

STOCK_FILES = {
    "README.md", "config.json", "generation_config.json", "model.safetensors", FACTS,
    "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip
PLAIN_FILES = {
    "NAMES.md",
    "names.json",
    "config.toml",
    "model.safetensors",
    "tokenizer.json",
    FACTS,
}


@pytest.fixture
def make(tmp_path: Path, tiny_dataset: Path) -> Make:
    return maker(tmp_path / "run", tiny_dataset)


# What is in the folder.


@pytest.mark.parametrize(
    ("recipe", "kind"), [("baseline", "gpt2"), ("modern", "nanochat"), ("best", "speedrun")]
)
def test_every_file_is_there_and_code_only_where_it_is_needed(
    make: Make, tmp_path: Path, recipe: str, kind: str
) -> None:
    done = export(make(recipe).path, tmp_path / "out")
    found, config = set(contents(tmp_path / "out")), read(tmp_path / "out/config.json")
    own = kind == "speedrun"
    assert found == STOCK_FILES | ({MODELLING} if own else set())
    assert (config["model_type"], done.own_code) == (kind, own)
    assert ("auto_map" in config) == own
    assert config["bos_token_id"] == config["eos_token_id"] == 256
    # 257 ids in 384 columns: the others are never written.
    generation = read(tmp_path / "out/generation_config.json")
    assert generation["suppress_tokens"] == list(range(257, config["vocab_size"]))
    assert done.bytes == sum(len(data) for data in contents(tmp_path / "out").values())
    assert not list(tmp_path.glob(".out*")), "nothing is left beside it"


@pytest.mark.parametrize("recipe", ["baseline", "modern", "best"])
def test_all_weights_are_in_it_to_the_last_bit(make: Make, tmp_path: Path, recipe: str) -> None:
    run = make(recipe)
    export(run.path, tmp_path / "out")
    ours = load_file(run.checkpoint(8).folder / MODEL)
    places = architecture_of(load_run(run.path)).places
    for name, tensor in load_file(tmp_path / "out/model.safetensors").items():
        expected = ours.pop(places[name].ours)
        assert torch.equal(tensor, expected.T if places[name].transposed else expected), name
        assert tensor.dtype == torch.float32
    assert not ours
    if recipe == "baseline":
        shape = load_file(tmp_path / "out/model.safetensors")["transformer.h.0.mlp.c_fc.weight"]
        assert shape.shape == (32, 128), "inputs by outputs"


GPT2 = "baseline", "gpt2"
NANOCHAT = "modern", "nanochat"


@pytest.mark.parametrize(
    ("stock", "override"),
    [
        *((GPT2, each) for each in (
            "model.qk_norm=true", "model.softcap=15.0", "model.tied_head=false", "model.bias=false",
            "model.embedding_norm=true", "model.fused_qkv=false", "model.activation=relu2",
            "model.positions=rotary", "model.norm=rms", "model.kv_heads=1", "model.head_dim=32",
        )),
        *((NANOCHAT, each) for each in (
            "model.qk_norm=false", "model.positions=half-rotary", "model.embedding_norm=false",
            "model.fused_qkv=true", "model.activation=gelu", "model.bias=true", "model.norm=layer",
            "model.pad_embeddings=false",
        )),
        *((stock, each) for stock in (GPT2, NANOCHAT) for each in (
            "model.attention_scale=0.1", "model.attention_output_factor=depth",
            "model.attention_free=[1]", "model.x0_mixing=true", "model.value_residual=true",
            "model.value_embeddings=each", "model.unet_skips=true", "model.bigram_rows=10",
            "attention.documents=true",
        )),
    ],
)  # fmt: skip
def test_one_switch_too_many_is_no_stock_model(
    make: Make, stock: tuple[str, str], override: str
) -> None:
    recipe, _ = stock
    assert architecture_of(load_run(make(recipe, override).path)).own_code


@pytest.mark.parametrize("override", [
    "model.attention_scale=0.25", "model.softcap=15.0", "model.kv_heads=1", "model.head_dim=32",
    "model.tied_head=true", "model.mlp_ratio=2",
])  # fmt: skip
def test_what_nanochat_has_too_stays_stock(make: Make, override: str) -> None:
    """0.25 is what a head of 16 has anyway."""
    assert not architecture_of(load_run(make("modern", override).path)).own_code


def switches() -> dict[str, Any]:
    """Those of the modelling file, which needs transformers to be imported."""
    text = Path(architecture.__file__).with_name(MODELLING).read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "SWITCHES":
            assert isinstance(node.value, ast.Dict)
            return {ast.literal_eval(key): None for key in node.value.keys if key is not None}
    raise AssertionError("SWITCHES is gone")


def test_the_modelling_file_knows_every_switch(make: Make) -> None:
    """A new switch of the model must be exported, or named here because it changes no forward."""
    config = architecture_of(load_run(make().path)).config
    standard = {"model_type", "architectures", "auto_map", "dtype"}
    standard |= {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert set(config) - standard == set(switches())
    renamed = {"mlp_ratio", "tied_head", "value_embeddings"}
    only_training = {"init", "zero_init_projections", "zero_init_head"}
    only_sizes = {"vocab_multiple", "pad_embeddings"}
    only_numbers = {"stream"}  # of a GPU's training; an export computes in what it is loaded in
    known = renamed | only_training | only_sizes | only_numbers
    assert set(ModelConfig.model_fields) <= set(config) | known


def test_the_window_is_that_of_the_checkpoint_widened_as_in_validation(
    make: Make, tmp_path: Path
) -> None:
    window = ("attention.window=tokens",)
    run = make("record-18", *window, step=4)
    config = architecture_of(load_run(run.path)).config
    assert (config["window_unit"], config["window"]) == ("tokens", 128), "half of 64 to 192"
    (tmp_path / "run").rename(tmp_path / "first")
    run = make("record-18", *window, "validation.window=500", step=4)
    assert architecture_of(load_run(run.path)).config["window"] == 500


# Plain weights.


def test_plain_weights_come_with_a_table_of_names(make: Make, tmp_path: Path) -> None:
    run = make()
    export(run.path, tmp_path / "out", "weights")
    found = load_file(tmp_path / "out/model.safetensors")
    assert set(contents(tmp_path / "out")) == PLAIN_FILES
    table = {row["name"]: row for row in read(tmp_path / "out/names.json")}
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {
        name: row["shape"] for name, row in table.items()
    }
    text = (tmp_path / "out/NAMES.md").read_text()
    assert all(f"| `{name}` |" in text for name in table)
    assert table["blocks.3.attention.blend"]["meaning"] == "b: v = b[0] v + b[1] U0[id]"
    assert table["blocks.1.attention.blend"]["meaning"] == "b: v = b[0] v"
    assert "127 of the logits, from 257 on, are of no token" in text
    assert "q // 128 - k // 128 < 1, k in the document of q" in text
    stored = from_toml(tmp_path / "out/config.toml")
    assert (stored.model, stored.data.dir) == (run.load_config().model, "dataset")
    assert tomllib.loads((tmp_path / "out/config.toml").read_text())["recipe"] == "best"


@pytest.mark.parametrize("recipe", names_of("recipe"))
def test_every_tensor_of_every_recipe_has_a_meaning(make: Make, recipe: str) -> None:
    loaded = load_run(make(recipe).path)
    told = {
        name: meaning_of(name, loaded.config.model, {}) for name, *_ in loaded.model.named_roles()
    }
    assert all("{" not in meaning for meaning in told.values())
    assert ("tied" in told["embedding.weight"]) == loaded.config.model.tied_head


# Where it is written.


def test_what_is_there_is_never_replaced_by_mistake(make: Make, tmp_path: Path) -> None:
    run = make()
    before = contents(run.path / "tokenizer")
    for force in (False, True):
        with pytest.raises(ConfigError, match="not empty and holds no export"):
            export(run.path, run.path, force=force)
        (tmp_path / "file").write_text("mine")
        with pytest.raises(ConfigError, match="is a file: name a folder"):
            export(run.path, tmp_path / "file", force=force)
    assert contents(run.path / "tokenizer") == before
    (tmp_path / "out").mkdir()
    export(run.path, tmp_path / "out")  # an empty folder is as good as none
    with pytest.raises(ConfigError, match="replace it with --force"):
        export(run.path, tmp_path / "out")
    (tmp_path / "out.old").mkdir()
    (tmp_path / "out.old/keep").touch()
    export(run.path, tmp_path / "out", "weights", force=True)
    assert set(contents(tmp_path / "out")) == PLAIN_FILES
    assert (tmp_path / "out.old/keep").exists()
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt, which export did not write"):
        export(run.path, tmp_path / "out", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out", "out.old", "run"]


def test_a_write_that_fails_leaves_what_was_there(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    export(run.path, tmp_path / "out")
    before = contents(tmp_path / "out")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf, "_json", full)
    with pytest.raises(SpeedrunError, match="No space left on device; free some space"):
        export(run.path, tmp_path / "out", force=True)
    with pytest.raises(SpeedrunError, match="cannot write"):
        export(run.path, tmp_path / "new")
    assert contents(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_weights_that_do_not_read_back_are_not_exported(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(path: Path) -> dict[str, Tensor]:
        tensors = load_file(path)
        tensors["skips"] = tensors["skips"] + 1e-6
        return tensors

    monkeypatch.setattr(hf, "load_file", wrong)
    with pytest.raises(RunError, match="skips differs"):
        export(make().path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_records_that_were_changed_are_refused_before_anything_is_evaluated(
    make: Make, tmp_path: Path
) -> None:
    run, said = make("modern"), list[str]()
    run.forced.write_text('{"not": "a list"}')
    with pytest.raises(RunError, match=r"forced\.json is not a list of sentences"):
        export(run.path, tmp_path / "out", say=said.append)
    assert said == []


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        export(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="use hf or weights"):
        export(tmp_path, tmp_path / "out", "gguf")


def test_code_of_ones_own_goes_with_weights_and_not_to_transformers(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nfrom speedrun.model.block import MLP\n\n\nclass Own(MLP):\n"
        "    parameter_roles = {'more.weight': 'hidden', 'more.bias': 'scalar'}\n\n"
        "    def __init__(self, config):\n        super().__init__(config)\n"
        "        self.more = nn.Linear(config.width, config.width)\n\n"
        "    def forward(self, x, norm):\n        return super().forward(x + self.more(x), norm)\n"
    )
    run = make("modern", f"custom.mlp.use={tmp_path}/mine.py:Own")
    source = (tmp_path / "mine.py").read_bytes()
    (tmp_path / "mine.py").unlink()
    with pytest.raises(ConfigError, match=r"custom.mlp \(mine.py:Own\).* --to weights writes"):
        export(run.path, tmp_path / "out")
    export(run.path, tmp_path / "out", "weights")
    facts = read(tmp_path / "out" / FACTS)
    code = facts["own_code"]["custom.mlp"]
    name = f"{code[-13:-1]}-mine.py"
    assert set(contents(tmp_path / "out")) == PLAIN_FILES | {name}
    assert (tmp_path / "out" / name).read_bytes() == source
    told = {row["name"]: row["meaning"] for row in read(tmp_path / "out/names.json")}
    assert told["blocks.1.mlp.more.bias"] == f"as {code} has it"
    assert from_toml(tmp_path / "out/config.toml").custom.mlp.place == ""
    assert str(tmp_path) not in (tmp_path / "out/config.toml").read_text()
