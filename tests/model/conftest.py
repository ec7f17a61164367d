"""The bits of float32 products hold on a fixed BLAS path, which MKL reads at its first product."""

import os

os.environ.setdefault("MKL_CBWR", "AVX2")
