"""The connector's settings: what stands in `ec_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from urllib.parse import unquote, urlsplit

from mmcache.errors import ConfigError
from mmcache.tiers import Tier, open_tier

__all__ = ["Settings", "open_stores"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the connector.

    Attributes:
        store: where encoded rows are kept beyond this engine's life: `file:///directory`, `redis://...`,
            `rediss://...` or `mooncake://host:port`; several are asked in their order. None: host memory only.
        memory_bytes: host memory (in /dev/shm) that the engine's scheduler and its workers share.
        store_bytes: budget of a `file://` directory; servers have budgets of their own. None: 16 GiB.
        salt: engines with other salts share nothing. None and "" differ.
        trust_client_ids: believe that an identifier names its content, whoever made it: needed for requests that carry
            ids without media, and saves hashing the processed tensors. Only where clients may not choose ids.
        fetch_seconds: how long a request may wait for a store. Then it is encoded.
        weights_id: names the weights where they are not local files that could be hashed (streamed, say).

    Raises:
        ConfigError: an unknown name, a wrong type, a value that cannot work.
    """

    store: tuple[str, ...] = ()
    memory_bytes: int = 1 << 30
    store_bytes: int | None = None
    salt: str | None = None
    trust_client_ids: bool = False
    fetch_seconds: float = 1.0
    weights_id: str | None = None

    @classmethod
    def from_mapping(cls, given: Mapping[str, object]) -> Settings:
        """Settings from `ec_connector_extra_config`."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ConfigError("unknown setting", field=unknown[0], expected="one of " + ", ".join(sorted(known)))
        values = dict(given)
        store = values.pop("store", None)
        if store is None:
            stores: tuple[str, ...] = ()
        elif isinstance(store, str):
            stores = (store,)
        elif isinstance(store, list | tuple) and all(isinstance(url, str) for url in store):
            stores = tuple(store)
        else:
            raise ConfigError("must be a URL or a list of them", field="store", found=repr(store))
        return cls(store=stores, **values)  # type: ignore[arg-type]  # __post_init__ checks them

    def __post_init__(self) -> None:
        for url in self.store:
            _check_url(url)
        for name, low in (("memory_bytes", 1 << 16), ("store_bytes", 1)):
            number = getattr(self, name)
            if number is None and name == "store_bytes":
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < low:
                raise ConfigError("must be a number of bytes", field=name, found=repr(number), expected=f">= {low}")
        seconds = self.fetch_seconds
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= 60:
            raise ConfigError("must be seconds", field="fetch_seconds", found=repr(seconds), expected="0 < s <= 60")
        if not isinstance(self.trust_client_ids, bool):
            raise ConfigError("must be true or false", field="trust_client_ids", found=repr(self.trust_client_ids))
        for name in ("salt", "weights_id"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise ConfigError("must be text", field=name, found=repr(text))


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
            raise ConfigError("not a local directory", field="store", found=repr(url), expected="file:///directory")
    elif parts.scheme not in ("redis", "rediss", "mooncake"):
        raise ConfigError(
            "unknown kind of store",
            field="store",
            found=repr(url),
            expected="file:///directory, redis://, rediss:// or mooncake://host:port",
        )


def open_stores(settings: Settings) -> list[Tier]:
    """The tiers of the settings' stores, in their order. A store that is down is no error here.

    Raises:
        ConfigError: a package is missing, an address cannot be read.
    """
    tiers: list[Tier] = []
    for url in settings.store:
        # Ids that clients made are no digests: whoever trusts them trusts all who can write to the store
        if url.startswith("file://"):
            capacity = settings.store_bytes if settings.store_bytes is not None else 16 << 30
            location = unquote(urlsplit(url).path)
            tiers.append(open_tier(location, capacity_bytes=capacity, one_trust_domain=settings.trust_client_ids))
        else:
            tiers.append(open_tier(url, one_trust_domain=settings.trust_client_ids))
    if len({tier.name for tier in tiers}) != len(tiers):
        raise ConfigError("two stores of one kind", field="store", found=", ".join(settings.store))
    return tiers
