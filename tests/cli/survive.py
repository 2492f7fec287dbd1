"""What the tests of jobs that survive share: starting a job under mpirun, hurting it, and comparing its rows."""
import os, re, shutil, signal, subprocess, sys, tempfile, time

try:
    import h5py
    import numpy
except ImportError:
    print("skipped: python3 has no h5py")
    sys.exit(77)

SOURCE = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
MODEL = os.path.join(SOURCE, "models", "tiny")
GSM8K = "gsm8k:" + os.path.join(SOURCE, "datasets", "samples", "gsm8k_demo.jsonl")
SHORT = ["--gen-len", "64", "--progress", "off", "--commit-every", "0.05"]

folder = tempfile.mkdtemp(prefix="epoch-survive-")
shared = tempfile.mkdtemp(prefix="epoch-survive-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMP_WAIT_POLICY="passive",
                   OPENBLAS_NUM_THREADS="1", OMPI_MCA_rmaps_base_oversubscribe="1",
                   OMPI_MCA_btl_vader_backing_directory=shared, TMPDIR=folder)
program = faulty = None


def clean_up():
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(shared, ignore_errors=True)


def path(name):
    return os.path.join(folder, name)


class Job:
    """One mpirun. `fault`: EPOCH_FAULT of src/base/fault.h; `row`: EPOCH_FAULT_ROW."""

    def __init__(self, out, *options, ranks=2, data=GSM8K, model=MODEL, fault=None, row=None, limit=6, more=()):
        env = dict(environment)
        if fault:
            env["EPOCH_FAULT"] = fault
        if row is not None:
            env["EPOCH_FAULT_ROW"] = str(row)
        command = ["mpirun", "-q", "-np", str(ranks), *more, faulty if fault or row is not None else program, "run",
                   "--model", model, "--data", data, "--out", out, "--limit", str(limit), *SHORT, *options]
        self.text = None
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ranks(self):
        """pids of the processes that mpirun has started"""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open("/proc/%s/stat" % pid) as f:
                    name, rest = re.match(r"\d+ \((.*)\) (.*)", f.read()).groups()
            except (OSError, AttributeError):
                continue
            if int(rest.split()[1]) == self.process.pid and name.startswith("epoch"):
                found.append(int(pid))
        return sorted(found)

    def end(self, limit=120):
        try:
            self.text = self.process.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            for pid in [self.process.pid] + self.ranks():
                hurt(pid, signal.SIGKILL)
            raise AssertionError("no end within %d s" % limit)
        return self.process.returncode

    def gives(self, code, *parts):
        got = self.end()
        assert got == code, "exit status %d, want %d; it said:\n%s" % (got, code, self.text)
        for part in parts:
            assert re.search(part, self.text), "want %r in:\n%s" % (part, self.text)
        return self


def hurt(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


class Standing:
    """`epoch status`."""

    def __init__(self, out):
        done = subprocess.run([program, "status", out], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.code, self.text = done.returncode, done.stdout
        found = re.search(r"rows +(\d+) of (\d+) done, (\d+) failed, (\d+) left", self.text)
        self.done, self.total, self.failed, self.left = map(int, found.groups()) if found else (0, 0, 0, 0)
        self.sessions = int((re.search(r"sessions +(\d+)", self.text) or [0, 0])[1])
        self.running = "running: pid" in self.text


OUTPUTS = ["dataset", "id", "source_line", "turn", "order", "prompt", "text", "gold", "status", "message",
           "finish_reason", "n_prompt_tokens", "n_tokens", "n_blocks", "n_iterations", "forced"]


def rows(out):
    """Every row as a tuple of all that may not depend on ranks, batch and sessions: columns, tokens, blocks."""
    with h5py.File(out, "r") as f:
        o, tokens, blocks = f["outputs"], f["tokens"][:], f["blocks"]
        columns = [o[k].asstr()[:] if h5py.check_string_dtype(o[k].dtype) else o[k][:] for k in OUTPUTS]
        block = numpy.array([blocks[k][:] for k in sorted(blocks) if k != "output_row"], dtype="f8").T
        of, at, n = blocks["output_row"][:], o["token_offset"][:], o["n_tokens"][:]
        return [tuple(c[i] for c in columns) + (tokens[at[i]:at[i] + n[i]].tobytes(), block[of == i].tobytes())
                for i in range(len(at))]


def column(out, name):
    with h5py.File(out, "r") as f:
        c = f["outputs"][name]
        return list(c.asstr()[:] if h5py.check_string_dtype(c.dtype) else c[:])


def attribute(out, name):
    with h5py.File(out, "r") as f:
        return f.attrs[name]


def same(out, want):
    got = rows(out)
    for a, b in zip(got, want):
        assert a == b, "row %s differs:\n%s\nwant\n%s" % (a[1], a[:-2], b[:-2])
    assert len(got) == len(want), "%d rows, want %d" % (len(got), len(want))


unbroken = {}


def reference(**job):
    """Rows of a run that nothing disturbed, once for each data."""
    key = tuple(sorted(job.items()))
    if key not in unbroken:
        out = path("unbroken%d.h5" % len(unbroken))
        done = Job(out, **job)
        assert done.end() in (0, 1), done.text
        unbroken[key] = rows(out)
    return unbroken[key]


def main(tests):
    global program, faulty
    program, faulty = map(os.path.realpath, sys.argv[1:3])
    failed = 0
    chosen = [t for t in tests if not sys.argv[3:] or t.__name__ in sys.argv[3:]]
    for test in chosen:
        start = time.monotonic()
        try:
            test()
            print("passed  %s, %.1f s" % (test.__name__, time.monotonic() - start), flush=True)
        except AssertionError as error:
            failed += 1
            print("FAILED  %s: %s" % (test.__name__, error), flush=True)
    clean_up()
    print("%d passed, %d failed" % (len(chosen) - failed, failed))
    sys.exit(failed > 0 or not chosen)
