"""The multipliers and momenta of the records, at their exact steps; windows: test_records.py."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speedrun.config.idle import idle
from speedrun.config.resolve import resolve
from speedrun.config.schedule import cosine, momentum, settings_at, trapezoid, try_schedule
from speedrun.config.schema import Config
from speedrun.errors import ConfigError

# (warmup, total, cooldown) of records 3, 13, 14, 15-16, 17 and 18
RECORDS = {
    3: (250, 7000, 2000),
    13: (0, 1750, 640),
    14: (0, 1530, 600),
    15: (0, 1480, 600),
    17: (0, 1490, 600),
    18: (0, 1390, 556),
}


@pytest.mark.parametrize("record", RECORDS)
def test_trapezoid_turns_on_its_exact_steps(record: int) -> None:
    warmup, total, cooldown = RECORDS[record]
    curve = [trapezoid(s, total, warmup=warmup, cooldown=cooldown) for s in range(total + 1)]
    flat = [s for s, m in enumerate(curve) if m == 1.0]
    assert flat == list(range(max(warmup - 1, 0), total - cooldown + 1))
    assert curve[-2] == 1 / cooldown
    assert curve[-1] == 0.0
    for s in range(total - cooldown, total):
        assert curve[s] == (total - s) / cooldown


def test_trapezoid_anchors_of_records_15_and_18() -> None:
    r15 = [trapezoid(s, 1480, cooldown=600) for s in (0, 880, 881, 1000, 1250, 1479)]
    assert r15 == pytest.approx([1, 1, 599 / 600, 0.8, 0.3833, 0.00167], abs=5e-5)
    r18 = [trapezoid(s, 1390, cooldown=556) for s in (0, 834, 835, 1000, 1250, 1389)]
    assert r18 == pytest.approx([1, 1, 555 / 556, 0.7014, 0.2518, 0.0018], abs=5e-5)


def test_trapezoid_warmup_starts_above_zero_and_the_floor_ends_the_decay() -> None:
    assert trapezoid(0, 7000, warmup=250, cooldown=2000) == 1 / 250
    assert trapezoid(124, 7000, warmup=250, cooldown=2000) == 0.5
    assert trapezoid(99, 100, cooldown=50, floor=0.1) == 0.1
    assert trapezoid(95, 100, cooldown=50, floor=0.1) == 0.1
    assert trapezoid(94, 100, cooldown=50, floor=0.1) == 0.12
    assert trapezoid(500, 100, cooldown=50, floor=0.1) == 0.1
    assert [trapezoid(s, 3, cooldown=0) for s in range(4)] == [1.0, 1.0, 1.0, 0.0]


def test_cosine() -> None:
    assert cosine(0, 100) == 1.0
    assert cosine(50, 100) == pytest.approx(0.5)
    assert cosine(100, 100, floor=0.1) == 0.1
    assert cosine(4, 110, warmup=10) == 0.5
    assert cosine(10, 110, warmup=10) == 1.0
    assert cosine(35, 110, warmup=10, floor=0.2) == pytest.approx(
        0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
    )


def test_momentum_rises_over_300_steps() -> None:
    assert momentum(0) == 0.85
    assert momentum(150) == pytest.approx(0.90)
    assert momentum(299) == pytest.approx(0.85 + 0.10 * 299 / 300)
    assert momentum(300) == momentum(10_000) == 0.95
    assert momentum(250, warmup=500) == pytest.approx(0.90)
    assert momentum(0, warmup=0) == 0.95


def test_momentum_falls_back_over_the_last_steps() -> None:
    words = ["optimizer.muon.momentum_start=0.85", "optimizer.muon.momentum=0.95"]
    words += ["schedule.steps=1000", "schedule.momentum_warmup=300", "train.steps=1000"]
    kept = resolve("record-18", "nano", words).config
    config = resolve("record-18", "nano", [*words, "schedule.momentum_cooldown=50"]).config
    found = {step: settings_at(config, step).momentum for step in range(1001)}
    assert all(found[step] == settings_at(kept, step).momentum for step in range(951))
    assert found[950] == 0.95
    assert found[975] == pytest.approx(0.90)
    assert found[999] == pytest.approx(0.852)
    assert found[1000] == 0.85
    short = resolve(
        "record-18", "nano", [*words, "schedule.momentum_cooldown=50"], {"train.steps": 20}
    )
    assert settings_at(short.config, 19).momentum == 0.95, "the last of 20 steps is all of it"
    # Where warm-up and cool-down meet, the lower one holds.
    assert momentum(6, warmup=10, total=10, cooldown=8) == pytest.approx(0.90)
    assert momentum(4, warmup=10, total=10, cooldown=8) == pytest.approx(0.89)


@settings(deadline=None)
@given(st.integers(1, 3000), st.data())
def test_any_run_length_stays_in_bounds(total: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, total))
    cooldown = data.draw(st.integers(0, total - warmup))
    step = data.draw(st.integers(0, 2 * total))
    assert 0.0 <= trapezoid(step, total, warmup=warmup, cooldown=cooldown) <= 1.0
    assert 0.0 <= cosine(step, total, warmup=warmup) <= 1.0
    config = resolve("record-18", "small", options={"train.steps": total}).config
    now, then = (settings_at(config, s).window or 0 for s in (step, step + 1))
    assert 1 <= now <= then <= 14


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: trapezoid(0, 10, warmup=6, cooldown=5), "cooldown"),
        (lambda: trapezoid(0, 10, cooldown=-1), "cooldown"),
        (lambda: trapezoid(-1, 10, cooldown=1), "step"),
        (lambda: trapezoid(0, 10, cooldown=1, floor=2.0), "floor"),
        (lambda: cosine(0, 10, warmup=11), "warmup"),
        (lambda: momentum(-1), "step"),
        (lambda: cosine(0, 0), "total"),
    ],
)
def test_impossible_schedules_are_refused(call: Callable[[], object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        call()


USE = 'custom.schedule.use="{}/mine.py:{}"'


def own(folder: Path, line: str, *, name: str = "mine", args: str = "") -> Config:
    (folder / "mine.py").write_text(
        "calls = []\n\ndef mine(step, total, power=1.0):\n"
        f"    calls.append(step)\n    return {line}\n"
    )
    words = [USE.format(folder, name), args, "train.steps=10"]
    return resolve("modern", "pico", [word for word in words if word]).config


def test_a_schedule_of_ones_own(tmp_path: Path) -> None:
    config = own(tmp_path, "(1 - step / total) ** power", args="custom.schedule.args.power=2")
    try_schedule(config)
    found = [settings_at(config, step).learning_rate_multiplier for step in (0, 5, 10)]
    assert found == [1.0, 0.25, 0.0]
    told = idle(resolve("modern", "pico", [USE.format(tmp_path, "mine"), "schedule.warmup=5"]))
    assert any(sentence.startswith("schedule.warmup changes nothing here") for sentence in told)
    usual = resolve("modern", "pico", ["train.steps=10"]).config
    assert [settings_at(config, s).window for s in range(11)] == [
        settings_at(usual, s).window for s in range(11)
    ]


@pytest.mark.parametrize(
    ("line", "more", "complaint"),
    [
        ("1 - step / 5", {}, r"mine.py:mine\) gives -0.19999\d* at step 6 of 10: .* 0 or more"),
        ("float('nan')", {}, "gives nan at step 0 of 10"),
        ("'high'", {}, "gives 'high' at step 0"),
        ("10**400", {}, "is a number that is finite and 0 or more"),
        ("1 / (5 - step)", {}, "fails at step 5 of 10, in line 5 of mine.py: ZeroDivisionError"),
        ("1.0 + len(calls)", {}, r"gives 12.0 at step 10 and 13.0 when asked again"),
        (
            "1.0",
            {"args": "custom.schedule.args.powr=2"},
            r"takes \(step, total, power=1.0\) .*powr",
        ),
        ("1.0", {"name": "calls"}, r"is \[\]: name a class or a function"),
    ],
)
def test_a_schedule_that_no_run_could_follow_is_refused(
    tmp_path: Path, line: str, more: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        try_schedule(own(tmp_path, line, **more))
