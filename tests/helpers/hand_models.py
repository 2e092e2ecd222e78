"""Model folders with hand-made tokenizers of every kind that prompts must cope with, and chat templates good and bad."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.trainers import BpeTrainer, UnigramTrainer

CORPUS = [
    "The quick brown fox jumps over the lazy dog.\n\nWhat is the answer? Who asked it, and when?\n",
    'In 1984 there were 12,345 people; the town\'s mayor said "no".\n\n\nWhy? Because of the rain.  Two blanks.\t Tab.\r\n',
    "Question: what is it?\nAnswer: a fox!\n\nThe end.\n\n",
    "user\nsystem\nassistant\n",
] * 8
MARKERS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
# The splitting rule of the newer byte-level tokenizers: line breaks stick to what stands before them.
NEWER_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
TRIMMED = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}<|im_start|>"
INST = "{{ bos_token }}[INST] {{ messages[-1].content }} [/INST]"
REPEATS = "<|im_start|>{{ messages[-1].content }}<|im_end|>{{ messages[-1].content }}"
SHOUTS = "<|im_start|>{{ messages[-1].content | upper }}<|im_end|>"
COLLAPSES = "<|im_start|>{{ messages[-1].content | replace('\n', ' ') }}<|im_end|>"
CUTS_AT_MARK = "<|im_start|>{{ messages[-1].content.split('STOP')[0] }}<|im_end|>"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHATML


def byte_level(split: str | None = None) -> Tokenizer:
    """Byte-level BPE; `split` None is GPT-2's rule."""
    tokenizer = Tokenizer(BPE())
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=500, special_tokens=MARKERS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def digits_byte_level() -> Tokenizer:
    """GPT-2's rule after every digit was split off: blanks before a digit are tokenised otherwise than blanks before a letter."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def nfc_byte_level() -> Tokenizer:
    tokenizer = byte_level(NEWER_SPLIT)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def sentencepiece(legacy: bool) -> Tokenizer:
    """BPE with byte fallback over whole runs of text: `legacy` puts a blank before every run between markers, else before the first."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = BpeTrainer(vocab_size=600, special_tokens=MARKERS + bytes_, show_progress=False)
    tokenizer.train_from_iterator((line.replace("\n", " ") for line in CORPUS), trainer)
    tokenizer = Tokenizer.from_str(_without_added(tokenizer, bytes_))  # the bytes are vocabulary, no markers
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def _without_added(tokenizer: Tokenizer, contents: list[str]) -> str:
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["content"] not in contents]
    return json.dumps(definition)


def unigram() -> Tokenizer:
    """Unigram whose vocabulary holds the markers, so that plain text could reach them."""
    tokenizer = Tokenizer(Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    alphabet = sorted({char for line in CORPUS for char in line})
    trainer = UnigramTrainer(vocab_size=200, special_tokens=MARKERS, unk_token="<unk>", initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_level(words: list[str] | None = None) -> Tokenizer:
    """One token a word, split at blanks; the markers are words of the vocabulary."""
    known = [*MARKERS, *(words or sorted({word for line in CORPUS for word in line.split()}))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(MARKERS)
    return tokenizer


def adding_bos(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, putting <s> before every text."""
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return tokenizer


def with_added(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, chat_template: Any = None, **config: Any) -> Path:
    """A model folder as far as prompts are concerned."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
