"""What hooks return."""

import torch


def completed(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that already has its value: for a hook that is done when it returns.

    Or that has queued its work, for a tensor on a device: waiting for the future waits for the stream that is current
    now.
    """
    devices: list[int | str | torch.device] | None = None if tensor.device.type == "cpu" else [tensor.device]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(tensor)
    return future
