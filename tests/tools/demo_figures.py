"""All 550 demo items beside the figures in models/tiny/README.md, which were measured in bf16.

    /usr/bin/python3 tests/tools/demo_figures.py SCORED.h5

Pooled accuracy within 1.5 points, iterations a block within 3 % (each set weighted by its blocks here); else exit 1."""
import collections
import sys

import h5py

# set: items, accuracy, iterations a block
README = {
    "gsm8k": (200, 0.975, 9.76),
    "mgsm_de": (50, 0.94, 8.68),
    "mgsm_en": (50, 0.90, 10.06),
    "mgsm_es": (50, 0.92, 8.78),
    "mgsm_fr": (50, 0.96, 8.41),
    "mgsm_ja": (50, 0.94, 8.70),
    "mgsm_zh": (50, 0.86, 9.70),
    "humaneval": (50, 0.98, 7.32),
}


def main():
    with h5py.File(sys.argv[1]) as f:
        scores, dataset = f["scores"], f["outputs/dataset"].asstr()[:]
        right = {
            name: (rows, correct)
            for name, rule, rows, correct in zip(
                scores["dataset"].asstr()[:], scores["rule"].asstr()[:], scores["rows"][:], scores["correct"][:]
            )
            if rule in ("numeric", "pass@1")
        }
        blocks, iterations = collections.Counter(), collections.Counter()
        for row, n in zip(f["blocks/output_row"][:], f["blocks/iterations"][:]):
            blocks[dataset[row]] += 1
            iterations[dataset[row]] += int(n)
    print(f"{'set':10} {'right':>10} {'README':>7} {'iterations a block':>19} {'README':>7}")
    for name, (items, accuracy, steps) in README.items():
        rows, correct = right[name]
        assert rows == items, (name, rows, items)
        print(f"{name:10} {correct:4} of {rows:3} {accuracy * items:7.0f} {iterations[name] / blocks[name]:19.2f} {steps:7.2f}")
    items = sum(n for n, _, _ in README.values())
    got, want = sum(c for _, c in right.values()) / items, sum(n * a for n, a, _ in README.values()) / items
    steps = sum(iterations.values()) / sum(blocks.values())
    wanted = sum(blocks[name] * s for name, (_, _, s) in README.items()) / sum(blocks.values())
    print(f"pooled     {got:.4f}, README {want:.4f}: {100 * (got - want):+.2f} points, want at most 1.5 apart")
    print(f"pooled     {steps:.3f} iterations a block, README {wanted:.3f}: {100 * (steps / wanted - 1):+.2f} %, want at most 3")
    sys.exit(abs(got - want) > 0.015 or abs(steps / wanted - 1) > 0.03)


if __name__ == "__main__":
    main()
