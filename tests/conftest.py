"""Every test runs on one thread, with the shapes in signatures checked, and Triton kernels run in Triton's interpreter."""

import os

import torch

import shape_checks

torch.set_num_threads(1)
os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, which is later
shape_checks.install()
