"""A tokenizer that has a token for each character."""

from collections.abc import Sequence


class Letters:
    def encode(self, text: str) -> Sequence[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))
