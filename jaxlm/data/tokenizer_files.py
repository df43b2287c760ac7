"""The files that define a tokenizer: a folder of a model, or one of

    tokenizer.json                        Hugging Face; beside it perhaps tokenizer_config.json, chat_template.jinja
    encoder.json + vocab.bpe              GPT-2's, and the same as vocab.json + merges.txt
    NAME.tiktoken                         ranks; how text is split into words goes by the NAME
    tokenizer.model                       SentencePiece (extra `data`), or ranks under that name

`tokenizer_config.json` says which tokens begin and end a document (bos_token, eos_token) and holds the chat template; without it
the usual names are looked for.
"""

import base64
import binascii
import hashlib
import json
import os
import pathlib
from typing import Any

from jaxlm.data.extras import needed
from jaxlm.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from partitioning.declaration import DeclarationError, nearest

# Names under which tokenizers know the end and the beginning of a document, the usual ones of base models first.
END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
)
BEGIN_TOKENS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<｜begin▁of▁sentence｜>", "[BOS]")

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_LLAMA3 = (
    "begin_of_text",
    "end_of_text",
    "reserved_special_token_0",
    "reserved_special_token_1",
    "finetune_right_pad_id",
    "reserved_special_token_2",
    "start_header_id",
    "end_header_id",
    "eom_id",
    "eot_id",
    "python_tag",
)

# Name of a rank file -> (how text is split into words, special tokens and their ids; None: after the ranks).
RANKS: dict[str, tuple[str, dict[str, int | None]]] = {
    "r50k_base": (_GPT2, {"<|endoftext|>": 50256}),
    "gpt2": (_GPT2, {"<|endoftext|>": 50256}),
    "p50k_base": (_GPT2, {"<|endoftext|>": 50256}),
    "cl100k_base": (
        _CL100K,
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "o200k_base": (_O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
    "tokenizer": (
        _CL100K,
        {f"<|{name}|>": None for name in (*_LLAMA3, *(f"reserved_special_token_{i}" for i in range(3, 248)))},
    ),  # Llama 3: tokenizer.model
}


def read(name: str, key: str) -> Tokenizer:
    """The tokenizer that the file or folder `name` defines.

    Args:
      key: the configuration key of the name, for messages.

    Raises:
      DeclarationError: there is none, it is damaged or of no known kind, or the package that reads it is not installed.
    """
    path = pathlib.Path(os.path.expanduser(name))
    if os.path.isdir(path):
        path = _in_folder(path, name, key)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DeclarationError(
            f"{key} = {name!r} is neither 'bytes' nor a tokenizer.json that can be read: {path}: "
            f"{error.strerror}. Names of a model hub are not looked up; give the path of the file."
        ) from None
    if path.name.endswith(("encoder.json", "vocab.json", "vocab.bpe", "merges.txt")):
        return _gpt2(path, name, key)
    if path.suffix == ".tiktoken" or (path.suffix == ".model" and _looks_like_ranks(content)):
        return _ranks(path, content, name, key)
    if path.suffix == ".model":
        return _sentencepiece(path, content, name, key)
    return _hugging_face(path, content, name, key)


def _in_folder(folder: pathlib.Path, name: str, key: str) -> pathlib.Path:
    for file in ("tokenizer.json", "encoder.json", "vocab.json", "tokenizer.model"):
        if (folder / file).is_file():
            return folder / file
    found = sorted([*folder.glob("*.tiktoken"), *folder.glob("*.model"), *folder.glob("*tokenizer.json")])
    if len(found) == 1:
        return found[0]
    raise DeclarationError(
        f"{key} = {name!r} is a folder without a tokenizer.json, encoder.json, vocab.json or tokenizer.model"
        + (f"; name one of its files: {', '.join(p.name for p in found)}." if found else ".")
    )


def _hugging_face(path: pathlib.Path, content: bytes, name: str, key: str) -> Tokenizer:
    import tokenizers  # a tenth of a second, of use only here

    try:
        model = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception
        raise DeclarationError(f"{key} = {name!r}: {path} is no Hugging Face tokenizer.json: {error}.") from None
    return _run_by_tokenizers(model, path, hashlib.sha256(content), name)


def _run_by_tokenizers(model: Any, path: pathlib.Path, digest: Any, name: str) -> Tokenizer:
    model.no_truncation()  # a file may carry both, and they would cut the corpus
    model.no_padding()
    special = {token.content: i for i, token in model.get_added_tokens_decoder().items() if token.special}
    vocab_size = 1 + max(model.get_vocab(with_added_tokens=True).values(), default=-1)
    return HuggingFaceTokenizer(
        "huggingface", name, vocab_size, sha256=digest.hexdigest(), special=special, model=model, **_beside(path, special)
    )


def _beside(path: pathlib.Path, special: dict[str, int]) -> dict[str, Any]:
    """eos_id, bos_id and chat_template: of the NAME_config.json beside NAME.json, else by the usual names."""
    config, file = {}, path.with_name(f"{path.stem}_config.json")
    if path.suffix in (".json", ".model", ".tiktoken") and file.is_file():
        try:
            config = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise DeclarationError(f"{file}, beside the tokenizer, cannot be read: {error}.") from None
        config = config if isinstance(config, dict) else {}

    def declared(field: str, usual: tuple[str, ...]) -> int | None:
        token = config.get(field)
        token = token.get("content") if isinstance(token, dict) else token
        if token in special:
            return special[token]
        return next((special[word] for word in usual if word in special), None) if field not in config else None

    return {
        "eos_id": declared("eos_token", END_TOKENS),
        "bos_id": declared("bos_token", BEGIN_TOKENS),
        "chat_template": _template(path, config.get("chat_template")),
    }


def _template(path: pathlib.Path, found: Any) -> str | None:
    """The chat template: of a file of its own, which goes before, or of tokenizer_config.json (one, or several by name)."""
    file = path.with_name("chat_template.jinja")
    if path.name in ("tokenizer.json", "tokenizer.model") and file.is_file():
        return file.read_text("utf-8")
    if isinstance(found, list):
        found = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}.get("default")
    return found if isinstance(found, str) else None


def _gpt2(path: pathlib.Path, name: str, key: str) -> Tokenizer:
    """A vocabulary and merges, bytes spelt as printable characters (Radford et al. 2019)."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    pairs = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
    vocabulary_name, merges_name = next(pair for pair in pairs if path.name.endswith(pair))
    stem = path.name.removesuffix(vocabulary_name).removesuffix(merges_name)
    files = path.with_name(stem + vocabulary_name), path.with_name(stem + merges_name)
    for file in files:
        if not file.is_file():
            raise DeclarationError(f"{key} = {name!r}: it takes two files, and {file} is missing.")
    try:
        vocabulary, merges = models.BPE.read_file(*map(str, files))
        content = b"\n".join(file.read_bytes() for file in files)
    except Exception as error:  # the library raises plain Exception
        raise DeclarationError(f"{key} = {name!r}: {files[0]} and {files[1]} are no vocabulary and merges: {error}.") from None
    model = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    model.add_special_tokens([token for token in (*END_TOKENS, *BEGIN_TOKENS) if token in vocabulary])
    return _run_by_tokenizers(model, path.with_name("tokenizer.json") if not stem else path, hashlib.sha256(content), name)


def _looks_like_ranks(content: bytes) -> bool:
    line = content[:200].split(b"\n")[0].split()
    return len(line) == 2 and line[1].isdigit()


def _ranks(path: pathlib.Path, content: bytes, name: str, key: str) -> Tokenizer:
    """tiktoken's ranks: two neighbours become the token that they spell, the lowest rank first; as merges of the same order."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    known = path.name.split(".")[0]
    if known not in RANKS:
        raise DeclarationError(
            f"{key} = {name!r}: a rank file does not say how text is split into words; its name does: "
            f"{nearest(known, RANKS)} Rename it, or convert it to a tokenizer.json."
        )
    pattern, declared = RANKS[known]
    ranks = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DeclarationError(f"{key} = {name!r}: {path}:{number} is no token in base64 and its rank.") from None
    spelling = _printable_bytes()
    vocabulary = {"".join(spelling[b] for b in token): rank for token, rank in ranks.items()}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        splits = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += sorted(splits, key=lambda split: (ranks[split[0]], ranks[split[1]]))
    spelt = [tuple("".join(spelling[b] for b in part) for part in pair) for pair in merges]
    after = 1 + max(ranks.values(), default=-1)
    special = {word: after + i if at is None else at for i, (word, at) in enumerate(declared.items())}
    vocabulary |= special
    model = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=spelt, ignore_merges=True))
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(list(special))
    return _run_by_tokenizers(model, path, hashlib.sha256(content), name)


def _printable_bytes() -> dict[int, str]:
    """Byte to the character that stands for it in byte-level vocabularies: itself where it can be seen, else one from 256 on."""
    plain = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def _sentencepiece(path: pathlib.Path, content: bytes, name: str, key: str) -> Tokenizer:
    sentencepiece = needed("sentencepiece", "sentencepiece", f"{key} = {name!r}: a SentencePiece model")
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.load_from_serialized_proto(content)
    except Exception as error:  # RuntimeError, of whatever the library meets
        raise DeclarationError(f"{key} = {name!r}: {path} is no SentencePiece model: {error}.") from None
    special = {model.id_to_piece(i): i for i in range(model.get_piece_size()) if model.is_control(i)}
    found = _beside(path, special)
    ends = {"eos_id": model.eos_id(), "bos_id": model.bos_id()}
    found |= {name: (i if i >= 0 else None) for name, i in ends.items() if found[name] is None}
    return SentencePieceTokenizer(
        "sentencepiece",
        name,
        model.get_piece_size(),
        sha256=hashlib.sha256(content).hexdigest(),
        special=special,
        model=model,
        **found,
    )
