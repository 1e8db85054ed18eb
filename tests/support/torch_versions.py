"""For tests that compare with what older releases of torch lack: with those, the rest of the suite passes."""

import pytest
import torch
from torch.torch_version import TorchVersion

IS_SINCE_2_13 = TorchVersion(torch.__version__) >= "2.13"
since_2_13 = pytest.mark.skipif(not IS_SINCE_2_13, reason=f"compares with torch 2.13; this one is {torch.__version__}")
