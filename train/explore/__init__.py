"""Views of a text and its experts, token by token, for `polyad explore` and for notebooks."""
