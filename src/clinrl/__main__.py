"""`python -m clinrl` is `clinrl` with the interpreter that runs it."""

import sys

from clinrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
