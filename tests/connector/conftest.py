"""One thread for torch: tensors are small here, and threads that wait for one another take cores from other tests."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
