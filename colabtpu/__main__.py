"""`python -m colabtpu VERB`: see colabtpu/cli.py."""

import sys

from colabtpu.cli import main

if __name__ == "__main__":
    sys.exit(main())
