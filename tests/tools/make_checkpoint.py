#!/usr/bin/env python3
"""Writes a synthetic llada2_moe checkpoint: config.json and safetensors with seeded random weights.

A tensor's values depend on the seed and its name in the per-expert spelling alone, so the same model can be written in
every spelling, dtype and number of files. Needs numpy. Example, 2 GB:
    make_checkpoint.py DIR --set hidden_size=1024 num_hidden_layers=10 num_experts=64 moe_intermediate_size=512
"""
import argparse
import json
import os
import struct
import zlib

import numpy as np

CHUNK = 1 << 22  # elements made at a time
DTYPES = {"bf16": ("BF16", 2), "f16": ("F16", 2), "f32": ("F32", 4)}


def config_of(changes):
    config = dict(
        architectures=["LLaDA2MoeModelLM"], model_type="llada2_moe", vocab_size=1024, hidden_size=128,
        intermediate_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
        partial_rotary_factor=0.5, rotary_dim=None, rope_theta=10000.0, rope_scaling=None, rms_norm_eps=1e-6,
        num_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, num_shared_experts=1,
        moe_intermediate_size=64, first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True,
        moe_router_enable_expert_bias=True, score_function="sigmoid", router_dtype="fp32", hidden_act="silu",
        max_position_embeddings=4096, use_qk_norm=True, use_qkv_bias=False, use_bias=False, norm_head=False,
        tie_word_embeddings=False, eos_token_id=None, mask_token_id=None, block_length=32)
    for change in changes:
        key, _, value = change.partition("=")
        if key not in config:
            raise SystemExit(f"make_checkpoint.py: unknown key {key}, want one of {', '.join(sorted(config))}")
        try:
            config[key] = json.loads(value)
        except ValueError:
            config[key] = value
    for key, behind in (("eos_token_id", 2), ("mask_token_id", 1)):
        if config[key] is None:
            config[key] = config["vocab_size"] - behind
    return config


def tensors_of(c, experts):
    """[(stored name, stored shape, [(seed name, elements, fan-in)])]; fan-in 0: a norm, -1: a bias of the router."""
    hidden, inner, count = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
    heads, kv_heads, head_dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    out = []

    def add(name, *shape, fan_in=None):
        out.append((name, shape, [(name, int(np.prod(shape)), shape[-1] if fan_in is None else fan_in)]))

    def mlp(prefix, width):
        add(f"{prefix}.gate_proj.weight", width, hidden)
        add(f"{prefix}.up_proj.weight", width, hidden)
        add(f"{prefix}.down_proj.weight", hidden, width)

    def join(name, shape, layer, parts):
        out.append((name, shape, [(f"{layer}.mlp.experts.{e}.{part}_proj.weight", inner * hidden,
                                   inner if part == "down" else hidden) for e in range(count) for part in parts]))

    add("model.word_embeddings.weight", c["vocab_size"], hidden, fan_in=1)
    for index in range(c["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        add(f"{layer}.input_layernorm.weight", hidden, fan_in=0)
        add(f"{layer}.attention.query_key_value.weight", (heads + 2 * kv_heads) * head_dim, hidden)
        if c["use_qk_norm"]:
            add(f"{layer}.attention.query_layernorm.weight", head_dim, fan_in=0)
            add(f"{layer}.attention.key_layernorm.weight", head_dim, fan_in=0)
        add(f"{layer}.attention.dense.weight", hidden, heads * head_dim)
        add(f"{layer}.post_attention_layernorm.weight", hidden, fan_in=0)
        if index < c["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        add(f"{layer}.mlp.gate.weight", count, hidden)
        if c["moe_router_enable_expert_bias"]:
            add(f"{layer}.mlp.gate.expert_bias", count, fan_in=-1)
        if c["num_shared_experts"]:
            mlp(f"{layer}.mlp.shared_experts", c["num_shared_experts"] * inner)
        if experts == "single":
            for e in range(count):
                mlp(f"{layer}.mlp.experts.{e}", inner)
        elif experts == "merged":
            join(f"{layer}.mlp.w1", (count, 2 * inner, hidden), layer, ("gate", "up"))
            join(f"{layer}.mlp.w2", (count, hidden, inner), layer, ("down",))
        else:
            join(f"{layer}.mlp.experts.gate_proj", (count, inner, hidden), layer, ("gate",))
            join(f"{layer}.mlp.experts.up_proj", (count, inner, hidden), layer, ("up",))
            join(f"{layer}.mlp.experts.down_proj", (count, hidden, inner), layer, ("down",))
    add("model.norm.weight", hidden, fan_in=0)
    if not c["tie_word_embeddings"]:
        add("lm_head.weight", c["vocab_size"], hidden)
    return out


def values(seed, name, elements, fan_in):
    """Uniform, with a standard deviation of 1 / sqrt(fan-in); norms lie around 1, router biases around 0."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    spread = np.float32(2 * (3 / fan_in) ** 0.5 if fan_in > 0 else 0.2)
    while elements > 0:
        part = random.random(min(elements, CHUNK), dtype=np.float32)
        part -= np.float32(0.5)
        part *= spread
        if fan_in == 0:
            part += np.float32(1)
        yield part
        elements -= part.size


def stored(part, dtype):
    if dtype == "bf16":
        bits = part.view(np.uint32)
        return ((bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16).astype("<u2").tobytes()
    return part.astype("<f2" if dtype == "f16" else "<f4").tobytes()


def write_file(path, tensors, seed, dtype):
    kind, width = DTYPES[dtype]
    header, at = {}, 0
    for name, shape, parts in tensors:
        size = width * sum(elements for _, elements, _ in parts)
        header[name] = dict(dtype=kind, shape=list(shape), data_offsets=[at, at + size])
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, parts in tensors:
            for part in parts:
                for piece in values(seed, *part):
                    f.write(stored(piece, dtype))
    return at


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of config.json")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--experts", choices=("single", "merged", "stacked"), default="single", help="their spelling")
    parser.add_argument("--shard-mb", type=int, default=0, help="most megabytes a file holds; 0: one file")
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    config = config_of(a.set)
    shards, room = [[]], a.shard_mb * 1000000
    filled = 0
    for tensor in tensors_of(config, a.experts):
        size = DTYPES[a.dtype][1] * sum(elements for _, elements, _ in tensor[2])
        if room and shards[-1] and filled + size > room:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    os.makedirs(a.dir, exist_ok=True)
    with open(os.path.join(a.dir, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f, indent=1)
    total, where = 0, {}
    for i, tensors in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if room else "model.safetensors"
        total += write_file(os.path.join(a.dir, name), tensors, a.seed, a.dtype)
        where.update({tensor[0]: name for tensor in tensors})
    if room:
        with open(os.path.join(a.dir, "model.safetensors.index.json"), "w", encoding="utf-8") as f:
            json.dump(dict(metadata=dict(total_size=total), weight_map=where), f, indent=1)
    print(f"{a.dir}: {total} bytes in {len(where)} tensors, {len(shards)} file{'s' if len(shards) > 1 else ''}")


if __name__ == "__main__":
    main()
