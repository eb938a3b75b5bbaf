"""exp for compiled loops over vocabulary rows, in vector registers."""

import numpy as np
from numba import njit

__all__ = ["exp"]

_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUNDING = np.float32(1.5 * 2**23)
_EXP = tuple(np.float32(1 / d) for d in (1, 2, 6, 24, 120, 720, 5040))


@njit(fastmath={"contract"}, forceinline=True, error_model="numpy")
def exp(x):
    """exp of a float32 within 2 ulp between -87 and 88, constant beyond; it calls nothing, so that loops over it are vectorised."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    shifted = x * _LOG2_E + _ROUNDING
    k = shifted - _ROUNDING
    r = x - k * _LN2_HIGH
    r = r - k * _LN2_LOW
    p = _EXP[6]
    p = p * r + _EXP[5]
    p = p * r + _EXP[4]
    p = p * r + _EXP[3]
    p = p * r + _EXP[2]
    p = p * r + _EXP[1]
    p = p * r + _EXP[0]
    p = p * r + np.float32(1.0)
    power = (np.int32(k) + np.int32(127)) << np.int32(23)
    return p * np.int32(power).view(np.float32)
