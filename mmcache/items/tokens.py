"""Token ids of whatever kind, as one int32 array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from mmcache.errors import RequestError, UnsupportedError

__all__ = ["Int32Array", "TokenIds", "as_tokens"]

TokenIds: TypeAlias = "Sequence[int] | np.ndarray[Any, Any] | Tensor | memoryview"
Int32Array: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"

_INT32 = np.iinfo(np.int32)
_DTYPE = np.dtype(np.int32)  # compared with a type, a dtype makes one of it each time


def as_tokens(token_ids: TokenIds, request_id: str) -> Int32Array:
    """The ids as one int32 array; a view of an int32 buffer, a conversion of anything else that holds integers."""
    if type(token_ids) is np.ndarray and token_ids.dtype == _DTYPE and token_ids.ndim == 1:
        return token_ids
    if isinstance(token_ids, Tensor):
        if token_ids.is_floating_point() and token_ids.dim() >= 2:
            raise UnsupportedError("prompt embeddings are out of scope", request_id=request_id, expected="token ids")
        token_ids = token_ids.detach().cpu()
    try:
        array = token_ids.numpy() if isinstance(token_ids, Tensor) else np.asarray(token_ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError("token ids are a sequence of integers", request_id=request_id, found=str(error)) from None
    if array.size == 0 and array.ndim <= 1:
        return np.empty(0, np.int32)
    if array.ndim >= 2 and array.dtype.kind == "f":
        raise UnsupportedError("prompt embeddings are out of scope", request_id=request_id, expected="token ids")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RequestError(
            "token ids are one-dimensional integers",
            request_id=request_id,
            found=f"dtype {array.dtype}, shape {array.shape}",
        )
    if array.dtype != np.int32:
        if array.min() < _INT32.min or array.max() > _INT32.max:
            raise RequestError("token ids fit 32 bits", request_id=request_id, found=f"{array.min()} to {array.max()}")
        array = array.astype(np.int32)
    return array
