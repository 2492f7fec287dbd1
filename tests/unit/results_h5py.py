"""The published file through other people's tools: h5py, h5dump, and what the reader says of damaged ones.

usage: results_h5py.py TEST_RESULTS      (the test program: it writes the sample and reads the damaged copies)
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile

SKIPPED = 77
try:
    import h5py
    import numpy as np
except ImportError as e:
    print("skipped:", e)
    sys.exit(SKIPPED)

program = sys.argv[1]
folder = tempfile.mkdtemp()
path = os.path.join(folder, "out.h5")
subprocess.run([program, "write", path], check=True)

with h5py.File(path, "r") as f:
    a = f.attrs
    assert a["schema_version"] == 1 and a["state"] == "complete"
    assert a["rows"] == 400 and a["rows_done"] + a["rows_failed"] == 400 and a["rows_total"] == 40
    assert a["threshold"] == 0.95 and a["strict"] == True and len(a["long"]) == 200000  # noqa: E712
    assert json.loads(a["model"]) == {"layers": 8}
    o = f["outputs"]
    n = len(o["id"])
    assert n == 400 and all(len(column) == n for column in o.values())
    assert list(o["order"]) == list(range(n))
    text, raw, status = o["text"].asstr()[:], o["gold"].asstr()[:], o["status"].asstr()[:]
    repaired = 0
    for i in range(n):
        want = bytes.fromhex(raw[i]).decode("utf-8", "replace")
        assert text[i] == want, (i, raw[i], text[i])
        repaired += "\ufffd" in want
    assert repaired > 200
    assert list(np.flatnonzero(status == "failed")) == list(range(5, n, 11))
    tokens, offset, count = f["tokens"][:], o["token_offset"][:], o["n_tokens"][:]
    assert tokens.dtype == "<i4" and count.sum() == len(tokens)
    assert list(offset) == [0, *np.cumsum(count)[:-1]]
    rows = f["blocks/output_row"][:]
    assert list(np.bincount(rows, minlength=n)) == list(o["n_blocks"])
    assert all(len(column) == len(rows) for column in f["blocks"].values())
    p = f["phases"]
    phases, paths = p["phase_names"].asstr()[:], p["path_names"].asstr()[:]
    assert p["seconds"].shape == (1, len(phases)) and phases[0] == "attention" and p["seconds"][0, 2] == 3
    assert p["rows_fresh"].shape == (1, len(paths))
    assert p["rows_fresh"][0, list(paths).index("prefill")] == 7
    assert p["seconds"].attrs["unit"] == "s"
    s = f["sessions"]
    assert len(s["session"]) == 1 and s["done"][0] == a["rows_done"]
    assert json.loads(s["run"].asstr()[0])["strict"] is True
    assert len(f["audit/live"]) == n and list(f["audit/output_row"]) == list(range(n))
    assert set(f["audit/live"][:] - f["audit/same"][:]) == {1} and f["audit/mean_margin"][7] == 7
    v = f["observed"]
    assert all(column.shape == (1, 64) for name, column in v.items() if name not in ("session", "rank"))
    assert list(v["overlap_count"][0]) == list(range(1000, 1064)) and v["live_sum"][0, 3] == 1 + 0.25 - 3
    assert v["decoded_count"][0, 5] == 10005 and v["live_count"][0, 5] == 10105
    assert len(f["iterations/path"]) == n and set(paths[f["iterations/path"][:]]) == {"cold"}

    # schema.md names every column, with its unit, and no other
    told, group = {}, None
    for line in open(os.path.join(os.path.dirname(__file__), "../../results/schema.md"), encoding="utf-8"):
        if line.startswith("## "):
            group = line[3:].split(":")[0].strip("/\n")
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6 and cells[1] not in ("column", "---"):
            told.setdefault(group, {}).update({name.strip(): cells[3] for name in cells[1].split(",")})
    for group in ("outputs", "blocks", "phases", "sessions", "iterations", "audit", "observed"):
        found = {name: c.attrs.get("unit", "") for name, c in f[group].items() if not name.endswith("_names")}
        assert told[group] == found, (group, told[group], found)

if shutil.which("h5dump"):
    head = subprocess.run(["h5dump", "-H", path], check=True, capture_output=True, text=True).stdout
    assert 'GROUP "outputs"' in head and 'DATASET "tokens"' in head
    dump = ["h5dump", "-d", "/outputs/finish_reason", path]
    assert '"eos"' in subprocess.run(dump, check=True, capture_output=True, text=True).stdout
else:
    print("h5dump: skipped, not installed")


def replaced(group, name, values):
    del group[name]
    group[name] = values


# What is done to a copy, and what the reader must say of it.
damages = [
    (lambda f: f["outputs"].__delitem__("prompt"), "prompt cannot be read: object 'prompt' doesn't exist"),
    (lambda f: f.__delitem__("sessions"), "sessions cannot be read: object 'sessions' doesn't exist"),
    (lambda f: replaced(f["outputs"], "text", np.zeros(400)), "text holds another type, want texts"),
    (lambda f: replaced(f["outputs"], "turn", ["x"] * 400), "turn holds another type, want integers"),
    (lambda f: replaced(f["outputs"], "seconds", ["x"] * 400), "seconds holds another type, want floating-point"),
    (lambda f: replaced(f["outputs"], "turn", np.zeros(3, "i4")), "turn has 3 rows, its table has 400"),
    (lambda f: replaced(f["outputs"], "turn", np.zeros((400, 2), "i4")), "turn has 2 axes, want 1"),
    (lambda f: replaced(f["phases"], "seconds", np.zeros((1, 3))), "seconds has 3 values a row, want 11"),
    (lambda f: f["outputs/token_offset"].__setitem__(7, 1 << 40), "outputs row 7: tokens 1099511627776 + "),
    (lambda f: f["outputs/token_offset"].__setitem__(7, -1), "outputs row 7: tokens -1 + "),
    (lambda f: f["outputs/n_blocks"].__setitem__(0, 99), "outputs row 0: want 99 rows of blocks"),
    (lambda f: f["outputs/n_blocks"].__setitem__(399, 0), "its outputs have"),
    (lambda f: f["iterations/output_row"].__setitem__(3, 400), "iterations row 3: output_row 400"),
    (lambda f: f["iterations/path"].__setitem__(2, -1), "iterations row 2: output_row 2, path -1"),
    (lambda f: f["audit/output_row"].__setitem__(5, -1), "audit row 5: output_row -1, but outputs has 400 rows"),
    (lambda f: replaced(f["observed"], "live_sum", np.zeros((1, 9))), "live_sum has 9 values a row, want 64"),
    (lambda f: f.attrs.__setitem__("schema_version", 9), "schema_version 9, want 1: use the program that wrote it"),
    (lambda f: f.attrs.__delitem__("schema_version"), "schema_version 0, want 1: not a results file of epoch"),
    (lambda f: f.attrs.__setitem__("schema_version", "one"), '"schema_version" is a string'),
]
copy = os.path.join(folder, "damaged.h5")
for damage, want in damages:
    shutil.copyfile(path, copy)
    with h5py.File(copy, "r+") as f:
        damage(f)
    said = subprocess.run([program, "read", copy], capture_output=True, text=True)
    assert said.returncode == 2 and want in said.stdout, (want, said)
whole = open(path, "rb").read()
for keep in (0, 7, 40, 1000, len(whole) // 2, len(whole) * 9 // 10):
    with open(copy, "wb") as f:
        f.write(whole[:keep])
    said = subprocess.run([program, "read", copy], capture_output=True, text=True)
    assert said.returncode == 2 and "not an HDF5 file that can be opened" in said.stdout, (keep, said)
shutil.rmtree(folder)
print("h5py: passed")
