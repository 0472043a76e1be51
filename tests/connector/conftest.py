"""One thread for torch: tensors are small here, and threads that wait for one another take cores from other tests."""

from __future__ import annotations

import torch

from tests.store.conftest import nursery as nursery
from tests.store.conftest import start_store as start_store

torch.set_num_threads(1)
