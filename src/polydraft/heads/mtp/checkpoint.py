"""A module for multi-token prediction on disk: as an EAGLE-3 head, but for what its layer reads."""

from polydraft.heads.eagle.checkpoint import EagleCheckpoint

__all__ = ["MtpCheckpoint"]


class MtpCheckpoint(EagleCheckpoint):
    """A module for multi-token prediction."""

    kind = "mtp"
    projects = True
