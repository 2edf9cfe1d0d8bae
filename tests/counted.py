"""The trainer's process, whose floating-point operations are counted: those of matrix products and of attention."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from clinrl.training import worker


class Counter(TorchDispatchMode):
    """As torch's FlopCounterMode, which also asks to which module an operation belongs; modules without inputs that
    have a gradient end it."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        found = func(*args, **named)
        if count := flop_registry.get(func.overloadpacket):
            self.total += count(*args, **named, out_val=found)
        return found


if __name__ == "__main__":
    with Counter() as counter:
        code = worker.main(sys.argv[1:])
    Path(f"counted-{os.environ.get('RANK', '0')}").write_text(str(counter.total))
    sys.exit(code)
