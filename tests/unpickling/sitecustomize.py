"""Python runs this when it starts, if the folder is on PYTHONPATH: it writes down every class that a pickle names."""

import os
import sys


def _listen(log: str) -> None:
    def write(line: str) -> None:
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def heard(event: str, words: tuple[object, ...]) -> None:
        if event == "pickle.find_class":
            write(f"{words[0]} {words[1]}\n")

    write("listening\n")
    sys.addaudithook(heard)


if "CLINRL_UNPICKLED" in os.environ:
    _listen(os.environ["CLINRL_UNPICKLED"])
