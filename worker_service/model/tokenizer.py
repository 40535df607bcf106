"""Text to token ids and back, by a tokenizer.json; and back piece by piece, never half a character."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from worker_service.core.errors import ModelError
from worker_service.model.fields import read_json

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


class Tokenizer:
    """One tokenizer.json."""

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise ModelError(path.name, f"cannot be read as a tokenizer ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._piece_bytes = _piece_bytes_of(self._tokenizer)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled so; None where there is none."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids; `special_tokens` adds those that the tokenizer puts before and behind a prompt."""
        # Of the library's calls only the batch ones let other threads run: beside `encode` of 0.5 MB the event loop
        # stood still for up to 400 ms at a time.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
        token_ids: list[int] = encoding.ids
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token within a text; none for special tokens and ids that the vocabulary lacks."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._special:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.id_to_token(token_id)
        return b"" if piece is None else self._piece_bytes(piece)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self)


class Detokenizer:
    """Incremental detokenizer: returns a character when its last byte has arrived.

    Bytes that can never become a character come out as U+FFFD at once: no more than three are ever held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def finish(self) -> str:
        """Returns the rest when no more tokens come: U+FFFD for a broken character, or nothing."""
        return self._decoder.decode(b"", final=True)


def eos_token_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token that tokenizer_config.json calls `eos_token`; empty where it names none that the tokenizer has."""
    path = folder / TOKENIZER_CONFIG
    named = read_json(path).get("eos_token") if path.is_file() else None
    text = named.get("content") if isinstance(named, dict) else named
    token_id = tokenizer.token_id(text) if isinstance(text, str) else None
    return () if token_id is None else (token_id,)


def _piece_bytes_of(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Returns how this tokenizer writes bytes in its vocabulary, by the decoders that its file names."""
    kinds = _decoder_kinds(json.loads(tokenizer.to_str()).get("decoder"))
    if "ByteLevel" in kinds:
        alphabet = _byte_level_alphabet()
        return lambda piece: _byte_level_bytes(piece, alphabet)
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
        return _sentence_piece_bytes
    raise ModelError(TOKENIZER, f"decoder {sorted(kinds)} is not supported; ByteLevel and SentencePiece-like ones are")


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return {part["type"] for part in decoder["decoders"]}
    return {decoder["type"]}


def _byte_level_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 bytes are themselves, the 68 others are U+0100 onwards in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


def _byte_level_bytes(piece: str, alphabet: dict[str, int]) -> bytes:
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return piece.encode()


def _sentence_piece_bytes(piece: str) -> bytes:
    """U+2581 means a space, <0xE2> the byte itself."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace("\u2581", " ").encode()
