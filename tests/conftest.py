"""Every test runs on one thread, with the shapes in signatures checked, and keeps measured profiles out of the user's cache."""

import os
import tempfile

import torch

import shape_checks

torch.set_num_threads(1)
os.environ["POLYDRAFT_CACHE"] = tempfile.mkdtemp(prefix="polydraft-profiles-")
shape_checks.install()
