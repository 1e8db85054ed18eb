"""torch's GradScaler, which changes gradients without a trace: torch counts no version there."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch

_CALL = "scaler.unscale_(optimizer), or scaler.step(optimizer) without it,"


class Reducing(Protocol):
    """An optimizer whose gradients may be on their way."""

    def check_idle(self, call: str) -> None:
        """Raises InvalidUsage while they are."""


@functools.cache  # once in a process
def watch_scalers(kind: type[Reducing]) -> None:
    """From now on a GradScaler asks an optimizer of this `kind` whether it may change its gradients."""
    unscale = torch.amp.GradScaler.unscale_

    @functools.wraps(unscale)
    def unscale_(self: torch.amp.GradScaler, optimizer: Any) -> None:
        if isinstance(optimizer, kind) and self.is_enabled():
            optimizer.check_idle(_CALL)
        unscale(self, optimizer)

    torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]
