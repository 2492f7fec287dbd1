"""The runtime's exactness: every exact combination of modes gives the dense executor's tokens, on every kind of demo row,
on any number of ranks; and each cause of a fallback, provoked, is counted and ends as the dense executor does."""
import functools

import h5py
import numpy

import cli
from cli import ROOT, epoch, new, same, words
from same_tokens import compare

SAMPLES = ROOT / "datasets/samples"
SOME = ["--data", f"humaneval:{SAMPLES}/humaneval_demo.jsonl@1-3", "--data", f"mgsm:{SAMPLES}/mgsm_zh.tsv@1-3",
        "--data", f"mgsm:{SAMPLES}/mgsm_fr.tsv@1-2"]
ROWS = 4 + 3 + 3 + 2


def decode(name, *more, ranks=1, fault=None):
    out = new(f"{name}.h5")
    rc, _, stderr = epoch(*words(out, data=f"gsm8k:{SAMPLES}/gsm8k_demo.jsonl@1-4", more=[*SOME, "--gen-len", 128, *more]),
                          ranks=ranks, limit=300, env={"EPOCH_FAULT_PLAN": fault} if fault else None)
    same((rc, stderr), (0, ""))
    return out


@functools.cache
def full():
    return decode("full", "--mode", "full", "--batch", 64)


def identical(*files):
    found, count, tokens = compare(files[0], files[1:])
    same(found, [])
    same(count, ROWS)
    assert tokens > 500, tokens


def column(file, name):
    with h5py.File(file) as h:
        return h[f"blocks/{name}"][:].astype(float)


EXACT = {
    "no relaxation at work": ["--mode", "epoch", "--refresh", 1, "--atlas-budget", 32],
    "no support": ["--mode", "no-atlas", "--refresh", 1],
    "no cache, whole support": ["--mode", "no-lsp", "--atlas-budget", 32],
    "dense payload": ["--mode", "no-lane", "--refresh", 1, "--atlas-budget", 32],
    "shared plans": ["--mode", "epoch", "--refresh", 1, "--atlas-budget", 32, "--cohort", "batch"],
}


def test_exact_combinations():
    for i, (name, more) in enumerate(EXACT.items()):
        batch, ranks = ((1, 2), (64, 4), (64, 2), (7, 1), (12, 2))[i]
        identical(full(), decode(f"exact{i}", *more, "--batch", batch, ranks=ranks))


def test_dense_payload_changes_no_token():
    """no-lane moves and computes every row, and takes what epoch takes."""
    a, b = decode("lane", "--batch", 6, ranks=2), decode("nolane", "--mode", "no-lane", "--batch", 6, ranks=2)
    identical(a, b)
    with h5py.File(a) as x, h5py.File(b) as y:
        assert x["phases/rows_dispatched"][:].sum() < 0.8 * y["phases/rows_dispatched"][:].sum()


def test_relaxations_are_at_work():
    file = decode("defaults", "--batch", 8)
    iterations, cached = column(file, "iterations"), column(file, "cached_rows")
    assert cached.sum() > 0.3 * 32 * iterations.sum()
    same((cached + column(file, "fresh_rows")).tolist(), (32 * iterations).tolist())
    hot = iterations - column(file, "cold")
    support = numpy.nansum(numpy.where(hot > 0, column(file, "support_size"), 0) * hot) / hot.sum()
    assert 8 < support < 24, support


def test_rows_fallbacks():
    """Every hot iteration falls back: all rows are computed, nothing is cached, the tokens are the dense executor's."""
    for cause in ("miss", "version", "overdue"):
        file = decode(cause, "--mode", "no-atlas", "--batch", 5, ranks=2, fault=cause)
        identical(full(), file)
        hot = column(file, "iterations") - column(file, "cold")
        same(column(file, f"rows_{cause}").tolist(), hot.tolist())
        same(column(file, "cached_rows").sum(), 0)


def test_remasked_position():
    """A decoded position that is masked again forces one full pass, and is decoded again, as in the dense executor."""
    a = decode("illegal_full", "--mode", "full", "--batch", 3, fault="illegal")
    b = decode("illegal", "--mode", "no-atlas", "--refresh", 1, "--batch", 64, fault="illegal")
    identical(a, b)
    c = decode("illegal_cached", "--mode", "no-atlas", "--batch", 3, fault="illegal")
    for file in (a, c):
        blocks, long = column(file, "rows_illegal"), column(file, "iterations") > 3
        assert (blocks <= 1).all() and blocks[long].mean() > 0.9


def test_reports_one_forward_late():
    """As on a GPU: the host hears of a forward while the next one runs. Tokens and all that is counted of blocks and rows
    stay as they are, beside a row that breaks, and through a stop and its resume."""
    def run(name, late, *more, want=1):
        out = cli.scratch / f"{name}.h5"
        rc, _, _ = epoch(*words(out, data=f"gsm8k:{SAMPLES}/gsm8k_demo.jsonl@1-6", more=[*SOME, "--gen-len", 96, *more]),
                         ranks=3, limit=300, env={"EPOCH_FAULT_LATE": str(late), "EPOCH_FAULT_ROW": "3",
                                                  "EPOCH_FAULT_DELAY": f"forward:{0.02 if want == 75 else 0}"})
        same(rc, want)
        return out
    at_once, late = run("at_once", 0, "--batch", 5), run("late", 1, "--batch", 5)
    run("stopped", 1, "--batch", 4, "--time-budget", 1.5, want=75)
    stopped = run("stopped", 1, "--batch", 4, "--resume")
    same(compare(at_once, [late, stopped])[0], [])
    for name in ("cold", "refresh", "hot_skip", "fresh_rows", "cached_rows", "layer_rebuilds", "support_size",
                 "distinct_experts", "coverage"):
        numpy.testing.assert_array_equal(column(at_once, name), column(late, name))
    with h5py.File(at_once) as x, h5py.File(late) as y:
        for name in ("rows_dispatched", "rows_received", "generated_tokens", "rows_fresh", "rows_cached"):
            same(x[f"phases/{name}"][:].sum(axis=0).tolist(), y[f"phases/{name}"][:].sum(axis=0).tolist())
        assert y["phases/forwards"][0] > x["phases/forwards"][0] # it was late: finished slots sat out a forward


def test_universe_fallback():
    """Every layer routes over all experts: with no cache, the dense executor's tokens."""
    file = decode("universe", "--mode", "no-lsp", "--batch", 6, ranks=2, fault="universe")
    identical(full(), file)
    hot = column(file, "iterations") - column(file, "cold")
    same(column(file, "universe").tolist(), (7 * hot).tolist())
    # and by itself: with no weight on mass, a row that lacks two experts scores nothing
    natural = decode("natural", "--atlas-mass", 0, "--atlas-coverage", 1, "--atlas-share", 1, "--atlas-budget", 4,
                     "--atlas-extra", 0, "--batch", 8)
    assert column(natural, "universe").sum() > 0


if __name__ == "__main__":
    cli.main(globals())
