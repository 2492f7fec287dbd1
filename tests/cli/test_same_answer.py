"""The tokens of a prompt depend on the checkpoint and the settings alone. A dozen runs of 12 prompts: batch 1, 2, 7, 64 and
ranks 1, 2, 3, 4, 7, each of them with each value of the settings that only say how to compute. All 20 pairs of batch and
ranks, over 64 prompts, are in tests/full.sh."""
import functools
import itertools
import json

import cli
from cli import DEMO, epoch, new, same, words
from same_tokens import compare

# batch, ranks, threads of a rank, weights, prompt blocks a forward, order of the rows
RUNS = [
    (1, 1, 2, "stored", 8, "forward"),
    (2, 1, 1, "f32", 8, "backward"),
    (64, 1, 1, "stored", 1, "forward"),
    (7, 2, 1, "stored", 8, "backward"),
    (1, 2, 2, "f32", 1, "forward"),
    (64, 2, 2, "stored", 8, "forward"),
    (2, 3, 2, "f32", 1, "backward"),
    (64, 3, 1, "stored", 8, "forward"),
    (7, 4, 2, "f32", 1, "forward"),
    (1, 4, 1, "stored", 8, "backward"),
    (64, 7, 1, "f32", 8, "backward"),
    (2, 7, 2, "stored", 1, "forward"),
]
PROMPTS = 12


@functools.cache
def rows(order):
    lines = DEMO.read_text().splitlines()[:PROMPTS]
    made = [json.dumps({"id": f"q{i}", "prompt": json.loads(line)["question"]}) for i, line in enumerate(lines)]
    path = cli.scratch / f"{order}.jsonl"
    path.write_text("\n".join(made if order == "forward" else reversed(made)) + "\n")
    return f"jsonl:{path}"


def decode(name, run, *more):
    batch, ranks, threads, weights, blocks, order = run
    out = new(f"{name}.h5")
    rc, _, stderr = epoch(*words(out, data=rows(order), more=[
        "--gen-len", 96, "--batch", batch, "--threads", threads, "--weights", weights, "--prefill-blocks", blocks, *more,
    ]), ranks=ranks, limit=300)
    same((rc, stderr), (0, ""))
    return out


def identical(files):
    found, count, tokens = compare(files[0], files[1:])
    same(found, [])
    same(count, PROMPTS)
    assert tokens > 500, tokens


def test_the_dozen_is_a_cover():
    for first, other in itertools.product((0, 1), (2, 3, 4, 5)):
        met = {(run[first], run[other]) for run in RUNS}
        same(met, set(itertools.product({run[first] for run in RUNS}, {run[other] for run in RUNS})))


def test_dense():
    """The exact executor. Without the Atlas, and with every row fresh, the runtime gives the same once more."""
    files = [decode(f"dense{i}", run, "--mode", "full") for i, run in enumerate(RUNS)]
    files.append(decode("fresh", (7, 2, 1, "f32", 8, "forward"), "--mode", "no-atlas", "--refresh", 1))
    identical(files)


def test_epoch():
    """With all relaxations on, one sequence a cohort: neighbours and ranks still do not matter."""
    identical([decode(f"epoch{i}", RUNS[i], "--mode", "epoch") for i in (0, 6, 8, 10)])


if __name__ == "__main__":
    cli.main(globals())
