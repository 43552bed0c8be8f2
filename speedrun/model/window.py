"""Who may see whom at a given step: documents, and a window that grows over the run.

The window lives in one tensor that is changed in place, so compiled code never sees a new constant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speedrun.config.schema import BLOCK, TOKEN_UNIT, Config
from speedrun.model.attention import AttentionPlan, choose_backend, opening, plan_attention
from speedrun.model.mask import WindowRule, first_key
from speedrun.optim.schedules import window_blocks, window_tokens


def window_at(config: Config, step: int) -> int | None:
    """The window at a step, in tokens or blocks as the config counts it; None: no window."""
    attention = config.attention
    if attention.window == "none":
        return None
    counts_blocks = attention.window == "blocks"
    unit = BLOCK if counts_blocks else TOKEN_UNIT
    start, end = max(attention.window_start, unit), max(attention.window_end, unit)
    if counts_blocks:
        return window_blocks(step, config.steps, start=start, end=end)
    return window_tokens(step, config.steps, start=start, end=end, unit=unit)


def window_rule(config: Config) -> WindowRule:
    """How the window is counted; without one it makes no difference."""
    return "blocks" if config.attention.window == "none" else config.attention.window


class Attention:
    """Plans for batches, at the step set last."""

    def __init__(
        self, config: Config, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self._config = config
        self.backend, self.reason = choose_backend(
            device,
            config.attention.backend,
            tokens=config.batch.length,
            head_dim=config.model.size_of_head,
            dtype=dtype,
        )
        first = window_at(config, 0)
        self.window = None if first is None else torch.tensor(first, device=device).int()

    def set_step(self, step: int) -> None:
        if self.window is not None:
            self.window.fill_(window_at(self._config, step) or 0)

    def widen(self, tokens: int) -> None:
        """Let queries see `tokens` back until the next `set_step`, if that is further."""
        if self.window is not None:
            unit = BLOCK if self.rule == "blocks" else 1
            self.window.clamp_(min=-(-tokens // unit))

    def plan(self, documents_BT: Tensor) -> AttentionPlan:
        if not self._config.attention.documents:
            documents_BT = torch.zeros_like(documents_BT)
        return plan_attention(self.backend, documents_BT, self.window, self.rule)

    @property
    def rule(self) -> WindowRule:
        return window_rule(self._config)

    def plan_last(self, documents_BT: Tensor, queries: int) -> AttentionPlan:
        """For sampling: the last `queries` tokens look at all keys so far, under the same rules."""
        first_BT = first_key(documents_BT, self.window, self.rule)[:, -queries:, None]
        T = documents_BT.size(1)
        key_T = torch.arange(T, device=documents_BT.device)
        query_T1 = torch.arange(T - queries, T, device=documents_BT.device)[:, None]
        mask_BQT = (key_T >= first_BT) & (key_T <= query_T1)
        return AttentionPlan("dense", mask_BQT[:, None], opening(documents_BT)[:, -queries:])
