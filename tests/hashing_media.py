"""Small encoded images, sounds and animations."""

import io
import wave

import numpy as np
from PIL import Image


def png(mode="RGB", seed=0, kind="PNG", size=(16, 12), **options):
    channels = len(Image.new(mode, (1, 1)).getbands())
    data = np.random.default_rng(seed).integers(0, 256, size[0] * size[1] * channels, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.frombytes(mode, size, data.tobytes()).save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def wav(channels=1, rate=16000, width=2, seed=0):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(np.random.default_rng(seed).bytes(8 * channels * width))
    return buffer.getvalue()


def gif(count=4):
    frames = [Image.new("RGB", (8, 8), (40 * i, 10, 200)) for i in range(count)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()
