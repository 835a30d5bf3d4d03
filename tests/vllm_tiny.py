"""A tiny Idefics3 with random weights that vLLM runs on two CPU cores, and pictures for it.

`python tests/vllm_tiny.py DIR` writes the model. Needs transformers, tokenizers and Pillow.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

SPECIAL = ["<pad>", "<s>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
ROLES = ["<user>", "<assistant>", "<system>"]
ROWS = [f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)]
TEMPLATE = (
    "<s>{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_model(folder: Path, *, seed: int = 0, **vision: int) -> Path:
    """Write model, tokenizer and processor. Another seed gives other weights; `vision` changes the encoder's shape."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    config = Idefics3Config(
        image_token_id=3,
        pad_token_id=0,
        scale_factor=2,
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
        }
        | vision,
        text_config={
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 320,
            "max_position_embeddings": 4096,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                continue
            scale = 1.0 if "embed" in name and "patch" not in name else weight[0].numel() ** -0.5
            weight.normal_(0.0, scale)
            if "lm_head" in name:
                weight.mul_(4.0)
    model.save_pretrained(folder)
    _write_processor(folder)
    return folder


def _write_processor(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.idefics3 import Idefics3Processor

    try:
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil as Processor
    except ImportError:
        from transformers.models.idefics3.image_processing_idefics3 import Idefics3ImageProcessor as Processor

    special = SPECIAL + ROLES + ROWS
    vocab = {token: i for i, token in enumerate(special)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=special[3:],
    )
    tokenizer.chat_template = TEMPLATE
    images = Processor(size={"longest_edge": 256}, max_image_size={"longest_edge": 64}, do_image_splitting=True)
    Idefics3Processor(images, tokenizer, image_seq_len=16, chat_template=TEMPLATE).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def picture(seed: int, width: int = 200, height: int = 100) -> Any:
    """A picture of random pixels: 144 embeddings at 200 x 100."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def message(text: str, *images: Any, lead: str = "") -> dict[str, Any]:
    """One user message: images, then the text; `(uuid, image)` gives an image an id of the client's.

    `lead` stands before the images: with another one, no prefix that holds an image is cached.
    """
    parts: list[dict[str, Any]] = [{"type": "text", "text": lead}] if lead else []
    for image in images:
        uuid, pixels = image if isinstance(image, tuple) else (None, image)
        part = {"type": "image_pil", "image_pil": pixels}
        parts.append(part if uuid is None else part | {"uuid": uuid})
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def environment() -> dict[str, str]:
    """The environment in which vLLM runs on a small machine without a network."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


if __name__ == "__main__":
    print(write_model(Path(sys.argv[1])))
