"""The preprocessor against Transformers: same tokens, same pixels; and what it refuses."""

import io
import json
import os
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, BertConfig, DistilBertConfig, PreTrainedTokenizerFast, RobertaConfig, ViTConfig
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.models.folder import Checkpoint
from foundation.standalone import image, preprocess
from foundation.standalone.image import BadImage, decode_image
from foundation.standalone.preprocess import BadRow, Preprocessor

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("a", "good", "bad", "film", "##s", "##ing", ",", ".", "caf", "##e", "b", "##a", "##b", "e")
TEXTS = ["a good film", "", "bad films, a good cafe.", "Caf\u00e9 \u4e2d\u6587 \U0001f600", "a " * 40, "\u2028 \x00 \t", "x" * 200]


def build_checkpoint(folder: Path, config: object, **settings: object) -> Path:
    """Writes a checkpoint folder without weights: config.json and a WordPiece tokenizer."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    # A file's own truncation and padding must not leak into ours.
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64, model_input_names=names, **settings
    )
    wrapped.save_pretrained(folder)
    config.save_pretrained(folder)  # type: ignore[attr-defined]
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path, BertConfig(id2label={0: "no", 1: "yes"}, max_position_embeddings=64))


@pytest.fixture
def text(checkpoint: Path) -> Preprocessor:
    return Checkpoint(checkpoint).preprocessor("text-classification", 32, Target(sequence_lengths=(8, 16, 48)))


def expected_tokens(folder: Path, rows: list[object], max_length: int, length: int) -> dict[str, np.ndarray]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # As a batch: called with one pair, Transformers drops an empty second text.
    texts = [list(texts) for texts in zip(*rows, strict=True)] if isinstance(rows[0], tuple) else [rows]
    encoded = tokenizer(*texts, truncation="longest_first", max_length=max_length, padding="max_length", return_tensors="np")
    return {name: encoded[name][:, :length] for name in ("input_ids", "attention_mask", "token_type_ids")}


def png(pixels: np.ndarray, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", **options)
    return file.getvalue()


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_reads_names_buckets_and_inputs_from_the_checkpoint(text: Preprocessor) -> None:
    assert text.input_names == ("input_ids", "attention_mask", "token_type_ids")
    assert text.labels == ("no", "yes")
    assert text.buckets == (8, 16, 32)


def test_tokens_equal_those_of_transformers(checkpoint: Path, text: Preprocessor) -> None:
    pairs = [(first, second) for first in TEXTS for second in TEXTS]
    for rows in (TEXTS, pairs):
        features = text.encode(rows, 32)
        for name, expected in expected_tokens(checkpoint, list(rows), 32, 32).items():
            assert features[name].dtype == np.int64
            np.testing.assert_array_equal(features[name], expected, err_msg=name)


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_unicode_text_equals_transformers(tmp_path_factory: pytest.TempPathFactory, first: str, second: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "unicode"
    if not folder.exists():
        build_checkpoint(folder, BertConfig(max_position_embeddings=64))
    made = Checkpoint(folder).preprocessor("text-classification", 16, Target())
    for row in ((first, second), first):
        features, among_others = made.encode([row], 16), made.encode([row, row], 16)  # one row goes to the tokenizer by itself
        for name, expected in expected_tokens(folder, [row], 16, 16).items():
            np.testing.assert_array_equal(features[name], expected, err_msg=name)
            np.testing.assert_array_equal(among_others[name][1:], expected, err_msg=name)


def test_padding_goes_to_the_smallest_bucket_the_length_given_or_the_longest(text: Preprocessor) -> None:
    assert text.encode(["a", "a good film"])["input_ids"].shape == (2, 8)
    assert text.encode(["a " * 7])["input_ids"].shape == (1, 16)
    assert text.encode(["a " * 500])["input_ids"].shape == (1, 32)
    assert text.encode(["a"], 16)["input_ids"].shape == (1, 16)
    assert text.encode(["a", "a good film"], 0)["input_ids"].shape == (2, 5)
    assert text.encode([])["input_ids"].shape == (0, 8)
    with pytest.raises(ValueError, match="9 tokens does not fit into 8"):
        text.encode(["a " * 7], 8)


def test_batches_hold_every_row_once_and_one_bucket_each(text: Preprocessor) -> None:
    rows = ["a " * count for count in (1, 20, 3, 9, 30, 2, 5, 40)]
    assert text.groups(rows) == {8: [0, 2, 5, 6], 16: [3], 32: [1, 4, 7]}
    seen: list[int] = []
    for indices, features in text.batches(rows, 3):
        alone = text.encode([rows[i] for i in indices])
        assert 1 <= len(indices) <= 3
        for name, value in features.items():
            np.testing.assert_array_equal(value, alone[name])
        seen += indices
    assert sorted(seen) == list(range(len(rows)))


@pytest.mark.parametrize(
    "config", [RobertaConfig(type_vocab_size=1, max_position_embeddings=66), DistilBertConfig(max_position_embeddings=64)]
)
def test_token_type_ids_only_where_the_model_has_types(tmp_path: Path, config: object) -> None:
    folder = build_checkpoint(tmp_path, config)
    assert Checkpoint(folder).preprocessor("text-classification", 32, Target()).input_names == ("input_ids", "attention_mask")


def test_saves_and_loads_the_same(text: Preprocessor, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    text.save(first)
    again = Preprocessor.load(first)
    again.save(second)
    assert again == text
    assert json.loads((first / "preprocess.json").read_text())["schema"] == 1
    for name in ("preprocess.json", "tokenizer.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    np.testing.assert_array_equal(again.encode(TEXTS)["input_ids"], text.encode(TEXTS)["input_ids"])


def test_threads_get_the_same_answers(text: Preprocessor) -> None:
    expected = [text.encode([row])["input_ids"].tolist() for row in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            assert list(pool.map(lambda row: text.encode([row])["input_ids"].tolist(), TEXTS)) == expected


@pytest.mark.parametrize("row", [b"bytes", 3, None, ["a", "b"], ("a",), ("a", "b", "c"), ("a", None), "\ud800", ("a", "x\udfff")])
def test_wrong_text_rows_are_refused_by_number(text: Preprocessor, row: object) -> None:
    with pytest.raises(BadRow, match=r"^row 1: .*(allowed)") as caught:
        text.encode(["a", row])  # type: ignore[list-item]
    assert "\n" not in str(caught.value)


@pytest.mark.whole
def test_a_very_long_text_is_truncated(text: Preprocessor) -> None:
    ids = text.encode(["film " * 200_000])["input_ids"]
    assert ids.shape == (1, 32)
    assert ids[0, -1] == 3


def test_refuses_more_tokens_than_positions(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path, RobertaConfig(type_vocab_size=1, max_position_embeddings=34, pad_token_id=1))
    Checkpoint(folder).preprocessor("text-classification", 32, Target())
    with pytest.raises(InputError, match=r"max_length: 33 given; .* at most 32"):
        Checkpoint(folder).preprocessor("text-classification", 33, Target())


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "cannot be read"),
        ("config.json", "[1]", "a JSON object is allowed"),
        ("config.json", "{", "cannot be read"),
        ("tokenizer.json", None, "save_pretrained"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", '{"padding_side": "left"}', "right is allowed"),
    ],
)
def test_damaged_checkpoints_are_named(checkpoint: Path, file: str, content: str | None, message: str) -> None:
    (checkpoint / file).unlink()
    if content is not None:
        (checkpoint / file).write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        Checkpoint(checkpoint).preprocessor("text-classification", 32, Target())
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


IMAGES = {
    "rgb": png(noise(40, 30, 3)),
    "wide": png(noise(9, 50, 3)),
    "tiny": png(noise(3, 2, 3)),
    "grey": png(noise(31, 33)),
    "alpha": png(noise(20, 20, 4)),
}
PROCESSORS = [
    ViTImageProcessorPil(size={"height": 24, "width": 20}),
    ViTImageProcessorPil(size={"height": 24, "width": 20}, resample=0, do_normalize=False),
    ViTImageProcessorPil(
        size={"height": 24, "width": 24}, resample=3, image_mean=[0.1, 0.2, 0.3], image_std=[0.9, 0.8, 0.7], do_rescale=False
    ),
    DeiTImageProcessorPil(size={"height": 32, "width": 32}, crop_size={"height": 27, "width": 24}),
    CLIPImageProcessorPil(size={"shortest_edge": 21}, crop_size={"height": 20, "width": 20}),
    BitImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 23, "width": 24}),
    BitImageProcessorPil(do_resize=False, crop_size={"height": 24, "width": 35}),
]


def image_checkpoint(folder: Path, processor: object, channels: int = 3) -> Path:
    ViTConfig(num_channels=channels, id2label={0: "a", 1: "b"}).save_pretrained(folder)
    processor.save_pretrained(folder)  # type: ignore[attr-defined]
    return folder


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("number", range(len(PROCESSORS)))
def test_pixels_equal_those_of_transformers(tmp_path: Path, number: int, name: str) -> None:
    processor = PROCESSORS[number]
    reader = Checkpoint(image_checkpoint(tmp_path, processor)).preprocessor("image-classification", 0, Target())
    image = Image.open(io.BytesIO(IMAGES[name]))
    if not processor.do_convert_rgb:
        image = image.convert("RGB")  # as transformers.image_utils.load_image does before the processor
    expected = np.array(processor(image, return_tensors="np")["pixel_values"])
    pixels = reader.encode([IMAGES[name], IMAGES[name]])["pixel_values"]
    assert pixels.dtype == np.float32
    np.testing.assert_array_equal(pixels[:1], expected)
    np.testing.assert_array_equal(pixels[1:], expected)


def test_images_save_load_and_go_through_batches(tmp_path: Path) -> None:
    reader = Checkpoint(image_checkpoint(tmp_path, PROCESSORS[0])).preprocessor("image-classification", 0, Target())
    reader.save(tmp_path)
    again = Preprocessor.load(tmp_path)
    assert (again, again.buckets, again.max_length) == (reader, (), 0)
    rows = list(IMAGES.values())
    assert reader.groups(rows) == {0: [0, 1, 2, 3, 4]}
    whole = reader.encode(rows)["pixel_values"]
    parts = [features["pixel_values"] for _, features in again.batches(rows, 2)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert reader.encode([])["pixel_values"].shape == (0, 3, 24, 20)


def test_grey_models_get_one_channel(tmp_path: Path) -> None:
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8}, image_mean=[0.5], image_std=[0.25])
    reader = Checkpoint(image_checkpoint(tmp_path, processor, channels=1)).preprocessor("image-classification", 0, Target())
    pixels = noise(8, 8)
    naive = (pixels.astype(np.float64) / 255 - 0.5) / 0.25
    np.testing.assert_allclose(reader.encode([png(pixels)])["pixel_values"][0, 0], naive, atol=1e-6)


def test_photographs_are_turned_upright(tmp_path: Path) -> None:
    processor = ViTImageProcessorPil(do_resize=False)
    reader = Checkpoint(image_checkpoint(tmp_path, processor)).preprocessor("image-classification", 0, Target())
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    pixels = noise(4, 6, 3)
    turned = reader.encode([png(pixels, exif=exif)])["pixel_values"]
    np.testing.assert_array_equal(turned, reader.encode([png(np.rot90(pixels, -1).copy())])["pixel_values"])


def test_images_of_two_sizes_do_not_make_a_batch(tmp_path: Path) -> None:
    reader = Checkpoint(image_checkpoint(tmp_path, ViTImageProcessorPil(do_resize=False))).preprocessor("image-classification", 0, Target())
    with pytest.raises(BadRow, match="row 1: 5 x 4 pixels, row 0: 4 x 4"):
        reader.encode([png(noise(4, 4, 3)), png(noise(4, 5, 3))])


def test_processors_with_steps_of_their_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ConvNextImageProcessor has custom steps"):
        Checkpoint(image_checkpoint(tmp_path, ConvNextImageProcessorPil())).preprocessor("image-classification", 0, Target())


def bomb() -> bytes:
    """A PNG of 100,000 x 100,000 pixels in a few bytes."""
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def gif() -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(4, 4)).save(file, "GIF")
    return file.getvalue()


BROKEN = {
    "empty": b"",
    "text": b"no image at all",
    "truncated png": IMAGES["rgb"][:-200],
    "header only": IMAGES["rgb"][:40],
    "flipped bytes": IMAGES["rgb"][:60] + b"\xff" * 40 + IMAGES["rgb"][100:],
    "gif": gif(),
    "bomb": bomb(),
    "sixteen bits": png(noise(4, 4).astype(np.uint16) * 257),
    "a text": "a.png",
    "nothing": None,
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_images_are_refused_by_number(tmp_path: Path, name: str) -> None:
    reader = Checkpoint(image_checkpoint(tmp_path, PROCESSORS[0])).preprocessor("image-classification", 0, Target())
    with pytest.raises(BadRow, match=r"^row 1: .*allowed") as caught:
        reader.encode([IMAGES["rgb"], BROKEN[name]])  # type: ignore[list-item]
    assert "\n" not in str(caught.value)


def test_a_file_of_too_many_bytes_is_not_even_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "MAX_IMAGE_BYTES", 100)
    with pytest.raises(BadImage, match="at most 100 are allowed"):
        decode_image(IMAGES["rgb"])


def test_a_sliver_cannot_be_blown_up(tmp_path: Path) -> None:
    reader = Checkpoint(image_checkpoint(tmp_path, CLIPImageProcessorPil())).preprocessor("image-classification", 0, Target())
    with pytest.raises(BadRow, match="too narrow: resizing would make it"):
        reader.encode([png(noise(20_000, 1, 3))])


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=8), st.sampled_from(["rgb", "alpha"]))
def test_damaged_bytes_give_an_image_or_a_bad_row(position: int, damage: bytes, name: str) -> None:
    data = bytearray(IMAGES[name])
    position %= len(data)
    data[position : position + len(damage)] = damage
    problem = ""
    try:
        assert decode_image(bytes(data)).size[0] > 0
    except BadImage as error:
        problem = str(error)
    assert "\n" not in problem


def test_needs_numpy_tokenizers_and_pillow_only() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'foundation.core.errors', 'pydantic', 'scipy']));"
        f"import runpy; runpy.run_path({preprocess.__file__!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_real_tokenizer_equals_transformers() -> None:
    root = Path(os.environ["COMPRESS_TEST_DATA"])
    folder = root / "models" / "minilm-sst2"
    reader = Checkpoint(folder).preprocessor("text-classification", 128, Target())
    lines = (root / "data" / "sst2" / "dev.tsv").read_text().split("\n")[1:-1]
    sentences = [line.split("\t")[0] for line in lines]
    pairs = list(zip(sentences, reversed(sentences), strict=True))
    odd = ["", " ", "\u4e2d\u6587 \U0001f600 na\u00efve \u0130", "a\x00b", "[MASK] [SEP]", "word " * 200_000, "x" * 1_000_000]
    for rows in (sentences, pairs, odd):
        features = reader.encode(rows, 128)
        for name, expected in expected_tokens(folder, list(rows), 128, 128).items():
            np.testing.assert_array_equal(features[name], expected, err_msg=name)
