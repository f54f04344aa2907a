"""`python scripts/sweep.py [CONFIG] [OPTIONS]` is `rayfl sweep`: tune and compare. See --help."""

import sys

from rayfl.cli import main

if __name__ == "__main__":
    sys.argv[:1] = ["rayfl", "sweep"]
    main()
