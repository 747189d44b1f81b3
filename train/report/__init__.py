"""`polyad report`: one self-contained HTML page about a run; see `command.py`."""
