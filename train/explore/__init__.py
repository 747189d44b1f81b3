"""A text and its experts, token by token: for the page of `polyad explore`, and for notebooks."""
