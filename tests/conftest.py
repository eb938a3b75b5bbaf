"""Every test runs on one thread, with the shapes in signatures checked."""

import torch

import shape_checks

torch.set_num_threads(1)
shape_checks.install()
