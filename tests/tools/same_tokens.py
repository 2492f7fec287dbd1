"""Results files of the same rows hold the same answers: token ids, iterations of every block, status.

    /usr/bin/python3 tests/tools/same_tokens.py FIRST.h5 OTHER.h5 ...

Rows are matched by key (dataset, id, turn), so files may differ in order. Prints one line; exit 1 at a difference."""
import sys

import h5py


def answers(path):
    with h5py.File(path, "r") as f:
        o, tokens, iterations = f["outputs"], f["tokens"][:], f["blocks/iterations"][:]
        of_block = f["blocks/output_row"][:]
        text = {name: o[name].asstr()[:] for name in ("dataset", "id", "status", "finish_reason")}
        turn, at, count = o["turn"][:], o["token_offset"][:], o["n_tokens"][:]
        return {
            (text["dataset"][i], text["id"][i], int(turn[i])): (
                tokens[at[i] : at[i] + count[i]].tolist(),
                iterations[of_block == i].tolist(),
                text["status"][i],
                text["finish_reason"][i],
            )
            for i in range(len(turn))
        }


def compare(first, others):
    """The differences, as lines; and how many rows and tokens are compared."""
    want = answers(first)
    found = []
    for path in others:
        got = answers(path)
        if got.keys() != want.keys():
            found.append(f"{path}: {len(got)} rows, {first} has {len(want)}, {len(got.keys() & want.keys())} in common")
            continue
        for key, row in want.items():
            for what, a, b in zip(("token ids", "iterations", "status", "finish_reason"), row, got[key]):
                if a != b:
                    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
                    found.append(f"{path}: {key}: {what} differ from {first} at {at}: {b[at:at + 8]}, want {a[at:at + 8]}")
                    break
    return found, len(want), sum(len(row[0]) for row in want.values())


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    found, rows, tokens = compare(sys.argv[1], sys.argv[2:])
    for line in found[:20]:
        print(line)
    if found:
        sys.exit(f"{len(found)} differences")
    print(f"{rows} rows, {tokens} tokens: the same in {len(sys.argv) - 1} files")


if __name__ == "__main__":
    main()
