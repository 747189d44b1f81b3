"""Text, from sources to token ids."""
