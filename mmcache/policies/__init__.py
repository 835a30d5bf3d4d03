"""Which entry to evict next.

Only candidates are ordered: an entry that gets pinned leaves (`pin`, `remove`) and comes back when its last pin goes
(`unpin`, `add`), so that pinned entries cost an eviction nothing. A policy is not thread-safe; its owner calls it under
its own lock.
"""

from mmcache.errors import ConfigError
from mmcache.policies.gdsf import GdsfPolicy
from mmcache.policies.lru import LruPolicy
from mmcache.policies.protocol import EvictionPolicy
from mmcache.policies.queue_aware import QueueAwarePolicy

__all__ = ["EvictionPolicy", "GdsfPolicy", "LruPolicy", "QueueAwarePolicy", "as_policy", "make_policy"]

_POLICIES: dict[str, type[LruPolicy] | type[GdsfPolicy]] = {
    "lru": LruPolicy,
    "gdsf": GdsfPolicy,
    "queue-aware": QueueAwarePolicy,
}
_METHODS = ("add", "touch", "remove", "pin", "unpin", "victim")


def make_policy(name: str) -> EvictionPolicy:
    """A new policy: "lru", "gdsf" or "queue-aware".

    Raises:
        ConfigError: there is no policy of that name.
    """
    policy = _POLICIES.get(name) if isinstance(name, str) else None
    if policy is None:
        raise ConfigError("unknown eviction policy", expected=" or ".join(_POLICIES), found=repr(name))
    return policy()


def as_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A new policy of that name, or the policy itself.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(policy, str):
        return make_policy(policy)
    if isinstance(policy, type) or not all(callable(getattr(policy, method, None)) for method in _METHODS):
        raise ConfigError("a policy is a name or an EvictionPolicy", field="policy", found=repr(policy))
    return policy
