"""Write tokenizers.json: tiny vocabularies and the ids that their makers' libraries give texts.

    python3 -m venv .golden
    .golden/bin/pip install sentencepiece==0.2.3 tiktoken regex
    .golden/bin/python tests/golden/make_tokenizers.py

``sentencepiece`` holds models that SentencePiece trained, under the names of who does likewise:
"llama" puts a space before a text, "gemma" does not and has runs of spaces and newlines as tokens
of its own, "no_bytes" has no tokens for bytes. ``byte_level`` holds one vocabulary that tiktoken,
which Llama 3 and Qwen were made with, merges after each family's split.
"""

import io
import json
import unicodedata
from pathlib import Path

import sentencepiece
import tiktoken
from tiktoken._educational import bpe_train

TEXT = """\
The river runs past the old mill and under the stone bridge, and in spring it runs fast.
Nobody has milled grain there since 1907, but the wheel still turns when the water is high.
    for the_miller in range(1024):
        print("the miller's wheel", the_miller)
Children who can't swim aren't allowed near it; they've been told so 100 times, and they'll go.
Die Brücke über den Fluß wurde 1893 gebaut. Le café près du moulin est fermé l'hiver.
Other things: brother, mother, bother, smother, another; running, turning, milling, telling.
"""
PIECES = [
    "",
    " ",
    "   ",
    "the",
    " the",
    "  the mill",
    "the mill ",
    "the  river   runs",
    "another brother can't be running",
    "in 1907, 1024 and 31415",
    "line\nline\n\nline\r\n\tend\n",
    "Brücke, café, naïve",
    "日本語 と 🙂🙃 Ж",
    "▁the ▁",
    "\n    for the_miller in range(3):\n        print()",
    "aaaaaaa thethethe  otherother",
    "<0x0A>",
]


def sentencepiece_model(*, runs=(), **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=model,
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        character_coverage=0.999,
        user_defined_symbols=[*(run.replace(" ", "▁") for run in runs), "<add>"],
        minloglevel=2,
        **options,
    )
    maker = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    # Here only spaces become runs, so a run that a text spells out is left to others.
    texts = [
        *(text for text in PIECES if not (runs and "▁" in text)),
        *(f"the{run}mill{run}{run} the" for run in runs),
    ]
    # SentencePiece does not look for control tokens: what is between them are texts of their own.
    stretches = ["</s>", "<s>", "the mill", "</s>", " the", "<add>", "other", "<s>"]
    control = {"</s>", "<s>", "<add>"}
    ids = range(maker.vocab_size())
    kinds = [
        (maker.IsUnknown, 2),
        (maker.IsControl, 3),
        (maker.IsUnused, 5),
        (maker.IsByte, 6),
        (lambda i: 3 <= i < 4 + len(runs), 4),
    ]
    byte = maker.PieceToId("<0x00>")
    raws = [b"", "é日".encode(), b"\n", "日".encode()[:2], b"\xff" + "é".encode()]
    decoded = [
        [*maker.encode("the mill"), *(byte + b for b in raw), *maker.encode("the")]
        for raw in (raws if byte else [])
    ]
    decoded += [[i] for i in ids if maker.IdToPiece(i) in ("▁", "▁the", "▁▁▁▁", "the")]
    return {
        "pieces": [maker.IdToPiece(i) for i in ids],
        "scores": [round(maker.GetScore(i), 6) for i in ids],
        "types": [next((code for kind, code in kinds if kind(i)), 1) for i in ids],
        "encoded": {text: maker.encode(text) for text in texts}
        | {
            "".join(stretches): [
                i
                for stretch in stretches
                for i in (
                    [maker.PieceToId(stretch)] if stretch in control else maker.encode(stretch)
                )
            ]
        },
        "decoded": [
            [ids, maker.decode(ids)]
            for ids in [*map(maker.encode, texts), *decoded]
            if maker.unk_id() not in ids
        ],
    }


SPLITS = {
    name: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for name, digits in {"llama-bpe": "{1,3}", "qwen2": ""}.items()
}
# No two neighbors of this word form a token, so only the whole word can be found.
WHOLE = " qxzv"
# Each of these is split, or not, by one of the rules.
ACROSS = ["34", "Lx", " \n"]
CASES = [
    *PIECES,
    "the" + WHOLE + WHOLE,
    "THEY'LL they'Ll 'twas (the) \"mill\"",
    "mill...\n\n\n  the\n \nmill  \n",
    "12 123 1234 1234567, 1907x",
    "they'LLx, 'Lx",
    "mill \nthe \n the",
    "Bru\u0308cke cafe\u0301",
]


def byte_level_model():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable}
    spelled |= {byte: chr(256 + i) for i, byte in enumerate(others)}

    ranks = bpe_train(TEXT + " 1234 987", 380, SPLITS["llama-bpe"], visualise=None)
    for token in [*ACROSS, WHOLE]:
        ranks[token.encode()] = len(ranks)
    merges = [
        (token[:i], token[i:])
        for token in sorted(ranks, key=ranks.get)
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]

    def spell(token):
        return "".join(spelled[byte] for byte in token)

    encoded = {}
    for name, split in SPLITS.items():
        maker = tiktoken.Encoding(name, pat_str=split, mergeable_ranks=ranks, special_tokens={})
        form = "NFC" if name == "qwen2" else None
        encoded[name] = {
            text: maker.encode(unicodedata.normalize(form, text) if form else text)
            for text in CASES
            if form is None or WHOLE not in text
        }
    return {
        "tokens": [spell(token) for token in sorted(ranks, key=ranks.get)],
        "merges": [f"{spell(left)} {spell(right)}" for left, right in merges],
        "encoded": encoded,
    }


if __name__ == "__main__":
    data = {
        "sentencepiece": {
            "llama": sentencepiece_model(vocab_size=480, byte_fallback=True),
            "gemma": sentencepiece_model(
                vocab_size=460,
                byte_fallback=True,
                add_dummy_prefix=False,
                runs=["\n", "\n\n", "  ", "   "],
            ),
            "no_bytes": sentencepiece_model(vocab_size=200),
        },
        "byte_level": byte_level_model(),
    }
    (Path(__file__).parent / "tokenizers.json").write_text(
        json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"
    )
