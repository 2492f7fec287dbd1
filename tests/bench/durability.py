"""What it costs that rows survive: paired runs of the demo, alternating, with durability as it is and without (one commit
at the end, nothing published before).

    python3 tests/bench/durability.py EPOCH [PAIRS [LIMIT]]

Seconds are those of decoding (/sessions/wall_seconds: first forward to last commit)."""
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

import h5py

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "../.."))
WAYS = {"without": ["--commit-every", "3600", "--publish-every", "0"], "as it is": []}
epoch, pairs, limit = sys.argv[1], int((sys.argv + [0, 5])[2] or 5), (sys.argv[3:] or ["40"])[0]
os.environ |= {"OMP_WAIT_POLICY": "passive", "OMPI_MCA_mpi_yield_when_idle": "1"}
folder = tempfile.mkdtemp(prefix="epoch-bench-", dir=os.environ.get("TMPDIR"))


def run(way):
    out = f"{folder}/run.h5"
    subprocess.run([*os.environ.get("MPIRUN", "mpirun -q --oversubscribe").split(), "-np", "2", epoch, "run", "--model",
                    f"{ROOT}/models/tiny", "--data", f"gsm8k:{ROOT}/datasets/samples/gsm8k_demo.jsonl", "--out", out,
                    "--limit", limit, "--progress", "off", *WAYS[way]], check=True, stdout=subprocess.DEVNULL)
    with h5py.File(out) as f:
        seconds = f["sessions/wall_seconds"][0]
    os.unlink(out)
    shutil.rmtree(out + ".d")
    return seconds


taken = {way: [] for way in WAYS}
for i in range(pairs):
    for way in list(WAYS)[i % 2 and slice(None, None, -1) or slice(None)]:
        taken[way].append(run(way))
shutil.rmtree(folder)
for way, seconds in taken.items():
    print(f"{way:9} fastest {min(seconds):.3f} s, median {statistics.median(seconds):.3f} s of", *map("{:.3f}".format, seconds))
a, b = taken["as it is"], taken["without"]
print(f"as it is against without: {100 * (min(a) / min(b) - 1):+.2f} % by the fastest, "
      f"{100 * statistics.median(x / y - 1 for x, y in zip(a, b)):+.2f} % by the median of {pairs} pairs")
