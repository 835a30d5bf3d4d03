"""Ids that clients give: names for content, bound to what they were first seen with."""

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mmcache import ConfigError, ContentConflictError, MMCacheError, Namespace, RequestError, UnknownClientIdError
from mmcache.hashing import ContentHasher, ImageSource
from mmcache.identity import ClientIds

H = ContentHasher()
A, B, C = (H.digest(content) for content in (b"a", b"b", b"c"))


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_an_id_stands_for_the_content_it_was_first_seen_with():
    ids = ClientIds("model")
    assert ids.resolve(["u"], [A]) == [A]
    assert ids.resolve(["u"], [None]) == [A]
    assert ids.resolve(["u"], [A]) == [A]
    assert len(ids) == 1


def test_slots_stay_aligned():
    ids = ClientIds("model")
    ids.resolve(["a", "b"], [A, B])
    assert ids.resolve([None, "b", "a", None, "c", "b"], [C, None, A, A, C, None]) == [C, B, A, A, C, B]
    assert ids.resolve([], []) == []


def test_an_id_that_comes_with_and_without_content_in_one_request_is_known():
    assert ClientIds("model").resolve(["u", "u", "u"], [None, A, None]) == [A, A, A]


def test_other_content_under_a_known_id_is_a_conflict():
    ids = ClientIds("model")
    ids.resolve(["u"], [A])
    with pytest.raises(ContentConflictError) as caught:
        ids.resolve([None, "v", "u"], [C, C, B], request_id="r1")
    assert (caught.value.request_id, caught.value.item) == ("r1", 2)
    assert (caught.value.found, caught.value.expected) == (B, A)
    assert "'u'" in str(caught.value)
    # nothing changed, and other requests go on
    assert ids.resolve(["u"], [None]) == [A]
    assert ids.conflicts == 1
    with pytest.raises(UnknownClientIdError):
        ids.resolve(["v"], [None])


def test_a_conflict_can_replace_instead():
    ids = ClientIds("model", on_conflict="replace")
    ids.resolve(["u"], [A])
    assert ids.resolve(["u"], [B]) == [B]
    assert ids.resolve(["u"], [None]) == [B]
    assert ids.conflicts == 1


@pytest.mark.parametrize("on_conflict", ["error", "replace"])
def test_two_contents_under_one_id_in_one_request_are_a_conflict(on_conflict):
    ids = ClientIds("model", on_conflict=on_conflict)
    with pytest.raises(ContentConflictError) as caught:
        ids.resolve(["u", "u"], [A, B], request_id="r")
    assert caught.value.item == 1
    assert len(ids) == 0


def test_unknown_ids_are_listed_in_one_error():
    ids = ClientIds("model")
    ids.resolve(["known"], [A])
    with pytest.raises(UnknownClientIdError) as caught:
        ids.resolve(["x", "known", "y", "x", None, "new"], [None, None, None, None, B, C], request_id="r7")
    assert caught.value.ids == ("x", "y")
    assert caught.value.items == (0, 2, 3)
    assert caught.value.request_id == "r7"
    assert isinstance(caught.value, MMCacheError)
    assert ids.unknown == 3
    # one round later all is known
    assert ids.resolve(["x", "known", "y", "x", None, "new"], [A, None, B, None, B, C]) == [A, A, B, A, B, C]


def test_tenants_and_namespaces_never_meet():
    ids = ClientIds("model")
    ids.resolve(["logo"], [A], salt="tenant-a")
    for salt in ("tenant-b", "", None):
        with pytest.raises(UnknownClientIdError):
            ids.resolve(["logo"], [None], salt=salt)
        ids.resolve(["logo"], [B], salt=salt)
    assert ids.resolve(["logo"], [None], salt="tenant-a") == [A]
    spaces = ["model", "other", Namespace("model"), Namespace("model", salt="s"), Namespace("model", revision="1")]
    keys = {ClientIds(space).key("logo", salt=salt) for space in spaces for salt in (None, "", "a")}
    assert len(keys) == 15


def test_an_id_can_never_be_a_digest():
    ids = ClientIds("model")
    # somebody's digest, given as an id, is a name like others
    with pytest.raises(UnknownClientIdError):
        ids.resolve([A], [None])
    ids.resolve([A], [B])
    assert ids.resolve([A], [None]) == [B]
    assert ids.key(A) != A
    assert not all(c in "0123456789abcdef" for c in ids.key(A))
    with pytest.raises(UnknownClientIdError):
        ids.resolve([ids.key(A)], [None])


AWKWARD = [
    "../escaped",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "nul\0",
    "Case",
    "case",
    " ",
    "é",
    "e\u0301",
    "\ud800",
    "x" * 4096,
]


def test_ids_are_opaque():
    ids = ClientIds("model")
    for index, name in enumerate(AWKWARD):
        ids.resolve([name], [f"content {index}"])
    for index, name in enumerate(AWKWARD):
        assert ids.resolve([name], [None]) == [f"content {index}"]
        key = ids.key(name)
        assert key.replace("-", "").isalnum()
        assert len(key) < 100
    assert len({ids.key(name) for name in AWKWARD}) == len(AWKWARD)
    assert ids.key("é") == ids.key("é".encode())


def test_long_ids_are_shortened_in_errors_only():
    ids = ClientIds("model")
    with pytest.raises(UnknownClientIdError) as caught:
        ids.resolve(["x" * 4096], [None])
    assert len(str(caught.value)) < 300
    assert caught.value.ids == ("x" * 4096,)


@pytest.mark.parametrize("bad", ["", b"", "x" * 4097, "é" * 2049, 7, 1.5, ("u",)])
def test_malformed_ids_name_their_item(bad):
    ids = ClientIds("model")
    with pytest.raises(RequestError) as caught:
        ids.resolve(["fine", bad], [A, B], request_id="r")
    assert (caught.value.request_id, caught.value.item) == ("r", 1)
    assert len(ids) == 0
    with pytest.raises(RequestError):
        ids.key(bad)


def test_malformed_requests():
    ids = ClientIds("model")
    sequences = ([None, None], [["u"], None], [None, [A]], ["u", [A]], [["u"], "c"], [7, 7], [{"u"}, [A]])
    for names, contents in ([["u"], []], [[None], [None]], [["u"], [b"x"]], [["u"], [""]], *sequences):
        with pytest.raises(RequestError):
            ids.resolve(names, contents)
    assert len(ids) == 0


def test_bindings_expire_after_their_content_was_last_seen():
    clock = Clock()
    ids = ClientIds("model", ttl_seconds=10, clock=clock)
    ids.resolve(["u"], [A])
    clock.now = 8
    assert ids.resolve(["u"], [None]) == [A]
    ids.resolve(["u"], [A])
    clock.now = 17
    assert ids.resolve(["u"], [None]) == [A]
    clock.now = 19
    with pytest.raises(UnknownClientIdError):
        ids.resolve(["u"], [None])
    assert len(ids) == 0
    assert ids.resolve(["u"], [B]) == [B]  # expired: bound anew, no conflict


def test_bindings_are_bounded_least_recently_used_first():
    ids = ClientIds("model", max_bindings=3)
    for name in "abc":
        ids.resolve([name], [name])
    ids.resolve(["a"], [None])
    ids.resolve(["d"], ["d"])
    assert len(ids) == 3
    assert ids.resolve(["a", "c", "d"], [None] * 3) == ["a", "c", "d"]
    with pytest.raises(UnknownClientIdError):
        ids.resolve(["b"], [None])


def test_a_request_larger_than_the_bound_is_still_served():
    ids = ClientIds("model", max_bindings=2)
    names = [f"u{i}" for i in range(5)]
    assert ids.resolve(names, names) == names
    assert len(ids) == 2


def test_bindings_can_be_forgotten():
    ids = ClientIds("model")
    ids.resolve(["a", "b"], [A, B])
    ids.resolve(["a"], [C], salt="s")
    ids.forget("a")
    ids.forget("a")
    with pytest.raises(UnknownClientIdError):
        ids.resolve(["a"], [None])
    assert ids.resolve(["a"], [None], salt="s") == [C]
    ids.clear()
    assert len(ids) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_bindings": 0},
        {"max_bindings": True},
        {"ttl_seconds": 0},
        {"ttl_seconds": float("nan")},
        {"on_conflict": "trust"},
        {"namespace": 7},
    ],
)
def test_what_cannot_work_is_a_config_error(options):
    with pytest.raises(ConfigError):
        ClientIds(**{"namespace": "model", **options})


def test_one_id_serves_requests_of_different_settings():
    ids = ClientIds("model")
    source = ImageSource(b"jpeg")
    ids.resolve(["u"], [source.content(H)])
    again = ImageSource.known(ids.resolve(["u"], [None])[0], H)
    for settings_ in ({"max_pixels": 252}, {"max_pixels": 1008}):
        assert H.digest("image", again, settings=settings_) == H.digest("image", source, settings=settings_)
    assert H.digest("image", again, settings=1) != H.digest("image", again, settings=2)


def test_threads_agree_on_one_first_content():
    ids = ClientIds("model")
    start, outcomes = threading.Barrier(8), []

    def work(content):
        start.wait()
        for _ in range(200):
            try:
                outcomes.append(ids.resolve(["u"], [content])[0])
            except ContentConflictError as error:
                outcomes.append(error.expected)

    threads = [threading.Thread(target=work, args=(f"content {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 1600
    assert len(set(outcomes)) == 1


class Bindings(RuleBasedStateMachine):
    """Against a plain dict without bounds."""

    def __init__(self):
        super().__init__()
        self.ids, self.model = ClientIds("model"), {}

    items = st.lists(st.tuples(st.sampled_from("uvw"), st.sampled_from([None, A, B])), min_size=1, max_size=4)

    @rule(items=items, salt=st.sampled_from([None, "s"]))
    def request(self, items, salt):
        given = {}
        conflict = False
        for name, content in items:
            if content is not None:
                conflict |= given.setdefault((name, salt), content) != content
        names, contents = zip(*items)
        missing = {n for n, c in items if c is None and (n, salt) not in given and (n, salt) not in self.model}
        unknown = set()
        try:
            found = self.ids.resolve(names, contents, salt=salt)
        except UnknownClientIdError as error:
            unknown = set(error.ids)
        except ContentConflictError:
            assert conflict or any(self.model.get(key, content) != content for key, content in given.items())
        else:
            assert not conflict
            self.model.update(given)
            assert found == [self.model[name, salt] for name in names]
        assert unknown == (set() if conflict else missing)

    @rule(name=st.sampled_from("uvw"), salt=st.sampled_from([None, "s"]))
    def forget(self, name, salt):
        self.ids.forget(name, salt=salt)
        self.model.pop((name, salt), None)

    @invariant()
    def nothing_is_bound_that_was_refused(self):
        assert len(self.ids) == len(self.model)


TestBindings = Bindings.TestCase
TestBindings.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
