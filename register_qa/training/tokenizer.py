"""Train the byte-level BPE tokenizer on generated text, and turn registers, questions and answers into token ids.

Any text can be encoded: what the merges never saw falls back to bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from register_qa.facts import Split
from register_qa.questions import Question, draw_questions
from register_qa.register import Register, draw_register
from register_qa.training.prose import PROSE

VOCABULARY = 2048
BEGIN = "<|begin|>"
END = "<|end|>"
TOKENIZER = "tokenizer.json"
# A word with the space before it, a number in pairs of digits, signs, and each line break alone: so a line break
# never joins its neighbours, and the tokens of a register do not depend on what is appended.
PIECES = r" ?\p{L}+| ?\p{N}{1,2}|\n| ?[^\s\p{L}\p{N}]+|[^\S\n]+"
TRAINING_REGISTERS = 200


def train_tokenizer() -> Tokenizer:
    """At most VOCABULARY tokens, begin and end among them; a prompt is encoded with the begin token before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCABULARY,
        min_frequency=1,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in (BEGIN, END)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    begin = _special_id(tokenizer, BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)])
    return tokenizer


def _training_text() -> Iterator[str]:
    for seed in range(TRAINING_REGISTERS):
        register = draw_register(seed, split=Split.TRAIN, holdings=100)
        yield register.text
        for question in draw_questions(register, seed, 60):
            yield f"{question.text} {question.answer}"
    yield PROSE


class Encoder:
    """Texts of the task to token ids, part by part: joined, they are the ids of the joined text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names: dict[str, tuple[int, int]] = {}
        self.begin, self.end = _special_id(tokenizer, BEGIN), _special_id(tokenizer, END)

    def register(self, register: Register) -> list[int]:
        """With the begin token before it."""
        return [self.begin, *self.text(register.text)]

    def question(self, question: Question) -> list[int]:
        return self.text(question.text)

    def answer(self, question: Question) -> list[int]:
        """The space before it included, the end token not."""
        return self.text(f" {question.answer}")

    def ids_and_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Of a part of a longer text; where in it each token ends, in characters."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return list(encoding.ids), [end for _, end in encoding.offsets]

    def name(self, subject: str) -> tuple[int, int]:
        """The first and the last token of a subject's name within a text."""
        if subject not in self._names:
            ids = self.text(f" {subject}")
            self._names[subject] = (ids[0], ids[-1])
        return self._names[subject]

    def text(self, text: str) -> list[int]:
        """A part of a longer text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _special_id(tokenizer: Tokenizer, name: str) -> int:
    token_id = tokenizer.token_to_id(name)
    if token_id is None:
        raise ValueError(f"tokenizer: has no {name} token")
    return token_id
