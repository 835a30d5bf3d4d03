"""Which items vLLM's connector takes for the same, which it leaves alone, and which it cannot do without."""

from __future__ import annotations

import pytest
import torch
from vllm_fakes import WIDTH, Data, Engine, Item, Position, Store, digest, item, pixels, request

# -- identity


def test_a_clients_id_is_neither_loaded_nor_saved() -> None:
    engine = Engine(store=Store())
    logo = Item("logo-1", Position(0, 4), pixels(1))
    assert engine.serve(request(logo)) == []
    engine.forget()
    assert engine.serve(request(logo)) == []
    assert engine.store.rows == {}
    assert engine.store.asked == []
    assert engine.side.counts["refused.client_id"] == 2


def test_trusted_ids_are_loaded_and_saved() -> None:
    engine = Engine(trust=True, store=Store())
    logo = Item("logo-1", Position(0, 4), pixels(1))
    engine.serve(request(logo))
    engine.forget()
    assert engine.serve(request(logo)) == ["logo-1"]


def test_an_identifier_that_lies_about_its_content_does_not_hit() -> None:
    engine = Engine(store=Store())
    engine.serve(request(item("a")))
    engine.forget()
    liar = Item(digest("a"), Position(0, 4), pixels(77))
    assert engine.serve(request(liar)) == []
    engine.forget()
    assert engine.serve(request(item("a"))) == [digest("a")]


def test_equal_content_hits_under_whatever_digest_names_it() -> None:
    engine = Engine(store=Store())
    engine.serve(request(Item(digest("one name"), Position(0, 4), pixels(5))))
    assert engine.serve(request(Item(digest("another"), Position(0, 4), pixels(5)))) == [digest("another")]


@pytest.mark.parametrize("trust", [True, False])
def test_an_image_and_a_video_never_share_rows_though_name_and_tensors_are_equal(trust: bool) -> None:
    engine = Engine(trust=trust, store=Store())
    image, video = (Item(digest("a"), Position(0, 4), pixels(1), modality) for modality in ("image", "video"))
    engine.serve(request(image))
    engine.forget()
    assert engine.serve(request(video)) == []
    assert {key.modality for key in engine.store.rows} == {"image", "video"}


def test_where_adapters_touch_the_encoder_their_requests_are_left_alone() -> None:
    engine = Engine(store=Store(), adapters_encode=True)
    r = request(item("a"))
    r.lora_request = object()
    engine.serve(r)
    assert engine.store.rows == {}
    assert engine.side.counts["refused.adapter"] == 1
    engine.forget()
    engine.serve(request(item("a")))
    assert len(engine.store.rows) == 1


def test_embeddings_that_a_client_gives_run_no_encoder_and_are_not_stored() -> None:
    engine = Engine(store=Store(), trust=True)
    given_rows = Item(digest("a"), Position(0, 4), Data(image_embeds=torch.zeros(4, WIDTH), grid=torch.ones(3)))
    engine.serve(request(given_rows))
    assert engine.store.rows == {}


def test_content_that_cannot_be_hashed_is_encoded() -> None:
    engine = Engine(store=Store())
    odd = Item(digest("a"), Position(0, 4), Data(pixel_values=object()))
    assert engine.serve(request(odd)) == []
    assert engine.side.counts["refused.unhashable"] == 1


def test_where_tensors_lie_is_not_what_they_are() -> None:
    # vLLM's shared-memory processor cache hands the scheduler addresses, which other content has at another time
    engine = Engine(store=Store())
    elsewhere = Item(digest("a"), Position(0, 4), Data(address=torch.tensor(4096), monotonic_id=torch.tensor(1)))
    assert engine.serve(request(elsewhere)) == []
    assert engine.encoded == [digest("a")]
    assert engine.store.rows == {}
    assert engine.side.counts["refused.no_content"] == 1


# -- items without media


def test_an_item_without_media_is_loaded_where_ids_are_trusted() -> None:
    store = Store()
    Engine(trust=True, store=store, consumes=False).serve(request(item("a")))
    engine = Engine(trust=True, store=store, produces=False)
    assert engine.serve(request(item("a", data=Data(grid=torch.tensor([1, 2, 2]))))) == [digest("a")]


@pytest.mark.parametrize("data", [None, Data(grid=torch.tensor([1, 2, 2]))])
@pytest.mark.parametrize("trust", [True, False])
def test_an_item_that_is_nowhere_fails_its_request_and_no_other(trust: bool, data: Data | None) -> None:
    engine = Engine(trust=trust, store=Store())
    bad, good = request(item("lost", data=data)), request(item("a"))
    assert not engine.ready(bad)
    assert engine.side.take_unavailable() == {bad.request_id}
    assert engine.side.take_unavailable() == set()
    engine.side.finished(bad.request_id)
    engine.serve(good)
    assert engine.encoded == [digest("a")]


def test_a_slow_store_fails_a_request_without_media_only_after_patience() -> None:
    engine = Engine(trust=True, store=Store(at_once=False))
    r = request(item("a", data=None))
    assert not engine.ready(r)
    assert engine.side.take_unavailable() == set()
    engine.now = 1.1
    assert not engine.ready(r)
    assert engine.side.take_unavailable() == {r.request_id}


def test_an_item_without_media_is_fetched_again_when_it_was_evicted() -> None:
    engine = Engine(trust=True, store=Store())
    engine.serve(request(item("a")))
    engine.forget()
    r = request(item("a", data=None))
    assert engine.ready(r)
    engine.side.plan_step(())
    (key,) = engine.store.rows
    resident = engine.side.residents.get(key)
    assert resident is not None
    assert engine.side.residents.drop(resident)
    assert engine.ready(r)
    assert engine.side.has_item(digest("a"))


def test_an_item_without_media_that_vllm_was_given_is_not_needed_again() -> None:
    store = Store()
    Engine(trust=True, store=store).serve(request(item("a")))
    engine = Engine(trust=True, store=store)
    r = request(item("a", data=None))
    assert engine.ready(r)
    engine.schedule(r)
    engine.step()
    store.rows.clear()
    (resident,) = [engine.side.residents.get(key) for batch in store.asked[-1:] for key in batch]
    engine.side.catch_up()
    assert resident is not None
    assert engine.side.residents.drop(resident)
    assert engine.ready(r, 2)  # the second chunk begins in the middle of the item
    assert engine.side.take_unavailable() == set()


def test_a_fault_of_our_own_fails_a_request_that_the_engine_cannot_encode() -> None:
    engine = Engine(trust=True, store=Store())

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    engine.store.prefetch = broken  # type: ignore[method-assign]
    r = request(item("a", data=None))
    assert not engine.ready(r)
    assert engine.side.take_unavailable() == {r.request_id}
