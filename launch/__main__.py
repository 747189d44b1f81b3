"""`python -m polyad.launch` is `polyad`."""

from polyad.launch.cli import main

main()
