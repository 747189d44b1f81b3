"""What each command of `polyad` does: it calls the room that does the work.

Nothing heavy is imported before a handler runs.
"""
