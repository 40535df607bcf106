"""Text to ids and back, and back piece by piece: no piece ever holds half a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Library

from cli.random_model import SPECIAL_TOKENS, make_random_model
from worker_service.core.errors import ModelError
from worker_service.model.tokenizer import Tokenizer

TEXT = "naïve café — 東京 🍣👩‍🚀 \n\tend"


def byte_level(folder: Path) -> Tokenizer:
    make_random_model(folder)
    return Tokenizer(folder / "tokenizer.json")


def sentence_piece_like(folder: Path) -> Tokenizer:
    """A vocabulary of a few words and all bytes, as the older Llama and Mistral folders have it."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "c", "f", "\u2581c", "af"]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocabulary, merges=[("\u2581", "c"), ("a", "f")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Library(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module", params=["byte level", "sentence piece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return byte_level(folder) if request.param == "byte level" else sentence_piece_like(folder)


def test_special_tokens_are_left_out_when_the_text_has_them_already(tmp_path: Path) -> None:
    make_random_model(tmp_path)
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    start = SPECIAL_TOKENS[0]
    token_id = library.token_to_id(start)
    library.post_processor = processors.TemplateProcessing(f"{start} $A", special_tokens=[(start, token_id)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode(start + "text")[:2] == [token_id, token_id]
    assert tokenizer.encode(start + "text", special_tokens=False) == tokenizer.encode("text")


def test_text_comes_back(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_pieces_are_whole_characters_and_add_up(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add([token_id]) for token_id in tokenizer.encode(TEXT)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces).lstrip(" ") == TEXT
    assert detokenizer.finish() == ""


@given(st.text(), st.data())
def test_any_cut_gives_the_same_text(demo: Tokenizer, text: str, data: st.DataObject) -> None:
    token_ids = demo.encode(text)
    detokenizer, rest, out = demo.detokenizer(), token_ids, ""
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        piece = detokenizer.add(rest[:count])
        assert "\ufffd" not in piece or "\ufffd" in text
        out, rest = out + piece, rest[count:]
    assert out + detokenizer.finish() == text


@given(st.lists(st.integers(0, 259), max_size=60))
def test_random_tokens_give_what_decoding_at_once_gives(demo: Tokenizer, token_ids: list[int]) -> None:
    """Most are not UTF-8: broken bytes come out as U+FFFD, and never hold back what follows."""
    detokenizer = demo.detokenizer()
    pieces = [detokenizer.add([token_id]) for token_id in token_ids]
    assert "".join(pieces) + detokenizer.finish() == demo.decode(token_ids)


def test_a_broken_character_holds_back_at_most_three_tokens(demo: Tokenizer) -> None:
    first_bytes = demo.encode("🍣")[:3]
    letter = demo.encode("x")
    detokenizer = demo.detokenizer()
    assert detokenizer.add(first_bytes) == ""
    assert detokenizer.add(letter) == "\ufffdx"
    assert detokenizer.add(first_bytes[:2]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_are_read_and_never_shown(demo: Tokenizer) -> None:
    token_ids = demo.encode(f"hi{SPECIAL_TOKENS[1]}you")
    assert len(token_ids) == 6
    assert demo.decode(token_ids) == "hiyou"
    assert demo.detokenizer().add(token_ids) == "hiyou"
    assert demo.token_bytes(5000) == b""


def test_leading_space_of_a_continuation_is_kept(tmp_path: Path) -> None:
    """Generated tokens go on behind a prompt: what decoding from the start would strip belongs to the text."""
    tokenizer = sentence_piece_like(tmp_path)
    assert tokenizer.detokenizer().add(tokenizer.encode("caf")) == " caf"


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_unreadable_files_are_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        Tokenizer(tmp_path / "tokenizer.json")
    assert caught.value.field == "tokenizer.json"


def test_unknown_decoders_are_refused(tmp_path: Path) -> None:
    library = Library(models.WordLevel({"a": 0}, unk_token="a"))
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(tmp_path / "tokenizer.json")
