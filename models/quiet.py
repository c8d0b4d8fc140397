"""Silence while transformers loads: no progress bars, notes or warnings on stdout or stderr."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from logging import CRITICAL


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers, the hub client and Python's warnings, and puts back the settings it found.

    For the calling process as a whole; not for use while another thread prints.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_verbosity, hub_bars = hub_logging.get_verbosity(), not are_progress_bars_disabled()
    logging.set_verbosity_error()
    hub_logging.set_verbosity(CRITICAL)  # its handler writes to the stderr it found on import
    logging.disable_progress_bar()
    if hub_bars:
        disable_progress_bars()
    sink = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
