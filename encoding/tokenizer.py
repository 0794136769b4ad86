"""Prompts to token ids without injection, and token ids back to text as they arrive.

The tokenizer.json is loaded once, without its added tokens. Those are matched here, and only in trusted text, so that
a special-token spelling that somebody typed stays plain text. Loading the 6.4 MB file of the real model takes 0.35 s on
one core, most of it the library's reading of the merges.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable, Iterator

from encoding import constants as c
from encoding.messages import EncodingError
from encoding.render import Prompt

_ADDED = re.compile(r'"added_tokens"\s*:\s*(?=\[)')  # "added_tokens" as a vocabulary entry is followed by a number


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    path: a tokenizer.json with a byte-level BPE model (any vocabulary). Raises EncodingError when the file is missing,
    is not a tokenizer, or has features that would change what plain text means.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = os.fspath(path)
        try:
            with open(self._path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            found = error.strerror if isinstance(error, OSError) else "bytes that are not UTF-8"
            raise EncodingError(f"{path}: expected a tokenizer.json, found {found}; give its path") from None
        added, plain = self._cut_added_tokens(text)
        import tokenizers  # here, so that importing `encoding` needs nothing but the standard library

        try:
            self._plain = tokenizers.Tokenizer.from_str(plain)
        except Exception as error:  # the library raises bare Exception
            raise self._unusable(str(error).splitlines()[0]) from None
        if type(self._plain.decoder).__name__ != "ByteLevel":
            raise self._unusable(f"decoder {type(self._plain.decoder).__name__} (expected ByteLevel)")
        self._plain.no_truncation()
        self._plain.no_padding()
        self._added = {token["content"]: token["id"] for token in added}
        self._spelling = {identity: content for content, identity in self._added.items()}
        # Two characters rule out nearly every place; then longest first, as in the official tokenizer.
        self._lengths = sorted({len(token) for token in self._added}, reverse=True)
        starts = sorted({re.escape(token[:2]) for token in self._added})
        self._candidates = re.compile("|".join(starts) or r"(?!)")
        self._bytes: dict[int, bytes] = {}
        self._highest = max([self._plain.get_vocab_size(with_added_tokens=False) - 1, *self._spelling])

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return self._highest + 1

    def token_id(self, token: str) -> int:
        """The id of a token by its exact spelling, added tokens first. Raises EncodingError when there is none."""
        identity = self._added.get(token)
        if identity is None:
            identity = self._plain.token_to_id(token)
        if identity is None:
            raise EncodingError(f"{self._path}: expected a token {token!r}, found none; use a DeepSeek-V4 tokenizer")
        return identity

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's ids. Added tokens are found in trusted pieces only; everything between two of them is one plain
        text, whoever wrote its parts, so that it is merged as the official tokenizer merges it.

        Raises EncodingError when a rendered prompt needs a special token that this tokenizer lacks.
        """
        ids: list[int] = []
        plain: list[str] = []
        for text, trusted in prompt.pieces:
            if not trusted:
                plain.append(text)
                continue
            if not prompt.is_raw:
                for token in c.SPECIAL_TOKENS:
                    if token in text and token not in self._added:
                        self.token_id(token)  # raises
                        raise self._unusable(f"{token!r} as an ordinary token (expected an added token)")
            end = 0
            for start, token in self._added_tokens_in(text):
                plain.append(text[end:start])
                ids += self.encode_text("".join(plain))
                ids.append(self._added[token])
                plain, end = [], start + len(token)
            plain.append(text[end:])
        return ids + self.encode_text("".join(plain))

    def encode_text(self, text: str) -> list[int]:
        """The ids of plain text; no spelling in it becomes an added token."""
        return self._plain.encode(text, add_special_tokens=False).ids if text else []

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens by their spelling. Broken UTF-8 gives U+FFFD, an id without a token gives
        nothing. Raises EncodingError for a negative id."""
        detokenizer = self.detokenizer()
        return "".join([detokenizer.push(identity) for identity in ids]) + detokenizer.flush()

    def detokenizer(self) -> Detokenizer:
        """A new streaming detokenizer; the pieces it returns make up `decode` of the same ids."""
        return Detokenizer(self)

    def token_bytes(self, identity: int) -> bytes:
        """The bytes of one token (part of a character, perhaps); b"" for an id that no token has."""
        known = self._bytes.get(identity)
        if known is None:
            if identity < 0:
                raise EncodingError(f"token id {identity}: expected 0 or more; correct the ids")
            spelling = self._spelling.get(identity)
            if spelling is not None:
                known = spelling.encode("utf-8")
            else:
                token = self._plain.id_to_token(identity) or ""
                known = bytes(_BYTE[char] for char in token) if all(char in _BYTE for char in token) else token.encode()
            self._bytes[identity] = known
        return known

    def _added_tokens_in(self, text: str) -> Iterator[tuple[int, str]]:
        """(start, token) of the added tokens in text, from left to right, none overlapping."""
        found = self._candidates.search(text)
        while found:
            start = found.start()
            token = next((text[start : start + n] for n in self._lengths if text[start : start + n] in self._added), "")
            if token:
                yield start, token
            found = self._candidates.search(text, start + max(1, len(token)))

    def _cut_added_tokens(self, text: str) -> tuple[list[dict], str]:
        """(added tokens, the file with an empty list in their place). Cutting the text is 0.15 s faster for the real
        file than decoding and encoding all of it."""
        found = _ADDED.search(text)
        if not found:
            raise self._unusable("no added_tokens")
        try:
            added, end = json.JSONDecoder().raw_decode(text, found.end())
            for token in added:
                if not isinstance(token["id"], int) or not isinstance(token["content"], str) or not token["content"]:
                    raise self._unusable("an added token without id and content")
                if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
                    raise self._unusable(f"added token {token['content']!r} with lstrip, rstrip or single_word")
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, EncodingError):
                raise
            raise self._unusable(f"broken added_tokens ({error})") from None
        return added, f"{text[: found.end()]}[]{text[end:]}"

    def _unusable(self, found: str) -> EncodingError:
        return EncodingError(f"{self._path}: expected a byte-level BPE tokenizer, found {found}; use DeepSeek-V4's")


class Detokenizer:
    """Token ids in, text out, never a part of a UTF-8 character."""

    def __init__(self, tokenizer: Tokenizer):
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, identity: int) -> str:
        """The text that this id completes ("" while a character is incomplete)."""
        return self._decoder.decode(self._token_bytes(int(identity)))

    def flush(self) -> str:
        """What is left at the end: "" or, for a character that was cut off, U+FFFD."""
        return self._decoder.decode(b"", final=True)


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes each byte as one visible character: the printable ones of Latin-1 as themselves, the other
    68 as U+0100 onwards in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in visible}
    hidden = [byte for byte in range(256) if chr(byte) not in table]
    table.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return table


_BYTE = _byte_of_char()
