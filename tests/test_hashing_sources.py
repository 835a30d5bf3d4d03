"""Encoded media: identity without decoding, options that count and those that do not, and decoding."""

import io
import pickle
import wave

import numpy as np
import pytest
import torch
from hashing_digests import H, distinct, equal
from hashing_media import exif, gif, png, wav
from PIL import Image

from mmcache import FeatureCache, FieldConfig, MissingContentError, split_fields
from mmcache.errors import MediaError
from mmcache.hashing import AudioSource, ContentHasher, ImageSource, VideoSource, same_content


class Counting(ContentHasher):
    """Counts how often bytes are digested."""

    calls = 0

    def digest(self, /, *parts, **named_parts):
        self.calls += bool(parts) and isinstance(parts[0], bytes)
        return super().digest(*parts, **named_parts)


class Weak:
    """A hasher of 8 bits."""

    def digest(self, /, *parts, **named_parts):
        return H.digest(*parts, **named_parts)[:2]


def test_content_decides():
    assert equal(ImageSource(png()), ImageSource(bytes(png())))
    assert distinct(ImageSource(png(seed=1)), ImageSource(png(seed=2)))
    assert ImageSource(png()).digest(H) == H.digest(ImageSource(png()))


def test_a_source_differs_from_its_bytes_and_from_other_kinds():
    data = png()
    values = [ImageSource(data), VideoSource(data), AudioSource(data), VideoSource([data])]
    assert len({*map(H.digest, values), H.digest(data), H.digest(H.digest(data)), H.digest([data])}) == 7


def test_a_digest_is_computed_once_and_carried():
    counting = Counting()
    source = ImageSource(png())
    assert source.digest(counting) == source.digest(counting)
    counting.digest("image", source, settings={"size": 504})
    counting.digest("image", source, settings={"size": 252})
    assert counting.calls == 1
    video = VideoSource([source, png(seed=1)])
    video.digest(counting)
    video.digest(counting)
    assert counting.calls == 2  # the frame that is new


def test_each_hasher_has_its_own_digest():
    source = ImageSource(png())
    hashers = [H, ContentHasher("blake3"), ContentHasher("sha256"), ContentHasher("sha256", key=b"a"), Weak()]
    assert len({source.digest(h) for h in hashers}) == len(hashers)
    assert source.digest(ContentHasher()) == source.digest(H)


def test_hashing_does_not_decode(monkeypatch):
    sources = [ImageSource(png()), VideoSource([png(), png(seed=1)]), AudioSource(wav()), VideoSource(gif())]
    monkeypatch.setattr(Image, "open", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(wave, "open", lambda *_: pytest.fail("decoded"))
    assert distinct(*sources)
    assert distinct(ImageSource(b"not an image"), ImageSource(b""))


def test_the_background_counts_where_there_is_transparency():
    black = (0, 0, 0)
    clear = png("RGBA")
    assert distinct(ImageSource(clear), ImageSource(clear, background=black), ImageSource(clear, background=None))
    assert equal(ImageSource(clear), ImageSource(clear, background=(255, 255, 255)))
    for opaque in (png(), png(kind="JPEG"), png("L"), png(kind="BMP")):
        assert equal(ImageSource(opaque), ImageSource(opaque, background=black), ImageSource(opaque, background=None))
    keyed = png("L", transparency=7)
    assert distinct(ImageSource(keyed), ImageSource(keyed, background=black))
    # nothing is taken for granted of a format whose header does not tell
    other = png(kind="TIFF")
    assert distinct(ImageSource(other), ImageSource(other, background=black))


def test_the_orientation_counts_where_there_is_one():
    turned, upright = png(kind="JPEG", exif=exif(6)), png(kind="JPEG", exif=exif(1))
    assert distinct(ImageSource(turned), ImageSource(turned, orient=False))
    assert equal(ImageSource(upright), ImageSource(upright, orient=False))
    assert ImageSource(turned).decode().size == (12, 16)
    assert ImageSource(turned, orient=False).decode().size == (16, 12)


def test_the_mode_counts():
    data = png("RGBA")
    assert distinct(*(ImageSource(data, mode=mode) for mode in ("RGB", "L", "RGBA")))
    assert equal(ImageSource(data), ImageSource(data, mode="RGB"))


def test_a_mode_that_changes_nothing_does_not_count():
    for data in (png(), png(kind="JPEG"), png(kind="BMP"), png(kind="WEBP", lossless=True)):
        assert equal(ImageSource(data), ImageSource(data, mode=None))
        assert ImageSource(data, mode=None).decode().tobytes() == ImageSource(data).decode().tobytes()
    # flattened, an image comes out in RGB in any case
    assert equal(ImageSource(png("RGBA")), ImageSource(png("RGBA"), mode=None))
    assert equal(ImageSource(png("L"), mode="L"), ImageSource(png("L"), mode=None))
    assert distinct(ImageSource(png("L")), ImageSource(png("L"), mode=None), ImageSource(png("L"), mode="RGBA"))
    kept = {"mode": None, "background": None}
    assert equal(ImageSource(png("RGBA"), **kept), ImageSource(png("RGBA"), mode="RGBA", background=None))
    assert distinct(ImageSource(png("RGBA")), ImageSource(png("RGBA"), **kept))
    # where the header does not tell, nothing is taken for granted
    assert distinct(ImageSource(gif()), ImageSource(gif(), mode=None))


def test_images_decode_as_their_options_say():
    clear = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    buffer = io.BytesIO()
    clear.save(buffer, "PNG")
    data = buffer.getvalue()
    assert ImageSource(data).decode().getpixel((0, 0)) == (255, 255, 255)
    assert ImageSource(data, background=(0, 0, 9)).decode().getpixel((0, 0)) == (0, 0, 9)
    assert ImageSource(data, background=None).decode().getpixel((0, 0)) == (10, 20, 30)
    assert ImageSource(data, background=None, mode=None).decode().getpixel((0, 0)) == (10, 20, 30, 0)
    assert ImageSource(png("L")).decode().mode == "RGB"
    assert ImageSource(png("L"), mode=None).decode().mode == "L"


@pytest.mark.parametrize("data", [b"", b"not an image", png()[:60], png(kind="JPEG")[:200], png(kind="GIF")[:14]])
def test_damaged_images_are_a_media_error(data):
    with pytest.raises(MediaError):
        ImageSource(data).decode()


def test_sources_of_images_are_immutable_and_typed():
    for wrong in (bytearray(b"x"), memoryview(b"x"), "frame.png", 1):
        with pytest.raises(MediaError):
            ImageSource(wrong)
        with pytest.raises(MediaError):
            AudioSource(wrong, 16000) if isinstance(wrong, str) else AudioSource(wrong)
    for color in ((0, 0), (0, 0, 256), (0.5, 0, 0), "red"):
        with pytest.raises(MediaError):
            ImageSource(b"x", background=color)
    with pytest.raises(MediaError):
        ImageSource(b"x", mode=3)


def test_sources_cannot_be_changed():
    for source, name in ((ImageSource(b"x"), "mode"), (VideoSource([b"x"]), "fps"), (AudioSource(b"x"), "data")):
        with pytest.raises(AttributeError):
            setattr(source, name, None)
    with pytest.raises(MediaError):
        ImageSource.known(b"digest", H)


FRAMES = [png(seed=i) for i in range(4)]


def test_frames_times_and_rate_of_videos_count():
    assert distinct(
        VideoSource(FRAMES),
        VideoSource(FRAMES[::-1]),
        VideoSource(FRAMES[:3]),
        VideoSource([*FRAMES, FRAMES[0]]),
        VideoSource(FRAMES, fps=5),
        VideoSource(FRAMES, fps=30),
        VideoSource(FRAMES, indices=[0, 3, 6, 9]),
        VideoSource(FRAMES, indices=[0, 3, 6, 9], fps=5),
        VideoSource(FRAMES, timestamps=[0, 1, 2, 3]),
        VideoSource(FRAMES, timestamps=[0, 1, 2, 3.5]),
        VideoSource(FRAMES, audio=AudioSource(wav(seed=1))),
        VideoSource(FRAMES, audio=AudioSource(wav(seed=2))),
        VideoSource(FRAMES, audio=AudioSource(wav(seed=1, rate=24000))),
        VideoSource([ImageSource(frame, mode="L") for frame in FRAMES]),
    )
    assert equal(
        VideoSource(FRAMES),
        VideoSource(tuple(map(ImageSource, FRAMES))),
        VideoSource(FRAMES, indices=[0, 1, 2, 3]),
        VideoSource(FRAMES, indices=np.arange(4)),
        VideoSource(FRAMES, fps=None, timestamps=None, audio=None),
    )
    assert equal(VideoSource(FRAMES, fps=5), VideoSource(FRAMES, fps=5.0))


def test_sampling_of_a_video_file_counts():
    data = gif()
    assert distinct(
        VideoSource(data),
        VideoSource(data, indices=[0, 2]),
        VideoSource(data, indices=[2, 0]),
        VideoSource(data, fps=1),
    )
    assert equal(VideoSource(data, indices=[0, 2]), VideoSource(data, indices=(0, 2)))


def test_videos_decode():
    colors = [frame.getpixel((0, 0))[0] for frame in VideoSource(gif()).decode()]
    assert colors == sorted(colors)
    assert len(colors) == 4
    picked = VideoSource(gif(), indices=[3, 0, 3]).decode()
    assert [frame.getpixel((0, 0))[0] for frame in picked] == [colors[3], colors[0], colors[3]]
    assert [frame.size for frame in VideoSource(FRAMES).decode()] == [(16, 12)] * 4
    with pytest.raises(MediaError, match="beyond the end"):
        VideoSource(gif(), indices=[4]).decode()
    with pytest.raises(MediaError):
        VideoSource(b"\0\0\0\x20ftypisom").decode()


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ([], {}),
        ("clip.mp4", {}),
        ([b"x", "y"], {}),
        (b"x", {"fps": 0}),
        (b"x", {"fps": "2"[:0]}),
        (b"x", {"indices": ["0"]}),
        (b"x", {"timestamps": [None]}),
        (b"x", {"fps": -1.0}),
        (b"x", {"fps": float("nan")}),
        (b"x", {"indices": [-1]}),
        (b"x", {"indices": [0.5]}),
        (b"x", {"indices": [0, 1], "timestamps": [0.0]}),
        (FRAMES, {"indices": [0, 1]}),
        (FRAMES, {"timestamps": [0.0]}),
        (FRAMES, {"timestamps": [0.0, 1.0, 2.0, float("inf")]}),
        (FRAMES, {"audio": b"x"}),
    ],
)
def test_malformed_videos_are_a_media_error(content, options):
    with pytest.raises(MediaError):
        VideoSource(content, **options)


def test_rate_and_channels_of_audio_count():
    samples = np.arange(8, dtype=np.float32)
    assert distinct(
        AudioSource(samples, 16000),
        AudioSource(samples, 24000),
        AudioSource(samples[None], 16000),
        AudioSource(samples.reshape(2, 4), 16000),
        AudioSource(samples.astype(np.float64), 16000),
        AudioSource(samples.reshape(2, 4), 16000, mono=False),
        AudioSource(wav()),
        AudioSource(wav(rate=8000)),
        AudioSource(wav(channels=2)),
        AudioSource(wav(channels=2), mono=False),
    )
    assert equal(AudioSource(samples, 16000), AudioSource(samples.copy(), 16000, mono=True))
    assert H.digest((samples, 16000)) != H.digest((samples, 24000))


def test_samples_are_copied_so_that_the_digest_stays_true():
    samples = np.zeros(8, np.float32)
    source = AudioSource(samples, 16000)
    before = source.digest(H)
    samples[0] = 1
    assert source.digest(H) == before == AudioSource(np.zeros(8, np.float32), 16000).digest(H)
    with pytest.raises(ValueError, match="read-only"):
        source.samples[0] = 1


def test_audio_decodes():
    for width in (1, 2, 3, 4):
        samples, rate = AudioSource(wav(channels=2, rate=8000, width=width), mono=False).decode()
        assert (samples.shape, samples.dtype, rate) == ((2, 8), np.float32, 8000)
        assert -1 <= samples.min() < samples.max() <= 1
        mono, _ = AudioSource(wav(channels=2, rate=8000, width=width)).decode()
        np.testing.assert_allclose(mono, samples.mean(axis=0), atol=1e-6)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 3, 8000, 0, "NONE", ""))
        file.writeframes((0x7FFFFF).to_bytes(3, "little") + (0x800000).to_bytes(3, "little") + b"\0\0\0")
    np.testing.assert_allclose(AudioSource(buffer.getvalue()).decode()[0], [1, -1, 0], atol=1e-6)
    assert AudioSource(np.array([0, 128, 255], np.uint8), 8000).decode()[0].tolist() == [-1.0, 0.0, 127 / 128]
    assert AudioSource(np.array([-(2**15), 0, 2**14], np.int16), 8000).decode()[0].tolist() == [-1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("content", "rate"),
    [
        (np.zeros(4), None),
        (np.zeros(4), 0),
        (np.zeros(4), 16000.0),
        (np.zeros((1, 2, 3)), 16000),
        (np.zeros((0, 5)), 16000),
        (np.zeros(4, np.longdouble), 16000),
        (np.array(["a"]), 16000),
        (wav(), 16000),
    ],
)
def test_malformed_audio_is_a_media_error(content, rate):
    with pytest.raises(MediaError):
        AudioSource(content, rate)


@pytest.mark.parametrize("data", [b"", b"RIFF", wav()[:-3], b"not audio at all"])
def test_damaged_audio_is_a_media_error(data):
    with pytest.raises(MediaError):
        AudioSource(data).decode()


def test_a_known_digest_stands_for_the_bytes():
    data = png()
    content = ImageSource(data).content(H)
    assert content == H.digest(data)
    for cls, payload in ((ImageSource, data), (VideoSource, data), (AudioSource, data)):
        known = cls.known(content, H)
        assert known.digest(H) == cls(payload).digest(H)
        with pytest.raises(MissingContentError):
            known.decode()
        with pytest.raises(MissingContentError):
            known.digest(ContentHasher("sha256"))
    assert ImageSource.known(content, H, mode="L").digest(H) == ImageSource(data, mode="L").digest(H)
    assert VideoSource.known(content, H, fps=2).digest(H) == VideoSource(data, fps=2).digest(H)
    with pytest.raises(MissingContentError):  # whether it matters only the file can tell
        ImageSource.known(content, H, background=(0, 0, 0)).digest(H)
    with pytest.raises(MissingContentError):
        ImageSource.known(content, H, mode=None).digest(H)


@pytest.mark.parametrize(
    "source",
    [
        ImageSource(png("RGBA"), background=(1, 2, 3), mode="L"),
        VideoSource(FRAMES, fps=2, indices=[0, 2, 4, 6], timestamps=[0, 1, 2, 3], audio=AudioSource(wav())),
        VideoSource(gif(), indices=[0]),
        AudioSource(np.arange(4), 8000, mono=False),
        AudioSource(wav()),
    ],
)
def test_sources_travel_with_their_options(source):
    again = pickle.loads(pickle.dumps(source))
    assert again.digest(H) == source.digest(H)


def test_comparison_of_sources():
    assert same_content(ImageSource(png()), ImageSource(png()))
    assert not same_content(ImageSource(png()), ImageSource(png(seed=1)))
    assert not same_content([ImageSource(png())], [ImageSource(png(), mode="L")])


def test_a_weak_hasher_can_be_injected():
    weak = Weak()
    found = {}
    for seed in range(300):
        found.setdefault(ImageSource(b"%d" % seed).digest(weak), []).append(seed)
    assert max(map(len, found.values())) > 1  # 8 bits collide; callers have to notice
    assert len({H.digest(ImageSource(b"%d" % seed)) for seed in range(300)}) == 300


def test_what_was_processed_before_is_neither_decoded_nor_processed():
    features, decoded = FeatureCache(1 << 20), []
    configs = {"pixels": FieldConfig.batched("image"), "size": FieldConfig.batched("image", keep_on_cpu=True)}

    def process(source):
        decoded.append(source)
        image = torch.from_numpy(np.array(source.decode()))
        (fields,) = split_fields({"pixels": image[None], "size": torch.tensor([image.shape])}, configs)["image"]
        return fields

    def prepare(source, **settings):
        identifier = H.digest("image", source, settings=settings)
        return identifier, features.get_or_process(identifier, lambda: process(source))

    identifier, fields = prepare(ImageSource(png()))
    assert prepare(ImageSource(png())) == (identifier, fields)
    # not even its bytes are needed
    assert prepare(ImageSource.known(H.digest(png()), H)) == (identifier, fields)
    assert len(decoded) == 1
    prepare(ImageSource(png()), size=504)
    prepare(ImageSource(png(), mode="L"))
    assert len(decoded) == 3
    with pytest.raises(MissingContentError):
        prepare(ImageSource.known(H.digest(b"another"), H))
