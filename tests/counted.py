"""The trainer's process, whose floating-point operations are counted: of matrix products and attention, by torch."""

import os
import sys
from pathlib import Path

from torch.utils.flop_counter import FlopCounterMode

from clinrl.training import worker

if __name__ == "__main__":
    with FlopCounterMode(display=False) as counter:
        code = worker.main(sys.argv[1:])
    Path(f"counted-{os.environ.get('RANK', '0')}").write_text(str(counter.get_total_flops()))
    sys.exit(code)
