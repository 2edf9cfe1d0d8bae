"""`clinrl serve` by the calendar of the year: `serve.py CALENDAR ...`, a file with the day, in days since 1970."""

import sys
from pathlib import Path

from clinrl.cli.main import main
from clinrl.watching import store

if __name__ == "__main__":
    calendar = Path(sys.argv[1])
    store.today = lambda: int(calendar.read_text(encoding="ascii"))
    sys.exit(main(["serve", *sys.argv[2:]]))
