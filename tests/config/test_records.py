"""Every record's recipe at full size against a table of the published facts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speedrun.config.files import chain, names
from speedrun.config.resolve import resolve
from speedrun.config.schedule import settings_at
from speedrun.config.schema import Config
from speedrun.model.gpt import GPT

# steps, warm-up, cooldown, Muon lr, embedding lr, head lr, scalar lr, beta 1, momentum warm-up,
# heads, row length, parameters in millions (None: not published), published minutes
RECORDS: dict[int, tuple[Any, ...]] = {
    2: (9536, 256, 2048, None, None, 0.0018, None, 0.9, 0, 12, 1024, None, 31.4),
    3: (7000, 250, 2000, 0.018, None, 0.0018, None, 0.9, 0, 12, 1024, 123.5, 24.9),
    4: (6200, 0, 1800, 0.00036, None, 0.0036, None, 0.9, 0, 12, 1024, None, 22.3),
    5: (5100, 0, 1450, 0.00036, None, 0.0036, None, 0.9, 0, 6, 1024, None, 15.2),
    6: (5100, 0, 1450, 0.00036, None, 0.0036, None, 0.9, 0, 6, 1024, None, 13.1),
    7: (5100, 0, 1450, 0.00036, None, 0.0036, None, 0.9, 0, 6, 1024, None, 12.0),
    8: (4578, 0, 1308, 0.02, 0.3, 0.002, None, 0.9, 0, 6, 1024, 162.2, 10.8),
    9: (3200, 0, 914, 0.02, 0.3, 0.002, 0.02, 0.9, 500, 6, 1024, 162.2, 8.2),
    10: (3242, 0, 926, 0.02, 0.3, 0.002, 0.02, 0.9, 500, 6, 1024, 162.2, 7.8),
    11: (3000, 0, 900, 0.04, 0.6, 0.008, 0.04, 0.9, 500, 6, 1024, 162.2, 7.2),
    12: (1875, 0, 562, 0.04, 0.6, 0.008, 0.04, 0.9, 500, 6, 65536, 162.2, 5.03),
    13: (1750, 0, 640, 0.05, 0.6, 0.008, 0.04, 0.8, 300, 6, 65536, 162.2, 4.66),
    14: (1530, 0, 600, 0.05, 0.6, 0.008, 0.04, 0.8, 300, 6, 65536, 625.8, 4.41),
    15: (1480, 0, 600, 0.05, 0.6, 0.008, 0.04, 0.8, 300, 6, 65536, 394.0, 3.95),
    16: (1480, 0, 600, 0.05, 0.6, 0.008, 0.04, 0.8, 300, 6, 65536, 394.0, 3.80),
    17: (1490, 0, 600, 0.05, 0.6, 0.008, 0.04, 0.8, 300, 6, 65536, 275.6, 3.57),
    18: (1390, 0, 556, 0.05, 0.6, 0.008, 0.04, 0.8, 300, 6, 65536, 275.7, 3.4),
}
# The steps at which the window grows by one unit.
SWITCHES = {
    15: [55, 110, 165, 220, 275, 329, 384, 439, 494, 549, 603, 658, 713, 768, 823, 878, 932, 987,
         1042, 1097, 1152, 1206, 1261, 1316, 1371, 1426, 1480],
    16: [110, 220, 329, 439, 549, 658, 768, 878, 987, 1097, 1206, 1316, 1426],
    17: [111, 221, 332, 442, 552, 663, 773, 883, 994, 1104, 1215, 1325, 1435],
    18: [103, 206, 309, 412, 515, 618, 721, 824, 927, 1030, 1133, 1236, 1339],
}  # fmt: skip


def full_size(record: int) -> Config:
    return resolve(f"record-{record:02d}", "small").config


@pytest.mark.parametrize("record", RECORDS)
def test_values(record: int) -> None:
    (steps, warmup, cooldown, muon, embedding, head, scalar, beta, momentum_warmup, heads, length,
     millions, minutes) = RECORDS[record]  # fmt: skip
    config = full_size(record)
    optimizer = config.optimizer
    assert (config.steps, config.batch.tokens, config.batch.length) == (steps, 524_288, length)
    assert (config.schedule.warmup, config.schedule.cooldown) == (warmup, cooldown)
    assert config.schedule.momentum_warmup == momentum_warmup
    assert (config.model.layers, config.model.width, config.model.heads) == (12, 768, heads)
    assert optimizer.kind == ("adamw" if muon is None else "muon")
    assert muon is None or optimizer.muon.lr == muon
    assert optimizer.muon.momentum == 0.95
    assert embedding is None or optimizer.embedding.lr == embedding
    assert optimizer.head.lr == head
    assert scalar is None or optimizer.scalar.lr == scalar
    assert optimizer.head.betas == (beta, 0.95)
    assert optimizer.head.weight_decay == optimizer.muon.weight_decay == 0
    assert (config.validation.tokens, config.train.target) == (10_485_760, 3.28)
    assert config.validation.every == (128 if record < 4 else 125)
    if record >= 14:
        assert optimizer.value_embedding.lr == 0.6
    if millions is not None:
        with torch.device("meta"):
            model = GPT(config.model, 50257, 1024)
        assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions
    assert chain("recipe", f"record-{record:02d}")[-1].notes["published_minutes"] == minutes


def since(record: int, *changes: tuple[int, Any]) -> Any:
    """The last of (first record, value) that a record has."""
    return [value for first, value in changes if first <= record][-1]


@pytest.mark.parametrize("record", range(3, 19))
def test_techniques(record: int) -> None:
    """What each record computes, by the table of what changed when."""
    config = full_size(record)
    found = {key: getattr(config.model, key) for key in (
        "head_dim", "activation", "norm_eps", "qk_norm", "positions", "softcap", "tied_head",
        "embedding_norm", "zero_init_projections", "fused_qkv", "x0_mixing", "value_residual",
        "value_embeddings", "value_weights", "unet_skips", "attention_free", "pad_embeddings",
        "attention_output_factor", "key_offset", "bigram_rows", "stream",
    )}  # fmt: skip
    assert found == {
        "head_dim": 0,  # the width over the heads: 64 with twelve of them, 128 with six
        "activation": since(record, (3, "gelu"), (5, "relu2")),
        # Of the framework's own norm: fp32's epsilon, then bf16's.
        "norm_eps": since(record, (3, 1e-6), (5, 1.1920929e-07), (10, 2.0**-7)),
        "qk_norm": record >= 5,
        "positions": since(record, (3, "rotary"), (17, "half-rotary")),
        "softcap": since(record, (3, 0.0), (9, 30.0), (18, 15.0)),
        "tied_head": record < 8,
        "embedding_norm": record >= 8,
        "zero_init_projections": record >= 5,
        "fused_qkv": record < 5,
        "x0_mixing": record >= 9,
        "value_residual": 9 <= record <= 13,
        "value_embeddings": since(record, (3, "none"), (14, "each"), (15, "mirrored"),
                                  (17, "ends")),
        "value_weights": since(record, (3, "blend"), (15, "pair")),
        "unet_skips": record >= 11,
        "attention_free": since(record, (3, ()), (17, (7,))),
        "pad_embeddings": record != 17,
        "attention_output_factor": since(record, (3, "depth"), (5, "one")),
        "key_offset": False,
        "bigram_rows": 0,
        "stream": since(record, (3, "fp32"), (10, "bf16")),
    }  # fmt: skip
    assert config.model.value_tables == 3, "of the form that records 17 and 18 have"
    muon = config.optimizer.muon
    assert muon.scale == since(record, (3, "none"), (4, "longest"), (8, "spectral"))
    assert muon.split_qkv == (record == 4), "before q, k and v are three matrices"
    assert muon.momentum_start == since(record, (3, 0.95), (9, 0.85))
    assert (muon.iterations, muon.coefficients, muon.nesterov) == (5, "classic", True)
    assert config.attention.documents == (record >= 12)
    unit = since(record, (3, "none"), (12, "tokens"), (15, "tokens_in_blocks"), (16, "blocks"))
    assert config.attention.window == unit
    assert config.optimizer.clip == 0.0


@pytest.mark.parametrize("record", SWITCHES)
def test_windows_grow_at_the_published_steps(record: int) -> None:
    config = full_size(record)
    sizes = [settings_at(config, step).window for step in range(config.steps + 1)]
    grown = [step for step in range(1, len(sizes)) if sizes[step] != sizes[step - 1]]
    assert grown == SWITCHES[record]
    unit = 64 if record == 15 else 1
    assert sizes == [
        unit * (1 + sum(switch <= step for switch in grown)) for step in range(len(sizes))
    ]
    assert (
        settings_at(config, 2 * config.steps).window == sizes[-1] == (1792 if record == 15 else 14)
    )


def test_windows_of_12_to_14() -> None:
    assert {settings_at(full_size(12), step).window for step in (0, 900, 1875)} == {1024}
    for record in (13, 14):
        config = full_size(record)
        sizes = [settings_at(config, step).window or 0 for step in range(config.steps + 1)]
        assert (sizes[0], sizes[-1], len(set(sizes))) == (64, 1792, 28)
        for step, size in enumerate(sizes):
            assert 0 <= 64 + 1728 * step / config.steps - size < 64 + 1e-9


def test_blocks_cover_the_token_window_at_every_step() -> None:
    tokens, blocks = full_size(15), full_size(16)
    assert tokens.steps == blocks.steps == 1480
    for step in range(1481):
        width = settings_at(tokens, step).window
        assert width is not None
        assert settings_at(blocks, step).window == -(-width // 128)


@pytest.mark.parametrize(
    ("record", "anchors"),
    [
        (15, {0: 1, 880: 1, 1000: 0.8, 1250: 0.3833, 1479: 0.00167}),
        (16, {880: 1, 1000: 0.8, 1250: 0.3833, 1479: 0.00167}),
        (18, {834: 1, 1000: 0.7014, 1250: 0.2518, 1389: 0.0018}),
    ],
)
def test_learning_rates_at_the_published_anchors(record: int, anchors: dict[int, float]) -> None:
    for step, expected in anchors.items():
        got = settings_at(full_size(record), step).learning_rate_multiplier
        assert got == pytest.approx(expected, abs=5e-5)


def test_momentum_warms_up() -> None:
    config = full_size(18)
    assert [settings_at(config, step).momentum for step in (0, 150, 300, 1000)] == pytest.approx(
        [0.85, 0.9, 0.95, 0.95]
    )
    assert settings_at(full_size(8), 0).momentum == 0.95


def test_systems_only_records_change_nothing_and_say_so() -> None:
    for record in ("record-06", "record-07"):
        layer = chain("recipe", record)[-1]
        assert "Systems only" in layer.notes["why"]
        assert not layer.values


def test_the_history_is_one_chain() -> None:
    history = [layer.name for layer in chain("recipe", "record-18")]
    assert history == ["baseline", *(f"record-{n:02d}" for n in range(2, 19))]
    assert set(history) <= set(names("recipe"))


def test_every_record_runs_at_nano_size_by_the_tracks_rules() -> None:
    resolved = resolve("record-18", "nano")
    config = resolved.config
    assert config.optimizer.head.lr == pytest.approx(4 * 0.008)  # 768 / 192
    assert config.optimizer.muon.lr == 0.05
    assert config.model.attention_free == (2,)
    assert "x 4 (track nano)" in resolved.origin["optimizer.head.lr"]
    assert config.attention.window_end <= config.batch.length
