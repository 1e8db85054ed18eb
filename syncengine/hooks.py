"""Communication hooks that need no ``torch.distributed``: gradients that are averaged in 16 bits.

``model.register_comm_hook(None, syncengine.hooks.fp16_compress)``
"""

import torch
import torch.distributed as dist

from syncengine._C import Communicator
from syncengine.communicator import default_communicator

__all__ = ["Compress", "bf16_compress", "completed", "fp16_compress"]


def completed(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future that already has its value, for a hook that is done when it returns.

    A hook on a device is done when it has queued its work: waiting for the future waits for the stream that is current
    now.
    """
    devices: list[int | str | torch.device] | None = None if tensor.device.type == "cpu" else [tensor.device]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(tensor)
    return future


class Compress:
    """Casts each bucket to ``dtype``, averages it, and casts it back: half the bytes, fewer digits.

    Each contribution is divided by the number of ranks in ``dtype``, as torch's compressing hooks do; without
    ``divides_first`` their sum is divided. The engine does the work of a hook that is registered with a ``Parallel``,
    without calling back into Python. A hook that is called from elsewhere blocks, over the communicator that is given
    as ``state``, or the default one.
    """

    def __init__(self, name: str, dtype: torch.dtype, divides_first: bool = True) -> None:
        self.__name__ = self.__qualname__ = name
        self.dtype = dtype
        self.divides_first = divides_first

    def __call__(self, state: Communicator | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Averages one bucket, and blocks until that is done."""
        communicator = default_communicator() if state is None else state
        buffer = bucket.buffer()
        compressed = buffer.to(self.dtype)
        if self.divides_first:
            compressed.div_(communicator.size)
        communicator.all_reduce(compressed, "sum" if self.divides_first else "avg")
        return completed(buffer.copy_(compressed))

    def __repr__(self) -> str:
        return f"syncengine.hooks.{self.__name__}"


fp16_compress = Compress("fp16_compress", torch.float16)
bf16_compress = Compress("bf16_compress", torch.bfloat16)
