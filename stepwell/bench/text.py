"""Seeded text that looks like language: it trains the demo tokenizer and fills the prompts.

Words are built from syllables and drawn with Zipf-like frequencies, so that a byte-pair
tokenizer finds thousands of merges in it, as in real text. Nothing is downloaded, and equal
seeds give equal text on every machine.
"""

import itertools
import random
from collections.abc import Callable

_ONSETS = "b br c ch cl d dr f fl g gr h j k l m n p pl pr qu r s sh sl st t th tr v w"
_VOWELS = "a ai e ea ee i ie o oa oo ou u"
_CODAS = "- - - ck d l ll m n nd ng nt r rd s st t"  # "-": the syllable is open
_GLUE = (
    "the of and to in a that it was for on with as his they at be this from have or by one had "
    "not but what all were when we there can an your which their said if do will each about how"
)
_VOCABULARY_SEED = 20261
_VOCABULARY_WORDS = 6000


def _make_vocabulary() -> list[str]:
    rng = random.Random(_VOCABULARY_SEED)
    onsets, vowels, codas = _ONSETS.split(), _VOWELS.split(), _CODAS.split()
    words = _GLUE.split()
    known = set(words)
    while len(words) < _VOCABULARY_WORDS:
        num_syllables = rng.choices((1, 2, 3), weights=(2, 5, 3))[0]
        word = "".join(
            rng.choice(onsets) + rng.choice(vowels) + rng.choice(codas).strip("-")
            for _ in range(num_syllables)
        )
        if word not in known:
            known.add(word)
            words.append(word)
    return words


class TextSource:
    """An endless stream of sentences.

    Args:
        seed: any integer; equal seeds give equal sentences.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._words = _make_vocabulary()
        weights = (1.0 / (rank + 8) for rank in range(len(self._words)))
        self._cumulative = list(itertools.accumulate(weights))

    def sentence(self) -> str:
        """Returns the next sentence, 5 to 18 words long, without a trailing space."""
        num_words = self._rng.randint(5, 18)
        words = self._rng.choices(self._words, cum_weights=self._cumulative, k=num_words)
        if num_words > 10:
            words[num_words // 2] += ","
        if self._rng.random() < 0.1:
            words.append(str(self._rng.randint(2, 2999)))
        return " ".join(words).capitalize() + self._rng.choice("....?!")

    def paragraphs(self, num_chars: int) -> list[str]:
        """Returns paragraphs of four sentences with at least `num_chars` characters in all."""
        result: list[str] = []
        total = 0
        while total < num_chars:
            paragraph = " ".join(self.sentence() for _ in range(4))
            result.append(paragraph)
            total += len(paragraph)
        return result


def make_prompt(
    encode: Callable[[str], list[int]], num_tokens: int, *, seed: int, bos: int | None = None
) -> list[int]:
    """Makes one prompt of exactly `num_tokens` token ids; other seeds differ from the start.

    Args:
        encode: text -> token ids, without special tokens.
        num_tokens: length of the prompt, at least 1.
        seed: which text.
        bos: token id to put in front, for models that need one.
    """
    source = TextSource(seed)
    ids = [] if bos is None else [bos]
    ids += encode(f"Session {seed}. ")
    while len(ids) < num_tokens:
        ids += encode(source.sentence() + " ")
    return ids[:num_tokens]
