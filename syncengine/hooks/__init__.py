"""Communication hooks that need no ``torch.distributed``: they go over syncengine's own communicator.

``model.register_comm_hook(None, syncengine.hooks.fp16_compress)``
"""

from syncengine.hooks.compress import Compress, bf16_compress, completed, fp16_compress

__all__ = ["Compress", "bf16_compress", "completed", "fp16_compress"]
