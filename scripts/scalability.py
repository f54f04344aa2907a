"""`python scripts/scalability.py [CONFIG] [OPTIONS]` is `rayfl scale`: seconds, memory and traffic. See --help."""

import sys

from rayfl.cli import main

if __name__ == "__main__":
    sys.argv[:1] = ["rayfl", "scale"]
    main()
