from mmcache.native import Scatter

VERSION: int
ROUNDS: int

def copy(to: int, start: int, nbytes: int, /) -> None: ...

scatter: Scatter
scatter_rounded: Scatter
