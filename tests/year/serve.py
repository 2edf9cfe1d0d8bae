"""`clinrl serve` by the calendar of the year: `serve.py CALENDAR ...`, a file with the day, in days since 1970.

Counts are written down however few they are, and none is made while a file `UNCOUNTED` lies beside the calendar. So
what the watch sees depends on the traffic alone, and not on the speed of the machine. They are written down sooner than
elsewhere, since the year waits for them every week.
"""

import sys
from pathlib import Path
from typing import Any

from clinrl.cli.main import main
from clinrl.serving import server, watch
from clinrl.watching import store

UNCOUNTED = "uncounted"


class Watch(watch.Watch):
    """Counts of this server."""

    calendar: Path

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings, least=0)

    def answered(self, *answer: Any) -> None:
        """Queue an answer for counting, unless nothing is counted."""
        if not self.calendar.with_name(UNCOUNTED).exists():
            super().answered(*answer)


if __name__ == "__main__":
    watch.FLUSH_S = 0.5
    Watch.calendar = calendar = Path(sys.argv[1])
    server.Watch = Watch  # type: ignore[misc]
    store.today = lambda: int(calendar.read_text(encoding="ascii"))
    sys.exit(main(["serve", *sys.argv[2:]]))
