"""Attention plans: which keys each query of a batch sees, in the form the backend reads.

A plan is made once per batch and used by all layers and the backward. The window is one tensor that
`set_window` changes in place, so a growing window changes data and compiled code never sees a new
constant.

Legend: B rows, T tokens, Q queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from speedrun.config.architecture import BLOCK
from speedrun.config.schedule import Settings
from speedrun.config.schema import Config
from speedrun.errors import ConfigError
from speedrun.model.backend import Backend, choose_backend
from speedrun.model.mask import WindowUnit, block_lists, dense_mask, document_starts, first_key


@dataclass(frozen=True)
class LayerPlan:
    """Which keys each query of one layer sees."""

    backend: Backend
    mask: Tensor | BlockMask  # blocks: first key (B, T); dense: booleans (B, 1, T, T)
    starts: Tensor  # (B, T) booleans: the first token of its row or document


@dataclass(frozen=True)
class AttentionPlan:
    """The plans of all layers for one batch; the layers take them in turn, today all the same."""

    layers: tuple[LayerPlan, ...]

    def for_layer(self, layer: int) -> LayerPlan:
        return self.layers[layer % len(self.layers)]

    @property
    def starts(self) -> Tensor:
        return self.layers[0].starts


def plan_layer(
    backend: Backend,
    documents_BT: Tensor,
    window: Tensor | None,
    unit: WindowUnit = "blocks",
    *,
    full_blocks: bool = True,
) -> LayerPlan:
    """One layer's plan, built in or out of compiled code; `window` is a 0-d integer tensor."""
    starts_BT = document_starts(documents_BT)
    if backend == "dense":
        return LayerPlan(backend, dense_mask(documents_BT, window, unit)[:, None], starts_BT)
    first_BT = first_key(documents_BT, window, unit)
    mask = first_BT if backend == "blocks" else flex_mask(first_BT, full_blocks=full_blocks)
    return LayerPlan(backend, mask, starts_BT)


def flex_mask(first_BT: Tensor, *, full_blocks: bool = True) -> BlockMask:
    """FlexAttention's mask from our block lists; only partial blocks look at single pairs."""

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
        return (k <= q) & (k >= first_BT[b, q])

    T = first_BT.shape[1]
    lists = block_lists(first_BT, full=full_blocks)
    partial_count, partial_index, full_count, full_index = (x[:, None] for x in lists)
    blocks = partial_count, partial_index, full_count, full_index
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(T, T))


class AttentionPlanner:
    """Makes plans for a config's documents and window; building one has no side effects."""

    def __init__(
        self, config: Config, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self._config, self._window_unit = config.attention, config.window_unit
        self.backend, self.reason = choose_backend(
            device,
            config.machine.attention,
            tokens=config.batch.length,
            dtype=dtype,
            rehearsal=config.machine.rehearsal,
        )
        self._full_blocks = config.machine.full_blocks
        if not self._full_blocks and self.backend != "flex":
            raise ConfigError(
                "machine.full_blocks = false cannot be used: only FlexAttention tells full blocks "
                f"from partial ones, and attention goes by {self.backend!r} here; leave it out, or "
                "set machine.device=rehearsal"
            )
        self.window: Tensor | None = None
        if config.attention.window != "none":
            self.window = torch.zeros((), dtype=torch.int32, device=device)
        self._window_known = self.window is None

    def apply_settings(self, settings: Settings) -> None:
        """Take over what is scheduled for the plans to come."""
        self.set_window(settings.window)

    def set_window(self, window: int | None) -> None:
        """The window of the plans to come, counted as attention.window says; None: no window."""
        assert (window is None) == (self.window is None), "a window, if the config has one"
        if self.window is not None and window is not None:
            self.window.fill_(window)
        self._window_known = True

    def widen(self, tokens: int) -> None:
        """Let queries see at least `tokens` tokens back, until the next `set_window`."""
        if self.window is not None:
            self.window.clamp_(min=-(-tokens // self._window_unit))

    def plan(self, documents_BT: Tensor) -> AttentionPlan:
        """For training and validation: every token is a query of its numbered document."""
        layer = plan_layer(
            self.backend,
            self._documents(documents_BT),
            self.window,
            self._config.window,
            full_blocks=self._full_blocks,
        )
        return AttentionPlan((layer,))

    def plan_last(self, documents_BT: Tensor, queries: int) -> AttentionPlan:
        """For sampling: only the last `queries` tokens are queries, all tokens so far are keys."""
        first_BQ1 = self.first_keys(documents_BT)[:, -queries:, None]
        T = documents_BT.size(1)
        key_T = torch.arange(T, device=documents_BT.device)
        query_Q1 = key_T[T - queries :, None]
        mask_BQT = (key_T >= first_BQ1) & (key_T <= query_Q1)
        starts_BQ = document_starts(self._documents(documents_BT))[:, -queries:]
        return AttentionPlan((LayerPlan("dense", mask_BQT[:, None], starts_BQ),))

    def first_keys(self, documents_BT: Tensor) -> Tensor:
        """The first key that each token sees, (B, T)."""
        return first_key(self._documents(documents_BT), self.window, self._config.window)

    @property
    def inside_documents(self) -> bool:
        """Whether tokens see those of their own document alone."""
        return self._config.documents

    def _documents(self, documents_BT: Tensor) -> Tensor:
        """Without attention.documents a row is one document."""
        assert self._window_known, "set_window comes before the first plan"
        return documents_BT if self._config.documents else torch.zeros_like(documents_BT)
