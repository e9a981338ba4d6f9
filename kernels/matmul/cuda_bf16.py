"""Matrix products on a GPU's tensor cores, with a and b rounded to BF16: cuda_tensor.py. Sums are float32."""

from __future__ import annotations

from .cuda import batched as batched  # in float32
from .cuda import batched_scratch as batched_scratch
from .cuda import nn_scratch as nn_scratch
from .cuda import nt_scratch as nt_scratch
from .cuda import tn_scratch as tn_scratch
from .cuda_tensor import forms
from .reference import __all__ as __all__

nn, nt, tn = forms(bf16=True)
