"""Plans of the CPU at hand: what timed pieces are put together to, with times that are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speedrun.config.optimizer import MATRIX_ROLES
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.plan import here
from speedrun.plan.here import SYSTEMS, Costs, Pieces, plan_here
from speedrun.plan.predict import Plan
from speedrun.plan.work import visited_keys, work_of_keys
from speedrun.train.estimate import estimate, without_storage
from speedrun.train.memory import count, shapes_of

VOCAB = 257
BLOCK, ATTENTION, HEAD, LAUNCHES = 10.0, 3.0, 2.0, 0.5
PRODUCT = 1e-9
OF_MATRICES = ("orthogonalisation", "momentum and updates", "Adam of the matrices")


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "SECONDS", 0.0)
    monkeypatch.setattr(here, "REPEATS", 1)


def pieces(config: Config, monkeypatch: pytest.MonkeyPatch, product: float = PRODUCT) -> Pieces:
    """Pieces that take what they are told to take."""
    found = Pieces(config, without_storage(config, VOCAB))
    for name, seconds in {
        "block": BLOCK, "attention": ATTENTION, "head": HEAD, "launches": LAUNCHES,
        "product": product, "number_of_matrices": 1e-3, "byte_of_rows": 1e-6,
    }.items():  # fmt: skip
        monkeypatch.setattr(found, name, lambda seconds=seconds: seconds)
    return found


def seconds_of_step(found: Pieces, costs: Costs) -> dict[str, float]:
    config = found.config
    keys = visited_keys(config, config.steps // 2)
    return {work.part: work.amount * costs.of[work.part]
            for work in work_of_keys(config, found.model, SYSTEMS, keys)}  # fmt: skip


@pytest.mark.parametrize("recipe", ["modern", "record-18", "best", "baseline"])
def test_a_step_is_its_pieces(
    recipe: str, tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks and the head for all tokens, the updates, and one pass that is launched."""
    config = tiny("model.layers=4", "batch.tokens=8192", "batch.length=64", recipe=recipe)
    found = pieces(config, monkeypatch)
    assert found.tokens == here.TOKENS
    times = 8192 // found.tokens
    parts = seconds_of_step(found, found.costs())
    layers, attends = 4, 4 - len(config.model.attention_free)
    without_attention = times * layers * (BLOCK - ATTENTION)
    blocks = parts["products of the blocks"] + parts["norms, sums, activations"]
    assert blocks == pytest.approx(without_attention)
    assert parts["attention"] == pytest.approx(times * attends * ATTENTION)
    assert parts["products of the head"] + parts["loss"] == pytest.approx(times * HEAD)
    assert parts["waits"] == LAUNCHES
    numbers = count(shapes_of(found.model, *MATRIX_ROLES))
    updates = sum(seconds for part, seconds in parts.items() if part in OF_MATRICES)
    assert updates == pytest.approx(1e-3 * numbers)


def test_products_take_no_more_than_what_they_are_in(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = pieces(tiny("batch.length=64", "batch.tokens=4096"), monkeypatch, product=1.0)
    parts = seconds_of_step(found, found.costs())
    assert parts["products of the blocks"] == pytest.approx(2 * (BLOCK - ATTENTION))
    assert parts["norms, sums, activations"] == 0
    assert (parts["products of the head"], parts["loss"]) == pytest.approx((HEAD, 0))


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("baseline", []),
        ("record-09", []),
        ("record-18", ["model.layers=4"]),
        ("best", ["model.layers=4", "machine.recompute=true"]),
        ("record-14", ["model.kv_heads=1"]),
        ("modern", ["batch.length=256", "batch.tokens=256"]),
    ],
)
def test_plans_of_this_machine(recipe: str, words: list[str], tiny: Callable[..., Config]) -> None:
    config = tiny(*words, recipe=recipe)
    found = plan_here(config, VOCAB)
    assert isinstance(found, Plan)
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert found.parts["attention"] > 0
    assert found.step == pytest.approx(sum(found.parts.values()))
    assert found.fits
    cost = estimate(config, VOCAB, 1, int(found.room))
    assert (found.memory_bytes, found.microbatches) == (cost.memory_bytes, cost.microbatches)


@pytest.mark.usefixtures("_quick")
def test_what_is_computed_again_takes_longer(
    tiny: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {}
    for again in ("false", "true"):
        found = pieces(tiny(f"machine.recompute={again}"), monkeypatch)
        parts[again] = seconds_of_step(found, found.costs())
    for part, times in (("products of the blocks", 4 / 3), ("attention", 9 / 7),
                        ("norms, sums, activations", 3.5 / 2.5)):  # fmt: skip
        assert parts["true"][part] == pytest.approx(times * parts["false"][part]), part


@pytest.mark.usefixtures("_quick")
def test_a_users_own_code_is_what_is_timed(tmp_path: Path, tiny_dataset: Path) -> None:
    from speedrun.config.resolve import resolve
    from tests.conftest import TINY

    (tmp_path / "mine.py").write_text(
        "import time, torch\n"
        "class Mine(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        time.sleep(0.02)\n"
        "        return super().step(closure)\n"
        "def wrap(inner, layer):\n"
        "    class Watched(torch.nn.Module):\n"
        "        def __init__(self):\n"
        "            super().__init__()\n"
        "            self.inner = inner\n"
        "        def forward(self, x, norm):\n"
        "            time.sleep(0.03)\n"
        "            return self.inner(x, norm)\n"
        "    return Watched()\n"
    )
    (tmp_path / "mine.toml").write_text(
        'extends = "modern"\n[optimizer.hidden]\nuse = "mine.py:Mine"\nargs = { lr = 0.1 }\n'
        '[custom.mlp]\nuse = "mine.py:wrap"\n'
    )
    words = [*TINY, f"data.dir={tiny_dataset}"]
    config = resolve(str(tmp_path / "mine.toml"), "nano", words).config
    parts = plan_here(config, VOCAB).parts
    assert sum(parts.get(part, 0) for part in OF_MATRICES) >= 0.02
    in_blocks = parts["products of the blocks"] + parts["norms, sums, activations"]
    assert in_blocks >= 0.03 * config.model.layers


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("machine.precision=bf16", r"machine.precision = 'bf16' is not planned on a CPU"),
        ("machine.compile=block", r"machine.compile = 'block' is not planned"),
        ("machine.device=rehearsal", r"machine.device = 'rehearsal' is not planned"),
    ],
)
def test_what_is_not_timed_is_refused(word: str, said: str, tiny: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_here(tiny(word), VOCAB)


def test_a_piece_is_timed_often_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "SECONDS", 0.0)
    runs: list[int] = []
    assert here.median_seconds(lambda: runs.append(torch.get_num_threads())) >= 0
    assert len(runs) == 1 + here.REPEATS
