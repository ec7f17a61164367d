"""Choice of the BLAS code path, which has to be made before torch is imported.

MKL picks kernels by thread count and memory alignment, so a row's float32 result depends on the batch it rides in.
A fixed code path (`MKL_CBWR`) removes that; see the invariance self-test in `invariance.py` for what remains.
"""

from __future__ import annotations

import os
import sys

MKL_CODE_PATH = "AVX2"


def pin_blas() -> None:
    """Sets `MKL_CBWR=AVX2` unless the operator has chosen a value. For launchers, before torch is imported.

    Raises:
        RuntimeError: torch was imported already, so the setting would come too late and be silently ignored.
    """
    if "MKL_CBWR" in os.environ:
        return
    if "torch" in sys.modules:
        raise RuntimeError("pin_blas() must run before torch is imported: MKL reads MKL_CBWR only once")
    os.environ["MKL_CBWR"] = MKL_CODE_PATH
