"""Tiny tokenizers to test with."""

import pytest

TEXT = "Naïve café — 日本語 🙂👩‍🚀 end.\n"


def build_tokenizer(path, kind="byte_level", special=("<|im_end|>", "<|endoftext|>"), **options):
    """Writes a tiny tokenizer.json, trained on TEXT, and returns its path. `options` change the model before it is saved."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    if kind == "byte_level":
        model = Tokenizer(models.BPE())
        model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        model.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=300, special_tokens=list(special),
                                                                  initial_alphabet=alphabet, show_progress=False))
    else:                                      # Llama 2's shape: spaces as a mark, unknown characters as bytes
        vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{i:02X}>": 2 + i for i in range(256)}}
        for piece in ("▁", "e", "n", "d", ".", "C", "a", "f"):
            vocab[piece] = len(vocab)
        model = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
        model.pre_tokenizer = pre_tokenizers.Metaspace()
        model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
        model.add_special_tokens(["<unk>", "</s>"])
    for change in options.values():
        change(model)
    model.save(str(path))
    return str(path)


@pytest.fixture(scope="session")
def build():
    return build_tokenizer
