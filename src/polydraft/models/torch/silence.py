"""transformers loads without a word: its progress bars and reports would stand between the lines of whoever uses this package."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_loading() -> Iterator[None]:
    """No progress bars and no reports of transformers while the block runs; what its reports tell, ours refuse or name."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    level = logging.get_verbosity()
    shows_bars = logging.is_progress_bar_enabled()
    hub_shows_none = are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows_bars:
            logging.enable_progress_bar()
        if hub_shows_none:
            disable_progress_bars()
