"""Identity of decoded images."""

import io

import numpy as np
import pytest
from hashing_digests import H, distinct, equal
from PIL import Image

from mmcache import UnhashableContentError
from mmcache.errors import MediaError
from mmcache.hashing import same_content


def picture(mode="RGB", size=(6, 4), seed=0):
    channels = len(Image.new(mode, (1, 1)).getbands())
    data = np.random.default_rng(seed).integers(0, 256, size[0] * size[1] * channels, dtype=np.uint8)
    return Image.frombytes(mode, size, data.tobytes())


def file(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def opened(data):
    return Image.open(io.BytesIO(data))


def palette_image(colors, pixels=(0, 1, 1, 0)):
    image = Image.new("P", (2, 2))
    image.putpalette(colors)
    image.putdata(pixels)
    return image


def test_equal_bytes_of_other_size_or_mode_differ():
    data = bytes(range(72))
    assert distinct(Image.frombytes("RGB", (6, 4), data), Image.frombytes("RGB", (4, 6), data))
    assert distinct(*(Image.frombytes(mode, (6, 3), data) for mode in ("RGBA", "CMYK", "RGBX", "RGBa", "I", "F")))
    assert distinct(
        *(Image.frombytes(mode, (6, 4), data) for mode in ("RGB", "YCbCr", "HSV", "LAB")), Image.new("RGB", (6, 4))
    )
    assert distinct(*(Image.frombytes(mode, (6, 6), data) for mode in ("I;16", "I;16B")))
    assert distinct(Image.frombytes("L", (8, 9), data), Image.frombytes("P", (8, 9), data))
    assert distinct(Image.new("1", (9, 2)), Image.new("1", (10, 2)), Image.new("L", (9, 2)))
    assert distinct(Image.new("RGB", (0, 4)), Image.new("RGB", (4, 0)))


def test_every_pixel_counts():
    a = picture(size=(64, 48))
    b = a.copy()
    b.putpixel((63, 47), tuple(255 - v for v in b.getpixel((63, 47))))
    assert distinct(a, b)
    assert equal(a, a.copy(), picture(size=(64, 48)))


def test_the_palette_counts():
    red, blue = palette_image([255, 0, 0, 0, 255, 0]), palette_image([0, 0, 255, 0, 255, 0])
    assert red.tobytes() == blue.tobytes()
    assert distinct(red, blue, red.convert("L"))
    assert distinct(opened(file(red)), opened(file(blue)))
    assert equal(red, palette_image([255, 0, 0, 0, 255, 0]), opened(file(red)))
    translucent = red.copy()
    translucent.putpalette([255, 0, 0, 255, 0, 255, 0, 128], "RGBA")
    clear = red.copy()
    clear.putpalette([255, 0, 0, 255, 0, 255, 0, 0], "RGBA")
    assert distinct(red, translucent, clear)


def test_transparency_of_files_counts():
    red = palette_image([255, 0, 0, 0, 255, 0])
    versions = [file(red), file(red, transparency=0), file(red, transparency=1), file(red, transparency=b"\0\x80")]
    assert distinct(*map(opened, versions))
    gray = picture("L")
    assert distinct(opened(file(gray)), opened(file(gray, transparency=3)), opened(file(gray, transparency=4)))
    rgb = picture()
    assert distinct(opened(file(rgb)), opened(file(rgb, transparency=(1, 2, 3))))
    odd = picture()
    odd.info["transparency"] = object()
    with pytest.raises(UnhashableContentError):
        H.digest(odd)


def test_a_lazily_opened_image_is_its_pixels():
    image = picture(size=(40, 30))
    loaded = opened(file(image))
    loaded.load()
    assert equal(image, opened(file(image)), loaded, opened(file(image, compress_level=0)), opened(file(image, "BMP")))
    named = opened(file(image))
    named.filename = "other.png"
    named.info["comment"] = "other"
    assert equal(image, named)


def test_orientation_counts_since_consumers_apply_it():
    upright, turned, same = picture(), picture(), picture()
    turned.getexif()[0x0112] = 6
    same.getexif()[0x0112] = 1
    assert distinct(upright, turned)
    assert equal(upright, same)
    exif = Image.Exif()
    exif[0x0112] = 8
    assert distinct(opened(file(upright)), opened(file(upright, exif=exif)), turned)
    assert distinct(opened(file(upright, "JPEG")), opened(file(upright, "JPEG", exif=exif)))


def test_an_animation_is_the_frame_that_it_stands_at():
    frames = [picture(seed=seed) for seed in range(3)]
    data = file(frames[0], "GIF", save_all=True, append_images=frames[1:], disposal=2)
    animation = opened(data)
    digests = []
    for index in range(animation.n_frames):
        animation.seek(index)
        digests.append(H.digest(animation))
    assert len(set(digests)) == 3
    animation.seek(0)
    assert H.digest(animation) == digests[0] == H.digest(opened(data))


def test_an_image_and_the_array_of_its_pixels_differ():
    # one is decoded by the consumer's rules for images, the other is taken as it is
    image = picture()
    assert distinct(image, np.asarray(image), image.tobytes())
    assert distinct(np.asarray(image), np.asarray(image)[..., ::-1])


def test_images_inside_other_parts():
    a, b = picture(seed=1), picture(seed=2)
    assert distinct([a, b], [b, a], [a], [a, a], {"a": a}, a)
    assert H.digest(a, background="white") != H.digest(a, background="black")


def test_damaged_images_are_a_media_error():
    whole = file(picture(size=(64, 64)))
    with pytest.raises(MediaError):
        H.digest(opened(whole[: len(whole) // 2]))
    image = opened(whole)
    image.fp.close()
    with pytest.raises(MediaError):
        H.digest([image])


def test_comparison_byte_by_byte():
    assert same_content(picture(), opened(file(picture())))
    assert not same_content(picture(seed=1), picture(seed=2))
    red, blue = palette_image([255, 0, 0]), palette_image([0, 0, 255])
    assert not same_content(red, blue)
