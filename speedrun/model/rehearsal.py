"""What a CPU needs to go through the motions of a GPU: no kernel of one runs, but all that leads to
them does, in the GPU's numbers."""

from __future__ import annotations

import os

import torch
from torch.nn.attention import flex_attention

from speedrun.errors import ConfigError
from speedrun.hardware import probe_bf16
from speedrun.model import native


def stand_in_for_a_gpu() -> None:
    """Let this process multiply in bf16 and differentiate FlexAttention, whatever its CPU, and
    compute in torch code alone, as on a GPU.

    oneDNN's bf16 products are illegal instructions on some machines, so there torch's own loops
    do them. FlexAttention refuses gradients on a CPU because it has no fast kernel for them, while
    its formula has them.
    """
    os.environ[native.SWITCH] = "0"
    native.load.cache_clear()
    if probe_bf16().flops is None:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    if not hasattr(flex_attention, "_validate_device"):
        raise ConfigError(
            f"torch {torch.__version__} does not refuse gradients of FlexAttention on a CPU where "
            "2.13 does, so it is not known how to lift that: rehearse with torch==2.13.*"
        )
    flex_attention._validate_device = _any_device  # type: ignore[assignment]


def _any_device(*_: torch.Tensor) -> None:
    """In the place of FlexAttention's check."""
