"""The program under mpirun, for tests: usage TEST.py EPOCH [NAME ...]; runs the functions test_* (or those named)."""
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ROOT / "models/tiny"
DEMO = ROOT / "datasets/samples/gsm8k_demo.jsonl"
MPIRUN = os.environ.get("MPIRUN", "mpirun -q --oversubscribe --bind-to none").split()

# The machine is shared with other tests: what waits shall not spin.
os.environ["OMPI_MCA_mpi_yield_when_idle"] = "1"
sys.path.insert(0, str(ROOT / "tests/tools"))
scratch = pathlib.Path(tempfile.mkdtemp(prefix="epoch-cli-"))


def epoch(*words, ranks=2, limit=120, env=None):
    """Runs it, env added to the environment; gives exit code, stdout, stderr."""
    done = subprocess.run([*MPIRUN, "-np", str(ranks), sys.argv[1], *map(str, words)], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=limit, cwd=ROOT,
                          env=os.environ | (env or {}))
    return done.returncode, done.stdout, done.stderr


def start(*words, ranks=2):
    return subprocess.Popen([*MPIRUN, "-np", str(ranks), sys.argv[1], *map(str, words)], stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def words(out, model=TINY, data=f"gsm8k:{DEMO}", more=()):
    return ["run", "--model", model, "--data", data, "--out", out, "--progress", "off", *more]


def new(name):
    """A path in the scratch folder where nothing is yet."""
    path = scratch / name
    assert not path.exists() and not path.with_name(name + ".d").exists(), path
    return path


def same(a, b):
    assert a == b, f"{a!r} is not {b!r}"


def holds(text, *parts):
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"


def run_one(name, test):
    began, trouble = time.monotonic(), ""
    try:
        test()
    except Exception:
        trouble = traceback.format_exc(limit=-3)
    verdict = "FAILED" if trouble else "ok"
    print(f"{trouble}{verdict:6} {name} ({time.monotonic() - began:.1f} s)", flush=True)
    return not trouble


def main(tests):
    """Runs them four at a time: mpirun takes more than a second to pass an exit code on, and idles meanwhile."""
    chosen = {n: f for n, f in tests.items() if n.startswith("test_") and (len(sys.argv) < 3 or n in sys.argv[2:])}
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            passed = sum(pool.map(run_one, chosen.keys(), chosen.values()))
    finally:
        shutil.rmtree(scratch)
    print(f"{passed} passed, {len(chosen) - passed} failed")
    sys.exit(passed < len(chosen) or not chosen)
