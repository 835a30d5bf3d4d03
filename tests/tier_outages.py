"""Traffic through a store while its tier goes and comes."""

import threading
import time

from tier_helpers import rows_of, same_bits, until


def outage(store, breaks, mends, seconds=30.0):
    """Look-ups before, during and after an outage: never an error, never wrong rows; the tier comes back by itself."""
    keys = [store.key(f"k{n}", "image") for n in range(12)]
    for key in keys[:4]:
        store.put(key, rows_of(key.identifier))
    assert store.flush(20)
    assert len(store.fetch(keys)) == 4
    breaks()
    for key in keys:
        store.put(key, rows_of(key.identifier))
        for found, rows in store.fetch([key]).items():
            assert same_bits(rows, rows_of(found.identifier))
    mends()

    def works():
        store.put(keys[11], rows_of("k11"))
        return store.flush(5) and store.stats().tiers[0].closed and store.fetch([keys[11]])

    until(works, seconds)
    for found, rows in store.fetch(keys).items():
        assert same_bits(rows, rows_of(found.identifier))


def traffic_while(store, events):
    """Puts and look-ups from several threads while things happen: never an error, never wrong rows, never no end."""
    stop = threading.Event()
    wrong, failed = [], []
    longest = [0.0]

    def work(number):
        step = 0
        while not stop.is_set():
            step += 1
            names = [f"w{(number * 5 + step + i) % 30}" for i in range(4)]
            try:
                for name in names:
                    store.put(store.key(name, "image"), rows_of(name, 64, 256))
                start = time.monotonic()
                found = store.fetch([store.key(name, "image") for name in names])
                longest[0] = max(longest[0], time.monotonic() - start)
                wrong.extend(
                    key for key, rows in found.items() if not same_bits(rows, rows_of(key.identifier, 64, 256))
                )
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for event in events:
        time.sleep(0.15)
        event()
    stop.set()
    for thread in threads:
        thread.join()
    assert (wrong, failed) == ([], [])
    assert longest[0] < 10  # many deadlines: not a speed, but an end
    stats = store.stats()
    assert stats.lookups == stats.queue_hits + sum(tier.hits for tier in stats.tiers) + stats.misses
