"""Commands that people type: `python -m scripts.NAME`."""

from data import ctrl_c

ctrl_c.hide_traceback()  # here, because a command's own imports take seconds
