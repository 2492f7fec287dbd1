#!/usr/bin/env python3
"""Write tests/golden/tokenizer_hashes.json and tokenizer_strings.json with the Python package `tokenizers`, the
reference implementation of tokenizer.json (pip install tokenizers). The build and the tests do not need it.

    tokenizer_hashes.py --data DIR      DIR holds gsm8k/test.jsonl, humaneval/HumanEval.jsonl.gz, mgsm/mgsm_LANG.tsv and
                                        mt_bench/question.jsonl

A hash is FNV-1a, 64 bits. `ids`: over the ids of every text in turn as 4 little-endian bytes each, four bytes 0xff behind
each text. `normal`: over the bytes of every normalised text, a byte 0xff behind each. Texts of a JSONL row come in the order
of FIELDS; of a TSV row, what stands before the first tab."""

import argparse
import gzip
import json
import pathlib
import struct

import tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden"
FIELDS = ("question", "answer", "prompt", "canonical_solution", "test", "turns")
BENCHMARKS = ["gsm8k/test.jsonl", "humaneval/HumanEval.jsonl.gz", "mt_bench/question.jsonl"] + [
    f"mgsm/mgsm_{language}.tsv" for language in "bn de en es fr ja ru sw te th zh".split()]
SAMPLES = ["gsm8k_demo.jsonl", "humaneval_demo.jsonl"] + [
    f"mgsm_{language}.tsv" for language in "de en es fr ja zh".split()]

SPLIT = json.loads((ROOT / "models/tiny/tokenizer.json").read_text())["pre_tokenizer"]
LLAMA = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
         "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")


def with_pattern(pattern):
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        dict(SPLIT["pretokenizers"][0], pattern={"Regex": pattern}), SPLIT["pretokenizers"][1]]}}


# The tiny tokenizer with parts of its file replaced: other kinds of tokenizer that are supported.
VARIANTS = {
    "no normalizer": {"normalizer": None},
    "NFD": {"normalizer": {"type": "NFD"}},
    "NFKC": {"normalizer": {"type": "NFKC"}},
    "NFKD": {"normalizer": {"type": "NFKD"}},
    "NFD, then NFC": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "NFC"}]}},
    "GPT-2's expression": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                                             "use_regex": True}},
    "an expression with bounds": with_pattern(LLAMA),
    "an expression that leaves gaps": with_pattern("\\p{N}{2}|\\p{P}++"),
}

STRINGS = [
    "", "\n", " ", "  ", "\t", "\r", "\r\n", "\n\n\n", "\r\n\r\n", "\n\r", " \n", "\n ", "  \n  \n", "a\r\nb\rc\nd\r\n",
    " \r\n \n\r  x", "\t\tif x:\n\t\t\treturn  y", "    four", "a    b", "trailing   ", "   leading", "a \n b", "a\n\n\nb",
    "x = {\n    'a': 1,\n\n}\n", "0", "12", "123456789", "3.14159", "1,234,567", "-5", "2+2=4", "½ ² Ⅷ ٣٤٥ १२३ ๑๒๓",
    "it's IT'S It'S i'm I'M we've WE'VE we're WE'RE they'll THEY'LL he'd HE'D can't CAN'T", "'s 'S 't 'T 're 'RE 'll 'LL",
    "'sam 'Dan ''s '''' 'x ’s don’t", "'ſ 'K", "rock'n'roll", "'", "''", "<|endoftext|>", "<|mask|>", "<role>", "</role>",
    "<role>HUMAN</role>hi<|role_end|><role>ASSISTANT</role>", "a<|mask|>b <|mask|> c<|mask|><|mask|>",
    "<|endoftext|><|endoftext|>\n<|startoftext|>", "<|mask|", "<<|mask|>>", "< |mask|>", "<ROLE>", "<role >",
    "detailed thinking off", "🙂", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "a🙂b 🙂 c", "☃️ ☂",
    "é", "e\u0301", "e\u0301\u0301", "\u0301", "a\u0323\u0307", "a\u0307\u0323", "\u1e9b\u0323", "Å \u212b A\u030a", "ﬁ ﬀ ㎏ ①",
    "한국어", "\u1112\u1161\u11ab\u1100\u116e\u11a8", "が か\u3099 ハ\u309a", "q\u0307\u0323q\u0323\u0307", "\u0340\u0341\u0374\u037e",
    "a\u200bb", "a\u200cb\u200db", "\ufeffbom", "a\ufeffb", "\u200e\u200fx", "a\u00adb", "a\u2060b", "\u180e", " \u180e x\u180e",
    "\u0085", "a\u0085b \u0085", "a\u00a0b", "a\u2003b\u2009c\u202fd", "a\u2028b\u2029c", "\u3000全角\u3000", "\u000b\u000c", "a\u001cb\u001fc",
    "\u0000", "a\u0000b", "\u007f", "\u0001\u0002",
    "我喜欢吃苹果。", "彼は12個のりんごを買いました。", "混ぜた text と 数字123。", "𠮷野家", "ไทยไม่มีช่องว่าง", "แอปเปิ้ล 5 ผล",
    "తెలుగు భాష", "ఒక రోజులో\u200c 3", "বাংলা ভাষা \u09af\u09bc \u09df", "हिन्दी में", "தமிழ்", "עברית 123 שלום", "مرحبا بالعالم ١٢٣", "\u202eabc\u202c",
    "Привет, мир!", "Ελληνικά", "Türkçe İıŞş", "Straße", "naïve café", "L\u00f8rd", "Đặng Văn Ngữ", "ԱԲԳ", "ქართული",
    "def f(x):\n    \"\"\"Doc.\n\n    >>> f(1)\n    2\n    \"\"\"\n    return x+1\n", "https://example.org/a?b=c&d=%20#e",
    "$5.00 each; 20% off!!", "(a) [b] {c} <d> /e/ \\f\\ `g` ~h~ ^i^ |j|", "!!!???...", "----====____", "#### 42", "x²+y²=z²",
    "a" * 600, " " * 600, "\n" * 600, "ab " * 200, " \n" * 300, "-" * 600, "7" * 300, "漢" * 200, "é" * 300, "e" + "\u0301" * 100,
    "'" * 300, " " * 300 + "x", "x" + " " * 300, "\t" * 100 + "\n" + "\t" * 100, "etaoinshrdlu" * 50, "🙂" * 100,
]

# What random texts are made of.
PIECES = ["e", "a", "t", "the", "A", "é", "'", "'s", "'LL", "1", "23", "٣", ".", ",", "-", "(", "<role>", "<|mask|>", " ", " ",
          "  ", "\n", "\r\n", "\t", "\u0085", "\u00a0", "\u180e", "\u200b", "\u200d", "\u2028", "\u3000", "\ufeff", "\u0000",
          "\u0301", "\u0300", "\u030a", "\u0323", "\u0328", "\u0345", "\u0315", "\u1100", "\u1161", "\u11a8", "각", "か", "\u3099",
          "Å", "ﬁ", "ſ", "ß", "İ", "漢", "数", "𠮷", "ไ", "ม", "\u0e49", "త", "\u0c46", "\u0c56", "\u09af", "\u09bc", "\u09c7",
          "\u09be", "ש", "\u05bc", "\u05c1", "م", "\u0651", "🙂", "🏽", "\U0001d157", "\U0001d165", "ω", "Щ"]
RANDOM_TEXTS = 4000


def random_texts():
    """Texts of up to 39 pieces, by a linear congruential generator of 64 bits."""
    x = 1

    def draw(n):
        nonlocal x
        x = (x * 6364136223846793005 + 1442695040888963407) & 0xffffffffffffffff
        return (x >> 33) % n

    for _ in range(RANDOM_TEXTS):
        yield "".join(PIECES[draw(len(PIECES))] for _ in range(draw(40)))


class Fnv:
    def __init__(self):
        self.value = 0xcbf29ce484222325

    def add(self, data):
        h = self.value
        for byte in data:
            h = (h ^ byte) * 0x100000001b3 & 0xffffffffffffffff
        self.value = h

    def __str__(self):
        return f"{self.value:016x}"


def texts_of(path):
    opened = gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")
    with opened as f:
        for line in f.read().decode("utf-8").split("\n"):
            if not line:
                continue
            if ".tsv" in path.name:
                yield line.split("\t")[0]
                continue
            row = json.loads(line)
            for field in FIELDS:
                value = row.get(field, [])
                yield from value if isinstance(value, list) else [value]


def reference(document, **parts):
    """The tokenizer of the document with some parts replaced."""
    return tokenizers.Tokenizer.from_str(json.dumps({**document, **parts}))


def summary(tokenizer, texts):
    ids, normal, count, tokens, changed = Fnv(), Fnv(), 0, 0, 0
    for text in texts:
        encoded = tokenizer.encode(text, add_special_tokens=False).ids
        plain = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        ids.add(struct.pack(f"<{len(encoded)}i", *encoded) + b"\xff\xff\xff\xff")
        normal.add(plain.encode() + b"\xff")
        count += 1
        tokens += len(encoded)
        changed += plain != text
    return dict(texts=count, tokens=tokens, changed=changed, ids=str(ids), normal=str(normal))


def write(path, head, lists):
    """JSON with one line an item."""
    lines = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    for key, items in lists.items():
        lines.append(f'"{key}": [\n' + ",\n".join(json.dumps(item) for item in items) + "\n]")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=pathlib.Path)
    data = parser.parse_args().data
    document = json.loads((ROOT / "models/tiny/tokenizer.json").read_text())
    plain, control = reference(document, added_tokens=[]), reference(document)
    head = dict(reference=f"tokenizers {tokenizers.__version__}", tokenizer="models/tiny/tokenizer.json")

    write(GOLDEN / "tokenizer_hashes.json", head, dict(
        samples=[dict(file=f, **summary(plain, texts_of(ROOT / "datasets/samples" / f))) for f in SAMPLES],
        benchmarks=[dict(file=f, **summary(plain, texts_of(data / f))) for f in BENCHMARKS],
        # every character of the basic plane between two letters
        characters=[summary(plain, (f"a{chr(c)}b" for c in range(0x10000) if not 0xd800 <= c < 0xe000))],
        random=[dict(pieces=PIECES, **summary(plain, random_texts()))],
        variants=[dict(name=name, parts=parts, **summary(reference(document, added_tokens=[], **parts), STRINGS))
                  for name, parts in VARIANTS.items()]))

    strings = []
    for text in STRINGS:
        item = dict(text=text, ids=plain.encode(text, add_special_tokens=False).ids)
        known = control.encode(text, add_special_tokens=False).ids
        strings.append(item if known == item["ids"] else dict(item, control_ids=known))
    write(GOLDEN / "tokenizer_strings.json", head, dict(strings=strings))


if __name__ == "__main__":
    main()
