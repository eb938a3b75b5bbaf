"""Every test runs on one thread, with the shapes in signatures checked; measured profiles stay out of the user's cache."""

import os
import tempfile

import torch

from polydraft.cli import first_start
from tests.support import shape_checks

torch.set_num_threads(1)
PROFILES = tempfile.TemporaryDirectory(prefix="polydraft-profiles-")  # gone at the end
os.environ["POLYDRAFT_CACHE"] = PROFILES.name
shape_checks.install()
first_start.ROOM = 1 << 60  # tests start no processes that compile
