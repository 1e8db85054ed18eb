"""What hooks return."""

import torch


def completed(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that has its value already: for a hook that is done when it returns."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
