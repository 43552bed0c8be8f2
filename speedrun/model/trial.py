"""A model with code of a user's own is tried on a few made-up tokens before anybody waits for it.

What is found out: code that fails, a stream of another shape or dtype, a loss that is no number,
parameters that get no gradient, and a look ahead. A module that lets a token see those after it
would win every race, for validation asks the model itself.

Nothing of the model is changed by it: weights, buffers, gradients and random numbers stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from speedrun.errors import ConfigError
from speedrun.model.backend import Backend
from speedrun.model.cache import Cache
from speedrun.model.gpt import GPT
from speedrun.model.parts import Part, telling
from speedrun.model.plan import AttentionPlan, LayerPlan, plan_layer
from speedrun.traces import outside_of, trace

TOKENS = 128  # of a row: a block of attention
LOGITS = 2**26  # at the most, of a row as long as those of training
DENSE = 4096  # tokens at the most of which a whole mask is made
ROWS = 2
NOISE = 0.05  # on the weights
SAME = 1e-3  # of the largest logit: what rounding explains


def try_out(model: GPT, backend: Backend, *, trains: bool) -> None:
    """Refuse what cannot work; `trains`: the loss and the backward pass too."""
    if not model.custom:
        return
    # FlexAttention would be compiled for it.
    backend = "dense" if backend == "flex" else backend
    ids_BT = _made_up(model)
    plan = _plan(backend, ids_BT)
    parts = [*model.custom.values()]
    names = {*model.state_dict()}
    with as_it_was(model), telling(parts, "on made-up tokens"):
        with ExitStack() as hooks:
            for place, part in model.custom.items():
                if place != "loss":
                    module = model.get_submodule(place)
                    hooks.callback(module.register_forward_hook(_checked(part, model)).remove)
            if trains:
                before = {name: one.clone() for name, one in model.named_buffers()}
                _try_training(model, ids_BT, plan)
                _refuse_counting_twice(model, before)
                _refuse_memory(model, ids_BT, plan)
            with torch.no_grad():
                model.eval()(ids_BT, plan)
        _refuse_late(model, names)
        if not model.blocks_are_ours:
            _stir(model)
            _refuse_chance(model, ids_BT, plan)
            _refuse_company(model, ids_BT, plan)
            # A row as in training, if it can be held: one may look ahead in long rows alone.
            most = max(TOKENS, LOGITS // model.vocab_size)
            row_BT = _made_up(model, 1, min(most, DENSE) if backend == "dense" else most)
            _refuse_look_ahead(model, row_BT, _plan(backend, row_BT))


def _made_up(model: GPT, rows: int = ROWS, tokens: int = TOKENS) -> Tensor:
    T = min(tokens, model.length)
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(0, model.vocab_size, (rows, T), generator=generator)
    return ids_BT.to(model.embedding.weight.device)


def _plan(backend: Backend, ids_BT: Tensor) -> AttentionPlan:
    documents_BT = torch.zeros_like(ids_BT, dtype=torch.int32)
    return AttentionPlan((plan_layer(backend, documents_BT, None),))


@contextmanager
def as_it_was(model: GPT) -> Iterator[None]:
    """Whatever is done inside, the model stays as it is."""
    training = model.training
    kept = {name: tensor.detach().clone() for name, tensor in _tensors(model)}
    device = model.embedding.weight.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        model.train(training)
        with torch.no_grad():
            for name, tensor in _tensors(model):
                if name in kept:
                    tensor.copy_(kept[name])
        for parameter in model.parameters():
            parameter.grad = None


def _tensors(model: GPT) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _checked(part: Part, model: GPT) -> Any:
    """A hook that compares what comes out of a module with what goes in."""
    pair = part.key != "custom.mlp"

    def check(_: nn.Module, given: tuple[Any, ...], found: Any) -> None:
        stream, values = found if pair and _is_pair(found) else (found, None)
        if pair and not _is_pair(found):
            raise ConfigError(
                f"{part} gives {_told(found)}, and must give two: the stream after it, and the "
                "attention's own values or None"
            )
        wanted = given[0]
        if _told(stream) != _told(wanted):
            raise ConfigError(
                f"{part} gives {_told(stream)} for {_told(wanted)}: the stream must come out with "
                "the shape and dtype it has"
            )
        if pair and model.config.value_residual and not isinstance(values, Tensor):
            raise ConfigError(
                f"{part} gives {_told(values)} as the attention's own values, which the other "
                "layers take up (model.value_residual): return them"
            )

    return check


def _is_pair(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 2


def _told(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a {str(found.dtype).removeprefix('torch.')} tensor of {tuple(found.shape)}"
    return f"a {type(found).__name__}"


def _refuse_counting_twice(model: GPT, before: Mapping[str, Tensor]) -> None:
    """What is computed again would change a buffer again."""
    if not model.recompute:
        return
    now = dict(model.named_buffers())
    changed = [name for name, one in before.items() if not torch.equal(one, now.get(name, one))]
    for place, part in model.custom.items():
        for name in changed:
            if place != "loss" and name.startswith(f"{place}."):
                raise ConfigError(
                    f"machine.recompute = true cannot be used with {part}: its forward pass "
                    f"changes {name}, and would do so twice a step; leave it out, or keep what "
                    "changes out of the forward pass"
                )


def _try_training(model: GPT, ids_BT: Tensor, plan: AttentionPlan) -> None:
    part = model.custom.get("loss")
    loss: Any = model.train()(ids_BT, plan, ids_BT.roll(-1, 1))
    if part is not None:
        if not isinstance(loss, Tensor) or loss.shape or not loss.requires_grad:
            raise ConfigError(
                f"{part} gives {_told(loss)}, and must give one number that depends on what it is "
                "given: a mean over the tokens, say"
            )
        if not torch.isfinite(loss):
            raise ConfigError(f"{part} gives {loss.item()} for made-up tokens: it must be finite")
    loss.backward()
    without = [
        name for name, one in model.named_parameters() if one.requires_grad and one.grad is None
    ]
    # Of experts one may get no token here; then others of its shape do.
    shapes = {(_place(name), one.shape) for name, one in model.named_parameters()
              if one.grad is not None}  # fmt: skip
    for name in without:
        if (_place(name), model.get_parameter(name).shape) not in shapes:
            who = next((p for place, p in model.custom.items() if name.startswith(f"{place}.")), "")
            told = who or " and ".join(dict.fromkeys(map(str, model.custom.values())))
            raise ConfigError(
                f"{told}: parameter {name} gets no gradient, so it would never be trained: use it "
                "in the forward, or set it to None"
            )


def _refuse_memory(model: GPT, ids_BT: Tensor, plan: AttentionPlan) -> None:
    """What changes from one pass to the next must be in checkpoints, or no run could be resumed.

    Something kept from the first pass, such as a mask, may stay: it is the same after the second.
    """
    before = _unsaved(model)
    model.train()(ids_BT, plan, ids_BT.roll(-1, 1))
    for (place, name), found in _unsaved(model).items():
        if before.get((place, name), found) != found:
            raise ConfigError(
                f"{model.custom[place]} changes {name} in every forward, which no checkpoint "
                "holds, so that a resumed run would differ: make it a tensor and keep it with "
                "register_buffer"
            )


def _unsaved(model: GPT) -> dict[tuple[str, str], str]:
    """By the place of a part and a name: a digest of what is neither weight nor buffer.

    That is what its modules hold beside these, and what its classes and Python files hold.
    """
    known = {*vars(nn.Module()), "part"}
    aside = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}
    found: dict[tuple[str, str], str] = {}
    for place, part in model.custom.items():
        for module_name, module in model.get_submodule(place).named_modules():
            held = {key: value for key, value in vars(module).items() if key not in known}
            lost = module._non_persistent_buffers_set
            held |= {name: buffer for name, buffer in module._buffers.items() if name in lost}
            for key, value in held.items():
                if not isinstance(value, nn.Module):
                    found[place, f"its {module_name}.{key}".replace(" .", " ")] = trace(
                        value, aside
                    )
        own = frozenset({str(getattr(part.made, "__module__", "")).partition(".")[0]})
        for name, value in outside_of(part.made, own).items():
            found[place, name] = trace(value, aside)
    return found


def _place(name: str) -> str:
    """The part of the model that a parameter belongs to, such as the MLP of a layer."""
    return ".".join(name.split(".")[:3])


def _refuse_late(model: GPT, before: set[str]) -> None:
    """A model that is made anew, to go on or to write text, must have the names that were saved."""
    for name in model.state_dict().keys() - before:
        parts = (part for place, part in model.custom.items() if name.startswith(f"{place}."))
        raise ConfigError(
            f"{next(parts, 'code of your own')} makes {name} in its first forward pass, where no "
            "checkpoint finds it again: make it in __init__"
        )


def _refuse_chance(model: GPT, ids_BT: Tensor, plan: AttentionPlan) -> None:
    """In eval mode the same tokens have the same logits: a loss of validation is no lottery."""
    with torch.no_grad():
        model.eval()
        one, other = (model(ids_BT, plan).float() for _ in range(2))
    if _differ(one, other):
        raise ConfigError(
            f"{_told_blocks(model)} gives the same tokens other logits the next time in eval mode, "
            "so that validation would be a matter of chance: draw random numbers (dropout) only "
            "while self.training is true, and keep no memory of earlier passes"
        )


def _refuse_company(model: GPT, ids_BT: Tensor, plan: AttentionPlan) -> None:
    """The logits of a text are its own, whatever else is in its batch."""
    other_BT = ids_BT.clone()
    other_BT[1:] = (other_BT[1:] + 1) % model.vocab_size
    with torch.no_grad():
        model.eval()
        one, other = (model(ids, plan)[:1].float() for ids in (ids_BT, other_BT))
    if _differ(one, other):
        raise ConfigError(
            f"{_told_blocks(model)} lets texts of a batch see each other: the logits of one change "
            "with the others, so that a validation would depend on what is validated beside; "
            "compute each row by itself"
        )


def _differ(one: Tensor, other: Tensor) -> bool:
    """By more than rounding explains."""
    return bool((one - other).abs().max() > SAME * one.abs().max().clamp(min=1e-6))


def _stir(model: GPT) -> None:
    """Noise on all weights, the same each time: many start at zero and hide what is behind them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * NOISE
            parameter.add_(noise.to(parameter))


def _told_blocks(model: GPT) -> str:
    """All code of users' own in the blocks, by name."""
    parts = (str(part) for place, part in model.custom.items() if place != "loss")
    return " and ".join(dict.fromkeys(parts))


def _refuse_look_ahead(model: GPT, ids_BT: Tensor, plan: AttentionPlan) -> None:
    """Logits of the first half must not follow from the tokens of the second."""
    half = ids_BT.size(1) // 2
    if half == 0:
        return
    other_BT = ids_BT.clone()
    other_BT[:, half:] = (other_BT[:, half:] + 1) % model.vocab_size
    with torch.no_grad():
        model.eval()
        one, other = (model(ids, plan)[:, :half].float() for ids in (ids_BT, other_BT))
    if _differ(one, other):
        raise ConfigError(
            f"{_told_blocks(model)} lets a token see those after it: logits of the first {half} "
            "tokens change with the tokens behind them, which would be no prediction; look back "
            "only"
        )


def follows_cache(model: GPT) -> bool:
    """Whether tokens one by one, with the key/value cache, have the logits of a whole pass.

    Ours do; of a module of a user's own it is tried, for it may look back in ways that the cache
    knows nothing of, or leave it aside.
    """
    if model.blocks_are_ours:
        return True
    T = min(16, model.length)
    ids_BT = _made_up(model)[:1, :T].cpu()
    sizes = model.config
    cache = Cache(sizes.layers, 1, sizes.groups, T, sizes.size_of_head)
    with as_it_was(model), torch.no_grad():
        whole: Tensor = model.eval()(ids_BT, _plan("dense", ids_BT))[0].float()
        at, rows = 0, []
        for count in (T // 2, *[1] * (T - T // 2)):
            if count:
                plan = _plan_last(at, count)
                try:
                    rows.append(model(ids_BT[:, at : at + count], plan, cache=cache)[0, -1].float())
                except Exception:  # whatever it is, the cache cannot be used
                    return False
                at += count
    each = torch.stack(rows[-(T - T // 2) :])
    same = SAME * float(whole.abs().max())
    return bool((each - whole[T // 2 :]).abs().max() <= same)


def _plan_last(before: int, queries: int) -> AttentionPlan:
    """The plan of some tokens that follow those in the cache, all of one document."""
    key_T = torch.arange(before + queries)
    mask_QT = key_T <= key_T[before:, None]
    starts = torch.zeros(1, queries, dtype=torch.bool)
    starts[0, 0] = before == 0
    return AttentionPlan((LayerPlan("dense", mask_QT[None, None], starts),))
