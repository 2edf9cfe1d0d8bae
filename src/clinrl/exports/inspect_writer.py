"""Write a log with the classes of inspect_ai: a program for the Python that has inspect_ai, which need not have clinrl.

Standard input holds the log as JSON; the first argument is the file. Entries of the zip archive get the earliest date
that the format allows, not the current time, so that equal logs have equal bytes.
"""

import os
import sys
from zipfile import ZipFile, ZipInfo


def main(target: str) -> None:
    """Validate the log, write it, and read it back."""
    from inspect_ai.log import EvalLog, read_eval_log, write_eval_log

    partial = f"{target}.partial.eval"
    try:
        write_eval_log(EvalLog.model_validate_json(sys.stdin.buffer.read()), partial, format="eval")
        with ZipFile(partial) as made, ZipFile(f"{partial}.dated", "w") as dated:
            for one in made.infolist():
                entry = ZipInfo(one.filename)
                entry.compress_type = one.compress_type
                dated.writestr(entry, made.read(one))
        os.replace(f"{partial}.dated", partial)
        read_eval_log(partial)
        os.replace(partial, target)
    finally:
        for left in (partial, f"{partial}.dated"):
            if os.path.exists(left):
                os.remove(left)


if __name__ == "__main__":
    main(sys.argv[1])
