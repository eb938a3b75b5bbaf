"""What transformers says while it loads belongs neither in the text nor in the statistics."""

__all__ = ["quiet"]


def quiet() -> None:
    """No progress bars and no advice of transformers from now on; its errors still show."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
