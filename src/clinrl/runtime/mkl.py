"""The same matrix products on processors of every maker.

MKL, the BLAS in torch's builds for x86-64, asks who made the processor before it asks what the processor can do. Its
modes of equal results (`MKL_CBWR`) name levels of Intel's alone. On an AMD processor MKL ignores `AVX2` and takes
kernels that it holds for Zen, which sum in another order: the first gradient of a training differs in the last digits.
Those kernels need AVX2 and FMA, which Intel's have too, but no setting asks for them there. The one mode meant for all
makers, `COMPATIBLE`, does without AVX2 and trains half as fast.

MKL remembers each answer about the processor in a variable of its own. `take_zen_kernels` answers before MKL asks.
"""

import ctypes
import re
from pathlib import Path

_NOT_ASKED = -1
_ANSWERS = {"mkl_serv_intel_cpu_true": 0, "mkl_serv_cpuiszen": 1}
"""The functions of MKL that ask about the processor, and their answers on an AMD Zen."""
_READ = re.compile(rb"\x8b\x05(.{4})\x85\xc0", re.DOTALL)
"""`mov remembered(%rip), %eax; test %eax, %eax`: how each function checks whether it has a remembered answer."""
_PROLOGUE = 64
_GENERIC = 0
"""The result of `mkl_serv_cpu_detect` on a processor that is not Intel's."""


def take_zen_kernels(library: Path) -> bool:
    """Make the MKL in `library`, which is loaded, compute as on an AMD Zen; return whether it will. Idempotent.

    False if MKL has already computed in this process, or if the library holds no MKL of a known form; then nothing is
    changed. On an AMD Zen nothing changes either.
    """
    if not library.is_file():
        return False
    mkl = ctypes.CDLL(str(library))
    places = [place for name in _ANSWERS if (place := _remembered(mkl, name)) is not None]
    if len(places) < len(_ANSWERS):
        return False
    if all(place.value == _NOT_ASKED for place in places):
        for place, answer in zip(places, _ANSWERS.values(), strict=True):
            place.value = answer
    return all(getattr(mkl, name)() == answer for name, answer in _ANSWERS.items()) and (
        mkl.mkl_serv_cpu_detect() == _GENERIC and not mkl.mkl_serv_intel_cpu()
    )


def _remembered(mkl: ctypes.CDLL, name: str) -> ctypes.c_int | None:
    """The variable in which a function keeps its answer; None if the function is missing or has another form."""
    try:
        start = ctypes.cast(getattr(mkl, name), ctypes.c_void_p).value or 0
    except AttributeError:
        return None
    read = _READ.search(ctypes.string_at(start, _PROLOGUE))
    if read is None:
        return None
    return ctypes.c_int.from_address(start + read.end(1) + int.from_bytes(read[1], "little", signed=True))
