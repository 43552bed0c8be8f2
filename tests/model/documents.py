"""Document numbers for tests of attention, as the loader gives them."""

from __future__ import annotations

import torch
from torch import Tensor

from speedrun.data.loader import document_ids


def documents_of(tokens_BT: Tensor, end_of_text: int) -> Tensor:
    return torch.from_numpy(document_ids(tokens_BT.numpy(), end_of_text))
