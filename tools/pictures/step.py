"""One training step: what is done, in order, and what goes from one part to the next.

Names, files and order come from the code; `check` fails where the picture is no longer true.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from speedrun.optim.combined import KINDS
from tools.pictures.code import check_order, file_of, find
from tools.pictures.svg import WIDTH, Drawing

LOOP = "speedrun.train.loop:train"
TRAINER = "speedrun.train.trainer:Trainer"
# Who calls what the picture shows, in its order.
ORDER = {
    LOOP: ("trainer.outcomes", "log.step", "trainer.step", "told", "trainer.validate",
           "trainer.rewind", "trainer.save"),
    f"{TRAINER}.step": (
        "self.apply_settings", "next", "self.forward_backward", "agree", "self.update",
        "self.optimizer.zero_grad", "self.progress.count_step", "self._under_way.add",
    ),
    f"{TRAINER}.update": ("self.gradients.clip", "self.optimizer.step"),
    f"{TRAINER}.outcomes": ("self._under_way.told",),
    "speedrun.train.outcomes:UnderWay._tell": (
        "report.read", "self._progress.count_loss", "Outcome",
    ),
    f"{TRAINER}.apply_settings": ("settings_at", "part.apply_settings"),
    f"{TRAINER}.forward_backward": (
        "batch.split", "self.training_loss", "torch.autograd.backward", "self.gradients.arrive",
    ),
    f"{TRAINER}.training_loss": ("self.parallel",),
    "speedrun.model.planned:Planned.forward": ("self.planner.plan", "self.model"),
    "speedrun.optim.build:build_optimizer": ("CombinedOptimizer",),
    "speedrun.optim.combined:CombinedOptimizer.update": ("optimizer.update",),
}  # fmt: skip


@dataclass(frozen=True)
class Stage:
    function: str
    what: str
    gives: str = ""  # what goes from here to the next
    inner: bool = False  # done for each microbatch


STAGES = (
    Stage("speedrun.config.schedule:settings_at", "what this step is trained with",
          "rate, momentum, window: to planner, loss, optimizer"),
    Stage("speedrun.data.loader:Loader.__next__", "this rank's rows, made ahead by a thread",
          "Batch: inputs, targets, documents"),
    Stage("speedrun.model.plan:AttentionPlanner.plan", "documents and window: who sees whom",
          "AttentionPlan", inner=True),
    Stage("speedrun.model.gpt:GPT.forward", "embedding, blocks, norm, head, loss",
          "mean loss", inner=True),
    Stage(f"{TRAINER}.forward_backward", "gradients add up; each goes to the rank that needs it",
          "loss, gradients", inner=True),
    Stage("speedrun.train.health:agree", "one small all-reduce: mean loss, all finite, stop asked",
          "Report"),
    Stage(f"{TRAINER}.update", "the norm is held to optimizer.clip, if a recipe sets it",
          "gradients"),
    Stage("speedrun.optim.combined:CombinedOptimizer.step",
          "record 18: Muon for hidden matrices, else Adam", "new weights"),
    Stage(f"{TRAINER}.outcomes", "read here, on a GPU one step later; is the loss a spike?",
          "Outcome"),
    Stage("speedrun.train.log:Log.step", "one line of metrics.jsonl"),
)  # fmt: skip
AFTER = ("validate", "rewind", "save")

LEFT, RIGHT, TOP = 36.0, WIDTH - 36.0, 104.0
BOX, GAP, WIDE_GAP = 54.0, 30.0, 48.0
INSET, ARROW = 16.0, WIDTH / 2 - 150


def check() -> None:
    for function, wanted in ORDER.items():
        check_order(function, wanted)
    assert list(KINDS) == ["muon", "adam"], "the picture names the optimizers"


def tops() -> list[float]:
    """Where each box begins; around those of a microbatch there is room for a frame."""
    found = [TOP]
    for stage, following in pairwise(STAGES):
        found.append(found[-1] + BOX + (GAP if stage.inner == following.inner else WIDE_GAP))
    return found


def draw() -> str:
    check()
    places = list(zip(STAGES, tops(), strict=True))
    end = places[-1][1] + BOX + 32
    picture = Drawing(
        end + 112,
        "One training step, in order",
        "From top to bottom: "
        + "; ".join(f"{_short(stage.function)}: {stage.what}" for stage in STAGES)
        + ". If loss or gradients are not finite there is no update. Off the clock: validate, "
        "rewind or save.",
    )
    caller, callee = file_of(LOOP), _short(f"{TRAINER}.step")
    picture.heading("One training step", f"train in {caller} calls {callee} until the run ends")
    picture.rect(20, TOP - 28, WIDTH - 40, end - TOP + 12, "none", stroke="c1", radius=8)
    picture.text(RIGHT, TOP - 10, "on the clock", size=13, anchor="end", fill="c1")
    inner = [y for stage, y in places if stage.inner]
    frame = inner[0] - 25, inner[-1] + BOX + 13
    picture.rect(
        LEFT,
        frame[0],
        RIGHT - LEFT,
        frame[1] - frame[0],
        "pale",
        stroke="line",
        radius=8,
        dash="5 4",
    )
    picture.text(
        RIGHT - INSET, frame[0] + 17, "each microbatch", size=13, anchor="end", fill="soft"
    )
    for number, (stage, y) in enumerate(places):
        inset = INSET if stage.inner else 0
        left, right = LEFT + inset, RIGHT - inset
        picture.rect(left, y, right - left, BOX, "card", stroke="line", radius=7)
        picture.text(left + 14, y + 22, _short(stage.function), size=14.5, bold=True, mono=True)
        file = file_of(stage.function)
        picture.text(right - 14, y + 22, file, size=13, anchor="end", fill="soft", mono=True)
        picture.text(left + 14, y + 43, stage.what, fill="soft")
        if number + 1 == len(places):
            continue
        below, (following, next_y) = y + BOX, places[number + 1]
        picture.arrow(ARROW, below, next_y - below)
        # Outside the frame, where an arrow crosses its border.
        label = below + (20 if stage.inner == following.inner else 33 if stage.inner else 16)
        picture.text(ARROW + 12, label, stage.gives, size=13)
        if stage.gives == "Report":
            picture.text(RIGHT, label, "not finite: no update", size=13, anchor="end", fill="mark")
    picture.rect(20, end, WIDTH - 40, 92, "none", stroke="line", radius=8)
    picture.text(RIGHT, end + 24, "off the clock, when due", size=13, anchor="end", fill="soft")
    width = (RIGHT - LEFT - 2 * 12) / 3
    for number, name in enumerate(AFTER):
        find(f"{TRAINER}.{name}")
        x, middle = LEFT + number * (width + 12), end + 62
        picture.rect(x, middle - 22, width, 40, "card", stroke="line", radius=7)
        picture.text(
            x + width / 2, middle + 3, name, size=14.5, bold=True, mono=True, anchor="middle"
        )
    return picture.render()


def _short(function: str) -> str:
    return function.partition(":")[2].replace("Loader.__next__", "next(Loader)")
