"""`python -m launch` is `polyad`."""

from launch.cli import main

main()
