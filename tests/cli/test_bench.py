"""epoch bench on the CPU: the text and the file say the same, count what the schedule says, and refuse what makes no sense."""
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time

import h5py
import numpy

import cli
from cli import ROOT, epoch, holds, new, same

SCHEDULE = ROOT / "tests/bench/schedule.json"
SMALL = {"num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 500, "intermediate_size": 96, "moe_intermediate_size": 32,
         "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 16, "num_experts_per_tok": 2, "n_group": 4,
         "topk_group": 2, "eos_token_id": 498, "pad_token_id": 498, "mask_token_id": 499}


def shape(name):
    """A config.json of a small model, like models/tiny."""
    path = cli.scratch / f"{name}.json"
    path.write_text(json.dumps(json.loads((ROOT / "models/tiny/config.json").read_text()) | SMALL))
    return path


def bench(*more, ranks=0, want=0):
    """ranks 0: without mpirun."""
    words = ["bench", "--device", "cpu", *more]
    if ranks:
        rc, stdout, stderr = epoch(*words, ranks=ranks)
    else:
        done = subprocess.run([sys.argv[1], *map(str, words)], capture_output=True, text=True, timeout=60, cwd=ROOT)
        rc, stdout, stderr = done.returncode, done.stdout, done.stderr
    same((rc, stderr if rc == 0 else ""), (want, ""))
    return stdout if rc == 0 else stderr


def table(stdout):
    """The rows under the head, by column."""
    lines = [line.split() for line in stdout.splitlines() if re.match(r"(epoch|full|no-\w+) ", line)]
    names = ["mode", "prefix", "batch", "cohort", "support", "forwards", "ms", "floor_ms", "percent", "ms_block",
             "tokens_per_second", "idle", "rows", "fresh", "live", "experts"]
    return [dict(zip(names, line)) for line in lines]


def test_text_and_file():
    out = new("bench.h5")
    stdout = bench("--shape", shape("a"), "--mode", "full,epoch,no-lane", "--batch", "1,3", "--cohort", "1,0", "--prefix",
                   "0,64", "--support", "6,0", "--schedule", SCHEDULE, "--blocks", 2, "--out", out)
    holds(stdout, "# synthetic: random weights and tokens, seed 1; no model's output", "3 layers, hidden 64, 16 experts, top 2",
          "235 patterns; 2 blocks a sequence", "# below each row, ms of every phase, from the same forwards once more")
    rows = table(stdout)
    # full once, the others with each support; a batch of one has one cohort only
    same([(r["mode"], r["prefix"], r["batch"], r["cohort"], r["support"]) for r in rows],
         [(m, p, b, b if c == "0" else "1", s) for p in ("0", "64") for c in "10" for b in ("1", "3")
          if (b, c) != ("1", "0") for m, s in (("full", "-"), ("epoch", "6"), ("epoch", "-"), ("no-lane", "6"), ("no-lane", "-"))])
    with h5py.File(out) as f:
        at, b = dict(f.attrs), {name: data[:] for name, data in f["bench"].items()}
        same((bool(at["synthetic"]), bool(at["stand_in"]), at["device"], int(at["ranks"]), int(at["layers"])),
             (True, False, "cpu", 1, 3))
        assert at["version"] and at["device_name"] and at["schedule"].endswith("schedule.json")
        same([m.decode() for m in b["mode"]], [r["mode"] for r in rows])
        same(f["bench/ms"].attrs["unit"], "ms")
    for name in ("prefix", "batch", "cohort", "forwards"):
        same(b[name].tolist(), [int(r[name]) for r in rows])
    for name, digits in (("ms", 3), ("ms_block", 2), ("rows", 0), ("fresh", 0), ("live", 0), ("experts", 1)):
        numpy.testing.assert_allclose(b[name], [float(r[name]) for r in rows], atol=0.51 * 10**-digits)
    assert numpy.isnan(b["floor_ms"]).all() and numpy.isnan(b["percent"]).all()  # no ceilings of a CPU
    assert numpy.isnan(b["ratio"]).tolist() == [r["mode"] == "full" for r in rows]
    phases = [name.decode() for name in b["phase_names"]]
    timed = b["phase_ms"] > 0
    assert timed[:, [phases.index(p) for p in ("attention", "route", "experts", "merge", "head", "decode")]].all()
    full, epoch_ = b["mode"] == b"full", b["mode"] == b"epoch"
    same(b["fresh"][full].tolist(), b["rows"][full].tolist())
    assert (b["fresh"][epoch_] <= b["rows"][epoch_]).all() and (b["fresh"][epoch_] < b["rows"][epoch_]).any()
    same(b["idle"][b["cohort"] == 1].tolist(), [0] * (b["cohort"] == 1).sum())
    assert (b["idle"][b["cohort"] == 3] > 0).all()  # blocks of one cohort end together
    assert (b["experts"][epoch_ & (b["support"] == 6)] <= b["experts"][full].max()).all()


def test_counts_of_the_schedule():
    """Two slots, one block each: what the patterns of the schedule commit, exactly."""
    patterns = [p["commits"] for p in json.loads(SCHEDULE.read_text())["blocks"] if p["given"] == 0]
    two = patterns[0], patterns[1]
    row, = table(bench("--shape", shape("b"), "--batch", 2, "--prefix", 0, "--cohort", 0, "--blocks", 1, "--schedule", SCHEDULE))
    forwards = max(map(len, two))
    same(int(row["forwards"]), forwards)
    live = sum(32 - sum(p[:i]) for p in two for i in range(len(p)))
    same(row["live"], f"{live / forwards:.0f}")
    same(row["rows"], f"{32 * sum(map(len, two)) / forwards:.0f}")
    same(row["idle"], f"{100 * (1 - sum(map(len, two)) / 2 / forwards):.1f}")


def test_ranks():
    """Several ranks do the work of one; what they send each other is counted."""
    words = ["--shape", shape("c"), "--mode", "full", "--batch", 5, "--prefix", 32, "--iterations", 2]
    alone, three = bench(*words), bench(*words, ranks=3)
    for name in ("rows", "fresh", "live"):
        same(table(alone)[0][name], table(three)[0][name])
    holds(three, "3 ranks, transport mpi, combine fp32", "lane: ", "MB, sums back")
    assert "lane: " not in alone


def test_stopped_rank():
    """The watchdog of epoch run: a rank that no longer moves ends the job, and the message names it."""
    out = new("stuck.h5")
    job = cli.start("bench", "--device", "cpu", "--shape", shape("s"), "--batch", 4, "--iterations", 1 << 20, "--timeout", 1.5,
                    "--out", out)
    began, stage = time.monotonic(), -1
    while stage != 2 and time.monotonic() - began < 30: # rank 1's, of its 64 bytes among the heartbeats
        time.sleep(.05)
        beats = b"".join(path.read_bytes() for path in out.parent.glob("stuck.h5.watch-*/heartbeats"))
        stage = struct.unpack_from("i", beats, 64 + 32)[0] if len(beats) >= 128 else -1
    ranks = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(ranks[-1]), signal.SIGSTOP)
    _, said = job.communicate(timeout=60)
    same(job.returncode, 3)
    holds(said, "the job is stuck: no rank has moved for ", " s (--timeout); the others wait for rank 1/2",
          "rank 0/2: run, iteration ", "rank 1/2: run, iteration ", "its process does not answer")
    same((said.count("the job is stuck"), folders(out.parent, out.name)), (1, []))


def folders(place, name="*"):
    return [path.name for path in place.glob(f"{name}.watch-*")]


def test_rank_fails_alone():
    """Its own message is told, and at once: nothing is given back that may wait for the others. No folder stays."""
    out = new("alone.h5")
    words = ["bench", "--device", "cpu", "--shape", shape("l"), "--batch", 4, "--iterations", 2, "--timeout", 3]
    done = subprocess.run([*cli.MPIRUN, "-np", "2", sys.argv[1] + "_faults", *map(str, words), "--out", out],
                          capture_output=True, text=True, timeout=60, cwd=ROOT,
                          env=os.environ | {"EPOCH_FAULT_ROW": "1", "EPOCH_FAULT_DELAY": "close:18"})
    holds(done.stderr, "rank 1/2: the logits of slot 0 are not finite")
    assert "stuck" not in done.stderr and "waited" not in done.stderr, done.stderr
    same((done.returncode, folders(out.parent, out.name)), (3, []))


def test_folders_apart():
    """Hosts that do not share the folder: the watchdog sees the ranks of its own, and the bench goes on."""
    places = [cli.scratch / name for name in ("here", "there")]
    words = ["bench", "--device", "cpu", "--shape", shape("m"), "--batch", 2, "--iterations", 2, "--timeout", 8]
    one = [[sys.argv[1], *map(str, words)] for _ in places]
    for place in places:
        place.mkdir()
    job = [*cli.MPIRUN, "-np", "1", "-wdir", places[0], *one[0], ":", "-np", "1", "-wdir", places[1], *one[1]]
    done = subprocess.run(job, capture_output=True, text=True, timeout=60)
    same(done.returncode, 0)
    holds(done.stderr, "rank 1/2: ", " is not the folder of rank 0: the watchdog sees this host's ranks alone")
    same([folders(place) for place in places], [[], []])
    # a folder that one of them lacks
    (places[0] / "out").mkdir()
    job = [*cli.MPIRUN, "-np", "1", "-wdir", places[0], *one[0], "--out", "out/a.h5", ":", "-np", "1", "-wdir", places[1],
           *one[1], "--out", "out/a.h5"]
    done = subprocess.run(job, capture_output=True, text=True, timeout=60)
    same(done.returncode, 2)
    holds(done.stderr, "rank 1/2: out/a.h5.watch-", "No such file or directory; name a folder that all hosts see, or "
          "--timeout 0")
    same([folders(place) for place in (*places, places[0] / "out")], [[], [], []])


def test_refusals():
    bad = new("bad.json")
    bad.write_text('{"blocks": [{"given": 0, "commits": [3, 4]}]}')
    still = new("still.json")
    still.write_text('{"blocks": [{"given": 0, "commits": [16, 0, 16]}]}')
    empty = new("empty.json")
    empty.write_text('{"blocks": [{"given": 5, "commits": [27]}]}')
    for more, says in ((["--batch", "1,"], '--batch is "1,", want at most 16 numbers from 1 to 65536'),
                       (["--batch", "0"], '--batch is "0"'),
                       (["--prefix", "40"], "--prefix is 40, want a multiple of 32"),
                       (["--mode", "full,fast"], '--mode is "fast": no such choice'),
                       (["--cohort", "-1"], '--cohort is "-1"'),
                       (["--skew", "much"], '--skew is "much", want a number from 0 to 100'),
                       (["--timeout", "soon"], '--timeout is "soon", want a number from 0 to 1e+06'),
                       (["--seed", "0"], '--seed is "0"'),
                       (["--layers", "1.5"], '--layers is "1.5", want a whole number'),
                       (["--device", "gpu"], '--device is "gpu": no such choice'),
                       (["--what"], '"--what" is not understood'),
                       (["more"], '"more" is not an option'),
                       (["--shape", "llada3"], '--shape is "llada3", want llada2-mini, '),
                       (["--shape", shape("d"), "--support", "1"], "--support is 1, want 2 to 16"),
                       (["--shape", shape("e"), "--support", "17"], "--support is 17, want 2 to 16"),
                       (["--shape", shape("f"), "--schedule", bad], "block 0 commits 7 positions, want 32"),
                       (["--shape", shape("j"), "--schedule", still],
                        "iteration 1 of block 0 commits 0 positions, want 1 to 32"),
                       (["--shape", shape("k"), "--batch", 65536, "--prefix", 1048576],
                        "65536 sequences of 1048608 positions have more blocks than a rank can number"),
                       (["--shape", shape("g"), "--schedule", empty], "no block of which nothing is given"),
                       (["--shape", shape("h"), "--schedule", "/nowhere"], "/nowhere"),
                       (["--shape", shape("i"), "--layers", 4], "--layers is 4, the shape has 3"),
                       (["--shape", shape("j"), "--out", "/nowhere/a.h5"], "/nowhere/a.h5 cannot be created: /nowhere/: "),
                       (["--shape", shape("k"), "--out", bad], "bad.json exists already: name another --out")):
        holds(bench(*more, want=2), says)


if __name__ == "__main__":
    cli.main(globals())
