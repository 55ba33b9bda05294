"""The training loop and what it needs. Read `loop.py` first; `settings.py` lists every knob."""
