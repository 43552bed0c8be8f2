"""One optimizer that nobody here wrote, with what ours have: schedule, state by name, modes, guard.

It is made as its package says, `make(groups, **args)` with a param group for each role, and keeps
its groups and its state as it likes. Here stands what a run needs beside `step()`:

    rates       every group's own `lr` times the schedule's multiplier, unless it schedules itself
    state       all that it holds, as tensors and one JSON text (tree.py), for checkpoints
    modes       one with train() and eval() (ScheduleFree) is in eval mode for a look, bit for bit
                without a trace
    guard       it changes its own parameters and nothing else, above all no random numbers
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedrun.config.calling import gist, reason
from speedrun.config.code import name_in_file
from speedrun.optim.errors import OptimError
from speedrun.optim.foreign.compiler import without_compiler
from speedrun.optim.foreign.make import Members, Use, construct, for_groups
from speedrun.optim.foreign.tree import Owner, Written, tensor_keys, write
from speedrun.optim.foreign.untree import read
from speedrun.optim.foreign.values import form_of, same_bits
from speedrun.settings import settings_kept
from speedrun.streams import Streams
from speedrun.traces import as_bytes, holds_data, outside_of, trace

GRAPH_WORDS = ("create_graph", "grad_fn", "does not require grad", "retain_graph")


class Foreign:
    def __init__(
        self, use: Use, members: Members, *, seed: int = 0, recorded: bool = False
    ) -> None:
        self.use, self.roles = use, tuple(members)
        self.called = use.named(self.roles)
        self.params = {name: param for group in members.values() for name, param in group}
        self.role_of = {name: role for role, group in members.items() for name, _ in group}
        self.label = f"[{'+'.join(self.roles)}]"
        self._streams = Streams.of(seed, "optimizer", self.label) if use.random else None
        self._marked = {name: set(vars(param)) for name, param in self.params.items()}
        self._forms = {name: form_of(param) for name, param in self.params.items()}
        self._stepped = False
        self._kept: dict[str, Tensor] | None = None  # its state in training, while in eval mode
        # Some set what holds for the whole process, such as the precision of products.
        with self._guarded("when it is made"), settings_kept(), without_compiler():
            self.for_groups = for_groups(use, members)
            self.optimizer: Optimizer = construct(
                use, members, self.for_groups, self.called, recorded=recorded
            )
        self.owner = Owner.of(self.optimizer, self.params, use.make, self.called)
        self.rates = [self._rate(group.get("lr")) for group in self.optimizer.param_groups]
        self.has_modes = all(callable(getattr(self.optimizer, m, None)) for m in ("train", "eval"))
        self._traces: dict[str, str] | None = None  # by path: what is in sight of what is kept
        self._outside: dict[str, str] | None = None  # the same of its classes and modules
        self.written()
        self._call("train")

    # Learning rates.

    def _rate(self, lr: Any) -> float | None:
        if isinstance(lr, bool):
            raise OptimError(f"{self.called} has the learning rate {lr}: give it a number")
        number = lr.item() if isinstance(lr, Tensor) and lr.numel() == 1 else lr
        if not isinstance(number, int | float):
            return None
        if not 0 <= number < math.inf:
            raise OptimError(
                f"{self.called} has the learning rate {number:g}: give it one that is finite and 0 "
                "or more"
            )
        return float(number)

    @property
    def scheduled(self) -> bool:
        """Whether the multiplier of the schedule reaches it."""
        return self.use.scheduled and any(rate is not None for rate in self.rates)

    def set_multiplier(self, multiplier: float) -> None:
        if not self.use.scheduled:
            return
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if rate is None:
                continue
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * multiplier)
            else:
                group["lr"] = rate * multiplier

    def rate_of(self, param: Tensor) -> float | None:
        """The peak rate of a parameter; None if its group has none."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=False):
            if any(one is param for one in group["params"]):
                return rate
        return self.rates[0] if self.rates else None

    @property
    def about(self) -> str:
        """What it is and how a run treats it, in a few words."""
        code = f" ({self.use.code[:12]})" if self.use.code else ""
        rates = sorted({rate for rate in self.rates if rate is not None})
        said = [f"lr {', '.join(f'{rate:g}' for rate in rates)}" if rates else "no lr to schedule"]
        if rates:
            said.append("scheduled" if self.use.scheduled else "not scheduled")
        if self.has_modes:
            said.append("validated and saved in its eval mode")
        if self.use.random:
            said.append("with random numbers of its own")
        return f"{' and '.join(self.roles)} by {self.use.use}{code}: {', '.join(said)}"

    # Steps.

    def step(self, others: Sequence[Tensor] = ()) -> None:
        """One step. `others` are parameters that it has no business with: they are compared."""
        before = [other.detach().clone() for other in others]
        # As in anybody's loop: what runs without gradients is for it to say.
        with self._guarded("in a step"), torch.enable_grad():
            try:
                self.optimizer.step()
            except (Exception, SystemExit) as error:
                raise self._explained(error) from error
        self._stepped = True
        self._refuse_other_form()
        for other, kept in zip(others, before, strict=True):
            if not same_bits(other.detach(), kept):
                raise OptimError(
                    f"{self.called} changed a parameter of shape {tuple(other.shape)} that was not "
                    "given to it; an optimizer may change its own parameters only"
                )

    def _refuse_other_form(self) -> None:
        """Values are all it may change of a parameter."""
        for name, param in self.params.items():
            form = form_of(param)
            if form != self._forms[name]:
                raise OptimError(
                    f"{self.called} makes of parameter {name}, {self._forms[name]}, one that is "
                    f"{form}; an optimizer may change the values of its parameters only"
                )

    def _explained(self, error: BaseException) -> OptimError:
        text, what = reason(error), gist(error, self.use.make)
        if "closure" in text:
            return OptimError(
                f"{self.called} needs a closure: it evaluates the loss several times in a step, "
                f"and a step here has one forward and one backward pass ({what})"
            )
        if any(word in text for word in GRAPH_WORDS):
            return OptimError(
                f"{self.called} needs a second backward pass through the gradient (create_graph), "
                f"and a step here has one ({what})"
            )
        return OptimError(f"{self.called} failed in step(): {what}")

    @contextmanager
    def _guarded(self, when: str) -> Iterator[None]:
        """Random numbers come from its own stream, or from none; torch's settings stay."""
        before = Streams.now()
        if self._streams is not None:
            self._streams.put()
        try:
            with settings_kept() as changed:
                yield
            now = Streams.now()
            if self._streams is not None:
                self._streams = now
        finally:
            if self._streams is not None:
                before.put()
        if self._streams is None and (whose := now.moved(before)):
            before.put()
            raise OptimError(
                f"{self.called} draws random numbers of {whose} {when}, which belong to the run: "
                "set random = true beside its use to give it a stream of its own, saved with it"
            )
        if changed:
            raise OptimError(
                f"{self.called} calls {changed[0]} {when}, which changes how the model computes; "
                "it must leave torch's settings alone"
            )

    # Modes.

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Its parameters hold the weights to be used, and afterwards those to be trained.

        Going to eval mode and back rounds, so what was there before is put back. Before its first
        step there are no others, and some could not go there.
        """
        if not self.has_modes or self._kept is not None or not self._stepped:
            yield
            return
        self._kept = {key: tensor.clone() for key, tensor in self.state().items()}
        try:
            self._call("eval")
            yield
        finally:
            load, self._kept = self.loading(self._kept), None
            load()

    def _call(self, mode: str) -> None:
        if not self.has_modes:
            return
        with self._guarded(f"in {mode}()"), torch.enable_grad():
            try:
                getattr(self.optimizer, mode)()
            except Exception as error:
                raise OptimError(
                    f"{self.called} failed in {mode}(): {gist(error, self.use.make)}"
                ) from error

    # State.

    @property
    def tree_key(self) -> str:
        return f"{self.label}:tree"

    def written(self) -> Written:
        """Live tensors, and the tree that says what they are."""
        beside: dict[str, Any] = {
            "marks": self._marks(), "args": self._args(), "stepped": self._stepped
        }  # fmt: skip
        if self._streams is not None:
            beside["streams"] = self._streams.plain()
        if self.has_modes:
            beside["weights"] = {n: param.detach().clone() for n, param in self.params.items()}
        with self._saving():
            written = write(self.optimizer, self.owner, self.label, beside)
        self._watch_kept(written)
        return written

    def _watch_kept(self, written: Written) -> None:
        """What is not written must stay as the constructor made it, or nothing brings it back."""
        traces = {path: self._trace(value) for path, value in written.kept.items()}
        traces |= dict.fromkeys(written.functions, "")
        before = traces if self._traces is None else self._traces
        for path, found in traces.items():
            value = written.kept.get(path)
            what = "a function that" if value is None else f"a {type(value).__name__} that"
            # An attribute that is code may be made when it is first used, and is so again.
            inside = path in written.functions or "/" in path or ":" in path
            if path not in before and (inside or holds_data(value)):
                raise self.owner.refuse(path, f"{what} was made in a step")
            if before.get(path, found) != found:
                raise self.owner.refuse(path, f"{what} changes from step to step or was exchanged")
        self._traces = {**traces, **before}

    def watch_outside(self) -> None:
        """Nor may it count in its class or module; what is filled once, in the first steps, may."""
        found = outside_of(self.optimizer, self.owner.packages)
        now = {name: self._trace(value) for name, value in found.items()}
        before = self._outside or {}
        for name in now.keys() & before.keys():
            if before[name] != now[name]:
                raise OptimError(
                    f"{self.called} changes {name_in_file(name)} from step to step, which belongs "
                    "to its class or module and is in no checkpoint: keep it in the optimizer"
                )
        self._outside = {**now, **before}

    def _trace(self, value: object) -> str:
        return trace(value, {id(self.optimizer): "", **{id(p): n for n, p in self.params.items()}})

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """What it holds may have a mind of its own about being looked at, or made anew."""
        try:
            yield
        except OptimError:
            raise
        except Exception as error:
            raise OptimError(
                f"{self.called} cannot be saved exactly: {gist(error, self.use.make)}"
            ) from error

    def _marks(self) -> dict[str, dict[str, Any]]:
        """What it wrote onto the parameters themselves."""
        return {
            name: new
            for name, param in self.params.items()
            if (new := {k: v for k, v in vars(param).items() if k not in self._marked[name]})
        }

    def state(self) -> dict[str, Tensor]:
        """All its state for safetensors, by parameter name where it is a parameter's; not copied.

        Of one with modes the weights in training are a part of it: the model's file has others.
        """
        if self._kept is not None:
            return self._kept
        written = self.written()
        with self._saving():
            text = bytearray(json.dumps(written.tree, allow_nan=False).encode())
        return {**written.tensors, self.tree_key: torch.frombuffer(text, dtype=torch.uint8)}

    def state_bytes(self) -> dict[str, int] | None:
        """Bytes of state by parameter name, '' for what is no parameter's; None before a step.

        What one has is not declared anywhere: it shows when it has been made.
        """
        if not self._stepped:
            return None
        found: Counter[str] = Counter()
        for key, tensor in self.written().tensors.items():
            name = key.partition(":")[0]
            if not key.startswith(f"{self.label}:weights"):
                found[name if name in self.params else ""] += tensor.nbytes
        return found

    def keys_in(self, flat: Mapping[str, Tensor]) -> set[str]:
        """Which of some saved tensors are its own."""
        if self.tree_key not in flat:
            raise OptimError(
                f"the saved state has nothing for {self.called}; it was saved with another "
                "optimizer, or by other roles"
            )
        return {self.tree_key, *tensor_keys(self._tree(flat))}

    def _tree(self, flat: Mapping[str, Tensor]) -> Any:
        return json.loads(bytes(flat[self.tree_key].numpy()))

    def loading(self, flat: Mapping[str, Tensor]) -> Callable[[], None]:
        """Decode and check what `state` gave; the change itself is a call of what is returned."""
        tree = self._tree(flat)
        # Copies: what stands beside it now is compared, and not filled anew.
        likes = {"marks": {name: dict(vars(param)) for name, param in self.params.items()}}
        with self._saving():
            put, beside = read(tree, flat, self.optimizer, self.owner, likes)
        anew = self._set_anew(json.loads(beside["args"]))
        for name, param in self.params.items():
            saved = flat.get(f"{self.label}:weights/{name}", param)
            if saved.shape != param.shape:
                raise OptimError(
                    f"the saved weights of {name} have shape {tuple(saved.shape)}, but the "
                    f"parameter has {tuple(param.shape)}; use the model of the state"
                )

        @torch.no_grad()
        def load() -> None:
            put()
            for group in self.optimizer.param_groups:
                group.update(anew)
            for name, param in self.params.items():
                for key in vars(param).keys() - self._marked[name]:
                    del param.__dict__[key]
                param.__dict__.update(beside["marks"].get(name, {}))
            for name, tensor in beside.get("weights", {}).items():
                self.params[name].copy_(tensor)
            if self._streams is not None and "streams" in beside:
                self._streams = Streams(**beside["streams"])
            self._stepped = beside["stepped"]

        return load

    def _args(self) -> str:
        """As a recipe has them; a caller in Python may give others, by what they look like."""
        return json.dumps(dict(self.use.args), default=repr)

    def _set_anew(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that are others than when the state was saved, as a forced resume may set."""
        now = json.loads(self._args())
        changed = {key for key in {**before, **now} if before.get(key) != now.get(key)}
        groups = self.optimizer.param_groups
        for key in changed:
            if key not in now or any(key not in group for group in groups):
                raise OptimError(
                    f"the argument {key} of {self.called} cannot be changed in a run: it is no "
                    "option of its param groups; begin a new run, or set it back"
                )
        if changed and self._besides_groups(before) != self._besides_groups(now):
            raise OptimError(
                f"{', '.join(sorted(changed))} of {self.called} cannot be changed in a run: it "
                "keeps more than its param groups know; begin a new run, or set it back"
            )
        # The rate is set before every step, by the schedule or as it is.
        return {key: copy.deepcopy(groups[0][key]) for key in changed if key in now}

    def _besides_groups(self, args: Mapping[str, Any]) -> Any:
        """What one that is made with these arguments holds beside its param groups."""
        members = {
            role: [
                (name, param) for name, param in self.params.items() if self.role_of[name] == role
            ]
            for role in self.roles
        }
        with self._guarded("when it is made"), settings_kept(), without_compiler():
            made = construct(replace(self.use, args=args), members, self.for_groups, self.called)
        tree = write(made, self.owner, self.label, {}).tree["root"]
        return {key: node for key, node in tree.items() if key not in ("param_groups", "defaults")}

    def digest(self) -> int:
        """A number of 48 bits that differs where a parameter or its state differs in a bit.

        One that shares its work out over ranks keeps another state on each, of which a checkpoint
        would hold the first rank's alone.
        """
        found = hashlib.sha256()
        for key, tensor in [*self.params.items(), *sorted(self.state().items())]:
            found.update(key.encode())
            found.update(as_bytes(tensor.detach()).cpu().numpy().tobytes())
        return int.from_bytes(found.digest()[:6])

    def __reduce_ex__(self, _: Any) -> Any:
        raise OptimError(
            f"{self.called} cannot be copied or pickled; make another one and give it the state "
            "with export_state() and import_state()"
        )
