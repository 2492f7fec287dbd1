"""Help, exit codes, and every bad input: one message that names found, wanted and mend, for all ranks together, exit 2,
before any work."""
import itertools
import json
import re
import struct
import time

import h5py

import cli
from cli import DEMO, TINY, epoch, holds, new, same, words
from same_tokens import compare

DATA = f"gsm8k:{DEMO}"
number = itertools.count()


def refused(*parts, run=None, ranks=2, who="ranks 0-1/2: ", **changed):
    """The run is refused in one line that holds `parts`, by all ranks at once, and leaves nothing behind."""
    out = new(f"refused{next(number)}.h5")
    rc, stdout, stderr = epoch(*(run or words(out, **changed)), ranks=ranks)
    same((rc, stdout), (2, ""))
    assert len(stderr.splitlines()) == 1, stderr
    assert stderr.startswith(who), stderr
    holds(stderr, *parts)
    assert not out.exists() and not out.with_name(out.name + ".d").exists(), "something was written"


def checkpoint(name, **files):
    """A copy of the tiny checkpoint by links; files: NAME with _ for the first dot -> bytes, or None: left out."""
    folder = cli.scratch / name
    folder.mkdir()
    changed = {k.replace("_json", ".json"): v for k, v in files.items()}
    for file in TINY.iterdir():
        if file.is_file() and file.name not in changed:
            (folder / file.name).symlink_to(file)
    for file, content in changed.items():
        if content is not None:
            (folder / file).write_bytes(content)
    return folder


def config(**keys):
    return json.dumps({**json.loads((TINY / "config.json").read_text()), **keys}).encode()


SHARD = "model-00001-of-00002.safetensors"


def shard(change):
    """The first weight file with a changed header: change(header) edits it in place."""
    raw = (TINY / SHARD).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + raw[8 + size :]


# ---- help and usage


def test_help():
    rc, stdout, stderr = epoch("run", "--help")
    same((rc, stderr), (0, ""))
    holds(stdout, "usage: mpirun -np R epoch run", "--model DIR", "--threshold", "[0.95]")
    same(stdout.count("usage:"), 1)
    for line in stdout.splitlines():
        assert len(line) <= 160, line
    readme = (cli.ROOT / "README.md").read_text()
    assert "".join(f"    {line}".rstrip() + "\n" for line in stdout.splitlines()) in readme, "README.md has another help text"
    rc, stdout, stderr = epoch("--help", ranks=1)
    same((rc, stderr), (0, ""))
    holds(stdout, "epoch run --help")
    for line in stdout.splitlines():
        if line.startswith("  epoch "):
            holds(readme, f"`epoch {line.split()[1]}")


def test_readme_names_what_is_there():
    for file in "README.md", "datasets/README.md", "jobs/README.md", "models/tiny/README.md":
        text = (cli.ROOT / file).read_text()
        for path in re.findall(r"[`(]((?:src|cuda|mpi|datasets|results|jobs|tests|models)/[\w./*-]*)[`)]", text):
            assert list(cli.ROOT.glob(path)), f"{file} names {path}"


def test_no_command():
    for line in [], ["nonsense"]:
        rc, stdout, stderr = epoch(*line)
        same((rc, stdout, stderr.count("offline inference")), (2, "", 1))
        holds(stderr, "epoch run --help", *line)


# ---- flags


def test_flags():
    refused("--bogus", "no such option", "epoch run --help", more=["--bogus", 1])
    refused('"stray" is not an option', "epoch run --help", run=["run", "stray"])
    refused('--batch is "0"', "want a whole number from 1", more=["--batch", 0])
    refused('--batch is "2x"', "want a whole number", more=["--batch", "2x"])
    refused('--threshold is "nan"', "want a number from 0 to 1", more=["--threshold", "nan"])
    refused('--mode is "fast"', "want epoch|full|no-atlas|no-lsp|no-lane", more=["--mode", "fast"])
    refused('--cohort is "x"', "want", more=["--cohort", "x"])
    refused("--limit wants a value", "rows", more=["--limit"])
    refused("--trace takes no value", more=["--trace=1"])
    refused("--kv-tokens is 10", "want at least 2048", more=["--kv-tokens", 10])
    refused("--gpu-memory is \"much\"", "such as 80G", more=["--gpu-memory", "much"])
    refused("this job takes", "0.02 are there", "(--kv-tokens)", "(--batch)", more=["--gpu-memory", "20M"])
    refused("9999999", "1536", "set --mask-id", more=["--mask-id", 9999999])
    refused("--transport self", "there are 2", "want auto or mpi", more=["--transport", "self"])
    refused("--transport nccl", "between GPUs", "want --device cuda", more=["--transport", "nccl"])
    refused("--combine bf16", "want --combine fp32", more=["--combine", "bf16"])
    refused("--placement tp", "want dp", more=["--placement", "tp"])


def test_missing_flags():
    refused("--model is missing", "checkpoint folder", run=["run", "--data", DATA, "--out", "x.h5"])
    refused("--data is missing", "KIND:PATH", run=["run", "--model", TINY, "--out", "x.h5"])
    refused("--out is missing", "results file", run=["run", "--model", TINY, "--data", DATA])


# ---- files


def test_data_files():
    first = cli.scratch / "first.jsonl"
    first.write_text('{"question": "", "answer": "1"}\n' + DEMO.read_text())
    later = cli.scratch / "later.jsonl"
    lines = DEMO.read_text().splitlines()
    later.write_text("\n".join([*lines[:3], '{"question": 7}', *lines[3:5]]) + "\n")
    refused("nowhere.jsonl", "No such file", data="gsm8k:nowhere.jsonl")
    refused("gsm9k", "unknown kind", "gsm8k, mgsm, humaneval, mtbench, jsonl", data=f"gsm9k:{DEMO}")
    refused(f"{DEMO}:1", '"task_id" is missing', "humaneval", data=f"humaneval:{DEMO}")
    refused(f"{first}:1", '"question"', data=f"gsm8k:{first}")
    refused(f"{later}:4", '"question"', data=f"gsm8k:{later}", more=["--strict"], who="rank 0/2: ")
    refused("--shots", "want N:FILE", more=["--shots", "x"])
    refused("nowhere", "No such file", more=["--shots", "3:nowhere"])
    refused("nowhere", "No such file", more=["--template", "nowhere"])


def test_missing_model_files():
    refused("nowhere/config.json", "No such file", model="nowhere")
    refused("tokenizer.json", "No such file", model=checkpoint("no_tokenizer", tokenizer_json=None))
    refused(SHARD, "No such file", model=checkpoint("no_shard", **{SHARD: None}))


def test_damaged_model_files():
    raw = (TINY / SHARD).read_bytes()
    refused("config.json", "expected", model=checkpoint("config", config_json=b'{"model_type": '))
    refused("tokenizer.json", model=checkpoint("tokenizer", tokenizer_json=(TINY / "tokenizer.json").read_bytes()[:9999]))
    refused(SHARD, "bytes", model=checkpoint("cut", **{SHARD: raw[:-1000]}))
    refused(SHARD, "header", model=checkpoint("header", **{SHARD: b"\xff" * 64 + raw[64:]}))
    refused(SHARD, model=checkpoint("empty", **{SHARD: b""}))


def test_wrong_tensors():
    name = "model.layers.1.mlp.gate.weight"

    def turn(header):
        header[name]["shape"].reverse()

    def drop(header):
        del header["model.layers.0.input_layernorm.weight"]

    def rename(header):
        header["other"] = header.pop("model.layers.0.input_layernorm.weight")

    refused(f'"{name}"', "[256,32]", "want [32,256]", "num_experts", model=checkpoint("turned", **{SHARD: shard(turn)}))
    refused(SHARD, "belong to no tensor", model=checkpoint("dropped", **{SHARD: shard(drop)}))
    refused('"model.layers.0.input_layernorm.weight"', model=checkpoint("renamed", **{SHARD: shard(rename)}))
    refused("want", "hidden_size", model=checkpoint("wide", config_json=config(hidden_size=512)))


def test_families():
    refused('"model_type" is "llama"', 'want "llada2_moe"', model=checkpoint("llama", config_json=config(model_type="llama")))
    refused("LLaDA-MoE", "not supported", 'want "llada2_moe"', model="tests/golden/vectors/checkpoints/llada_moe-tiny-bf16")
    refused('"hidden_act"', '"gelu"', "silu", model=checkpoint("gelu", config_json=config(hidden_act="gelu")))


def test_more_ranks_than_experts():
    few = checkpoint("few", config_json=config(num_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2))
    refused("5 ranks", "4 experts", "at most 4 ranks", model=few, ranks=5, who="ranks 0-4/5: ")


def test_output():
    taken = cli.scratch / "taken.h5"
    taken.write_text("mine")
    refused("taken.h5 exists already", "--resume", "another --out", run=words(taken), who="rank 0/2: ")
    same(taken.read_text(), "mine")
    refused("cannot be created", "choose an --out", run=words(cli.scratch / "no/where.h5"), who="rank 0/2: ")


# ---- ways to end


def test_some_rows_fail():
    data = cli.scratch / "some.jsonl"
    lines = DEMO.read_text().splitlines()
    data.write_text("\n".join([*lines[:3], '{"question": 7}', "no JSON", *lines[3:5]]) + "\n")
    out = new("some.h5")
    rc, stdout, stderr = epoch(*words(out, data=f"gsm8k:{data}", more=["--gen-len", 32]))
    same((rc, stderr), (1, ""))
    holds(stdout, "5 of 7 done, 2 failed", str(out))
    with h5py.File(out) as f:
        same(f.attrs["state"], "complete")
        same(f["outputs/status"].asstr()[:].tolist(), ["done"] * 3 + ["failed"] * 2 + ["done"] * 2)
        messages = f["outputs/message"].asstr()[:].tolist()
        same([bool(m) for m in messages], [False] * 3 + [True] * 2 + [False] * 2)
        holds(messages[3], "some.jsonl:4")
        holds(messages[4], "some.jsonl:5")


def test_more_ranks_than_rows():
    whole, part = new("one.h5"), new("three.h5")
    for out, ranks in (whole, 1), (part, 3):
        rc, _, stderr = epoch(*words(out, more=["--limit", 1, "--gen-len", 32]), ranks=ranks)
        same((rc, stderr), (0, ""))
    found, rows, _ = compare(whole, [part])
    same((found, rows), ([], 1))


def test_stop_and_resume():
    """A stop file ends the run with 75 and what is done so far; --resume gives the file that an unbroken run gives."""
    rows = ["--limit", 6, "--gen-len", 64, "--batch", 2]
    whole, parts, stop = new("whole.h5"), new("parts.h5"), cli.scratch / "stop"
    same(epoch(*words(whole, more=rows))[0], 0)
    run = cli.start(*words(parts, more=[*rows, "--commit-every", 0, "--stop-file", stop]))
    journals = parts.with_name("parts.h5.d")
    for _ in range(1200): # until something is recorded
        if journals.is_dir() and sum(f.stat().st_size for f in journals.glob("*.jnl")) > 4000:
            break
        time.sleep(0.05)
    stop.touch()
    run.communicate(timeout=60)
    if run.returncode != 0: # a fast machine may be through before it sees the file
        same(run.returncode, 75)
        with h5py.File(parts) as f:
            same(f.attrs["state"], "interrupted")
            assert f.attrs["rows"] < 6, f.attrs["rows"]
        same(epoch(*words(parts, more=rows))[0], 2)
    same(epoch(*words(parts, more=[*rows, "--resume"]))[0], 0)
    found, count, _ = compare(whole, [parts])
    same((found, count), ([], 6))


def test_dry_run():
    out = new("dry.h5")
    rc, stdout, stderr = epoch(*words(out, more=["--dry-run"]))
    same((rc, stderr), (0, ""))
    holds(stdout, "8 layers", "32 experts", "0-15", "16-31", "the rank that has most takes")
    assert not out.exists()


def test_audit_and_observe():
    """The shadow and the observer change no token, no count and no traffic; what they find is in the file, and is the same
    for any number of ranks."""
    rows = ["--limit", 4, "--gen-len", 64]
    plain, one, two = new("plain.h5"), new("audit1.h5"), new("audit2.h5")
    for out, ranks, more in (plain, 2, []), (one, 1, ["--audit", "--observe"]), (two, 2, ["--audit", "--observe"]):
        rc, _, stderr = epoch(*words(out, more=[*rows, *more]), ranks=ranks)
        same((rc, stderr), (0, ""))
    found, count, _ = compare(plain, [one, two])
    same((found, count), ([], 4))
    with h5py.File(plain) as p, h5py.File(one) as a, h5py.File(two) as b:
        assert "audit" not in p and "observed" not in p
        for column in ("rows_fresh", "rows_cached", "rows_dispatched", "bytes_dispatched", "bytes_combined", "forwards"):
            same(b[f"phases/{column}"][:].tolist(), p[f"phases/{column}"][:].tolist())
        same(len(a["audit/live"]), int(p["blocks/iterations"][:].sum()))
        for column in a["audit"].keys() - {"rank"}:
            same(a[f"audit/{column}"][:].tolist(), b[f"audit/{column}"][:].tolist())
        live, held, alike = (a[f"audit/{column}"][:].sum() for column in ("live", "held", "same"))
        assert 0 < held < live and 0.8 * live < alike <= live, (live, held, alike)
        same(a["audit/broken"][:].sum(), 0)
        for column in ("overlap_count", "decoded_count", "live_count"):
            assert a[f"observed/{column}"][:].sum() > 0
            same(a[f"observed/{column}"][:].sum(axis=0).tolist(), b[f"observed/{column}"][:].sum(axis=0).tolist())


def test_small_run():
    """Two rows on two ranks from end to end; also under the sanitizers. Each forward is committed by itself, and what the
    counters say is about the whole run all the same."""
    out = new("small.h5")
    more = ["--limit", 2, "--gen-len", 32, "--trace", "--commit-every", 0]
    rc, stdout, stderr = epoch(*words(out, more=more), limit=300)
    same((rc, stderr), (0, ""))
    holds(stdout, "2 of 2 done, 0 failed", "tokens/s", str(out))
    with h5py.File(out) as f:
        same(f.attrs["state"], "complete")
        assert len(f["tokens"]) > 0
        phases = f["phases"]
        for rank in 0, 1:
            measured, wall = phases["seconds"][rank].sum(), phases["wall_seconds"][rank]
            assert 0.8 * wall < measured <= 1.01 * wall, (rank, measured, wall)


if __name__ == "__main__":
    cli.main(globals())
