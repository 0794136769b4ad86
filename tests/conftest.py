"""Settings of every test: exact fp32, and one torch thread a worker (pytest-xdist runs a worker a core)."""

import torch

torch.set_num_threads(1)
torch.set_float32_matmul_precision("highest")
