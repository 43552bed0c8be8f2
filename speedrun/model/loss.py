"""The loss, in one place: what training minimises, and what validation reports.

The two are the same today. They are apart because a recipe may train on more than it is judged by,
such as weighted losses for tokens further ahead; that belongs in `training_loss` alone. As a module
`Loss` may hold tensors that a schedule changes in place; they stay out of checkpoints if they are
buffers with persistent=False.

Shapes: B batch, T time, D width, V vocabulary.
"""

import torch
from torch import Tensor, nn

from speedrun.config.architecture import ModelConfig
from speedrun.config.schedule import Settings
from speedrun.model.products import head_loss, token_losses


class Loss(nn.Module):
    """Mean loss of a batch; `model.train()` and `model.eval()` choose which."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.softcap = config.softcap

    def apply_settings(self, settings: Settings) -> None:
        """Called before every step; no weight of the loss is scheduled so far."""

    def forward(self, x_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor) -> Tensor:
        """From the last norm's output and the head, since logits are never all in memory."""
        if self.training:
            return self.training_loss(x_BTD, head_VD, targets_BT)
        return self.validation_loss(x_BTD, head_VD, targets_BT)

    def training_loss(self, x_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor) -> Tensor:
        """What the gradient is taken of."""
        return head_loss(x_BTD, head_VD, targets_BT, self.softcap)

    def validation_loss(self, x_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor) -> Tensor:
        """Nats per token of the next token: comparable between recipes, whatever they train on."""
        return head_loss(x_BTD, head_VD, targets_BT, self.softcap)

    def of_each(self, x_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor) -> Tensor:
        """The validation loss token by token, (B, T); 0 at negative targets, which do not count."""
        counts_BT = targets_BT >= 0
        losses_BT = torch.zeros(targets_BT.shape, device=x_BTD.device)
        losses_BT[counts_BT] = token_losses(
            x_BTD[counts_BT], head_VD, targets_BT[counts_BT], self.softcap
        )
        return losses_BT
