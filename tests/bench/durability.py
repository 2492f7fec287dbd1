"""What it costs that rows survive: paired runs of the demo, alternating, with durability as it is and without.

    python3 tests/bench/durability.py EPOCH [PAIRS [LIMIT]]

Without: no group commit and no publishing before the end. Hasty: a commit in every iteration, so that the price of one
stands out of the noise. Seconds are those of decoding (/sessions/wall_seconds: first forward to last commit)."""
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

import h5py

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "../.."))
WAYS = {"without": ["--commit-every", "3600", "--publish-every", "0"], "as it is": [],
        "hasty": ["--commit-every", "0"]}
epoch, pairs, limit = sys.argv[1], int((sys.argv + [0, 5])[2] or 5), (sys.argv[3:] or ["40"])[0]
os.environ |= {"OMP_WAIT_POLICY": "passive", "OMPI_MCA_mpi_yield_when_idle": "1"}
folder = tempfile.mkdtemp(prefix="epoch-bench-", dir=os.environ.get("TMPDIR"))


def run(way):
    out = f"{folder}/run.h5"
    subprocess.run([*os.environ.get("MPIRUN", "mpirun -q --oversubscribe").split(), "-np", "2", epoch, "run", "--model",
                    f"{ROOT}/models/tiny", "--data", f"gsm8k:{ROOT}/datasets/samples/gsm8k_demo.jsonl", "--out", out,
                    "--limit", limit, "--progress", "off", *WAYS[way]], check=True, stdout=subprocess.DEVNULL)
    with h5py.File(out) as f:
        seconds, forwards = f["sessions/wall_seconds"][0], f["phases/forwards"][0]
    os.unlink(out)
    shutil.rmtree(out + ".d")
    return seconds, forwards


taken = {way: [] for way in WAYS}
for i in range(pairs):
    for way in list(WAYS)[i % 2 and slice(None, None, -1) or slice(None)]:
        taken[way].append(run(way))
shutil.rmtree(folder)
for way in WAYS:
    print(f"{way:9} {statistics.median(s for s, _ in taken[way]):8.3f} s (median of {pairs}; " +
          " ".join(f"{s:.3f}" for s, _ in taken[way]) + ")")
paired = statistics.median(a[0] / b[0] - 1 for a, b in zip(taken["as it is"], taken["without"]))
each = statistics.median((a[0] - b[0]) / a[1] for a, b in zip(taken["hasty"], taken["without"]))
print(f"as it is against without, paired: {100 * paired:+.2f} %")
print(f"one commit: {1000 * each:.2f} ms, so one a second costs {100 * each:.2f} %")
