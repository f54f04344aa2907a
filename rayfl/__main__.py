"""`python -m rayfl` is `rayfl`."""

from rayfl.cli import main

if __name__ == "__main__":
    main()
