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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedrun.optim.errors import OptimError
from speedrun.optim.foreign.make import Members, Use, construct, for_groups, gist
from speedrun.optim.foreign.outside import Streams, settings_kept, without_compiler
from speedrun.optim.foreign.tree import KEPT, Owner, Written, tensor_keys, write
from speedrun.optim.foreign.untree import read

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
        self._streams = Streams.seeded(seed) if use.random else None
        self._marked = {name: set(vars(param)) for name, param in self.params.items()}
        self._kept: dict[str, Tensor] | None = None  # its state in training, while in eval mode
        # Some set what holds for the whole process, such as the precision of products.
        with self._guarded("when it is made"), settings_kept(), without_compiler():
            self.for_groups = for_groups(use, members)
            self.optimizer: Optimizer = construct(
                use, members, self.for_groups, self.called, recorded=recorded
            )
        self.owner = Owner.of(self.optimizer, self.params, self.called)
        self.rates = [_rate(group.get("lr")) for group in self.optimizer.param_groups]
        self.has_modes = all(callable(getattr(self.optimizer, m, None)) for m in ("train", "eval"))
        self._fixed: dict[str, Any] = {}
        tree = self.written().tree["root"]
        self._fixed = {k: v for k, v in vars(self.optimizer).items() if tree[k] == KEPT}
        self._call("train")

    # Learning rates.

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
            except Exception as error:
                raise self._explained(error) from error
        for other, kept in zip(others, before, strict=True):
            if not same_bits(other.detach(), kept):
                raise OptimError(
                    f"{self.called} changed a parameter of shape {tuple(other.shape)} that was not "
                    "given to it; an optimizer may change its own parameters only"
                )

    def _explained(self, error: Exception) -> OptimError:
        text = str(error)
        if "closure" in text:
            return OptimError(
                f"{self.called} needs a closure: it evaluates the loss several times in a step, "
                f"and a step here has one forward and one backward pass ({gist(error)})"
            )
        if any(word in text for word in GRAPH_WORDS):
            return OptimError(
                f"{self.called} needs a second backward pass through the gradient (create_graph), "
                f"and a step here has one ({gist(error)})"
            )
        return OptimError(f"{self.called} failed in step(): {gist(error)}")

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

        Going to eval mode and back rounds, so what was there before is put back.
        """
        if not self.has_modes or self._kept is not None:
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
                raise OptimError(f"{self.called} failed in {mode}(): {gist(error)}") from error

    # State.

    @property
    def tree_key(self) -> str:
        return f"{self.label}:tree"

    def written(self) -> Written:
        """Live tensors, and the tree that says what they are."""
        beside: dict[str, Any] = {"marks": self._marks(), "args": self._args()}
        if self._streams is not None:
            beside["streams"] = self._streams.plain()
        if self.has_modes:
            beside["weights"] = {n: param.detach().clone() for n, param in self.params.items()}
        with self._saving():
            written = write(self.optimizer, self.owner, self.label, beside)
        for name, node in written.tree["root"].items():
            value, first = vars(self.optimizer).get(name), self._fixed.get(name)
            if node == KEPT and first is not None and first is not value:
                raise self.owner.refuse(name, f"a {type(value).__name__} that was exchanged")
        return written

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """What it holds may have a mind of its own about being looked at, or made anew."""
        try:
            yield
        except OptimError:
            raise
        except Exception as error:
            raise OptimError(f"{self.called} cannot be saved exactly: {gist(error)}") from error

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
        text = bytearray(json.dumps(written.tree, allow_nan=False).encode())
        return {**written.tensors, self.tree_key: torch.frombuffer(text, dtype=torch.uint8)}

    def state_bytes(self) -> dict[str, int] | None:
        """Bytes of state by parameter name, '' for what is no parameter's; None before a step.

        What one has is not declared anywhere: it shows when it has been made.
        """
        if not self.optimizer.state:
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

        return load

    def _args(self) -> str:
        """As a recipe has them; a caller in Python may give others, by what they look like."""
        return json.dumps(dict(self.use.args), default=repr)

    def _set_anew(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that are others than when the state was saved, as a forced resume may set."""
        now = json.loads(self._args())
        changed = {key for key in {**before, **now} if before.get(key) != now.get(key)}
        groups = self.optimizer.param_groups
        for key in changed - {"lr"}:
            if key not in now or any(key not in group for group in groups):
                raise OptimError(
                    f"the argument {key} of {self.called} cannot be changed in a run: it is no "
                    "option of its param groups; begin a new run, or set it back"
                )
        # The rate is set before every step, by the schedule or as it is.
        return {key: copy.deepcopy(groups[0][key]) for key in changed if key in now}

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


def _rate(lr: Any) -> float | None:
    if isinstance(lr, Tensor):
        return float(lr) if lr.numel() == 1 else None
    return float(lr) if isinstance(lr, int | float) else None


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Also where both hold the same NaN."""
    alike = (left.dtype, left.shape) == (right.dtype, right.shape)
    return alike and torch.equal(as_bytes(left), as_bytes(right))
