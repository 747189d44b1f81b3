"""`python -m polyad`: the command `polyad`."""

from polyad.launch.__main__ import main

if __name__ == "__main__":
    main()
