"""Reports show what the layout says, exactly, and need no devices."""

import json
import subprocess
import sys

from partitioning import ArraySpec, ShardingConfig, memory_per_device, resolve, text, to_json
from partitioning.mesh import AXES
from partitioning.report import size_words

PARAMS = {"embed": {"embedding": ArraySpec((64, 32), "bfloat16", ("vocab", "embed"))},
          "norm": {"scale": ArraySpec((33,), "float32", ("embed",))}}
LAYOUT = resolve(dict.fromkeys(AXES, 1) | dict(fsdp=4, tensor=2), ShardingConfig(), PARAMS, {"mu": PARAMS},
                 {"hidden": ArraySpec((8, 16, 32), "float32", ("batch", "length", "embed"))})


def test_json_has_every_array_with_exact_bytes_and_survives_a_round_trip():
    report = json.loads(json.dumps(to_json(LAYOUT)))
    rows = {(row["kind"], row["path"]): row for row in report["arrays"]}
    assert set(rows) == {(kind, path) for kind in ("params", "gradients") for path in ("embed/embedding", "norm/scale")} | {
        ("optimizer", "mu/embed/embedding"), ("optimizer", "mu/norm/scale"), ("activations", "hidden")}
    table = rows["params", "embed/embedding"]
    assert (table["shape"], table["dtype"], table["dims"]) == ([64, 32], "bfloat16", ["vocab", "embed"])
    assert table["spec"] == ["tensor", "fsdp"] and table["rule"] == "vocab=tensor (default), embed=fsdp (ZeRO 3)"
    assert (table["bytes"], table["bytes_per_device"]) == (64 * 32 * 2, 64 * 32 * 2 // 8)
    assert rows["params", "norm/scale"]["bytes_per_device"] == 33 * 4 and rows["params", "norm/scale"]["rule"] == "replicated"
    assert rows["activations", "hidden"]["spec"] == ["fsdp", None, None]
    assert report["totals"]["params"] == {"bytes": 4096 + 132, "bytes_per_device": 512 + 132}
    assert report["mesh"]["fsdp"] == 4 and report["devices"] == 8
    assert memory_per_device(LAYOUT) == {"params": 644, "gradients": 644, "optimizer": 644}


def test_text_is_aligned_and_names_mesh_arrays_rules_totals_and_notes():
    shown = text(LAYOUT)
    lines = shown.splitlines()
    assert lines[0] == "8 devices: fsdp=4 x tensor=2"
    row = next(line for line in lines if line.startswith("  embed/embedding"))
    for part in ("64x32", "bfloat16", "(vocab, embed)", "(tensor, fsdp)", "4.0 KiB", "512 B",
                 "vocab=tensor (default), embed=fsdp (ZeRO 3)"):
        assert part in row
    heading = lines[lines.index("parameters") + 1]
    assert row.index("bfloat16") == heading.index("dtype") and row.index("(vocab") == heading.index("dims")
    assert "per device 644 B (644 bytes)" in shown
    assert "norm/scale" in shown[shown.index("notes"):]
    assert not any(line != line.rstrip() for line in lines)


def test_text_lists_gradients_one_by_one_only_where_they_differ_from_the_parameters():
    assert "each as its parameter" in text(LAYOUT)
    differ = resolve(LAYOUT.sizes, ShardingConfig(zero=2), PARAMS)
    assert "each as its parameter" not in text(differ)
    assert text(differ).count("embed/embedding") > text(LAYOUT).count(" embed/embedding")


def test_sizes_are_written_with_binary_units():
    assert [size_words(n) for n in (0, 1023, 1536, 3 * 2 ** 30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]


def test_importing_and_resolving_start_no_backend():
    program = """
import partitioning, sys
assert "jax" not in sys.modules, "importing the package alone must not import jax"
from partitioning import *
import partitioning as p
layout = p.resolve(p.resolve_sizes(p.MeshConfig(fsdp=-1), 512), p.ShardingConfig(),
                   {"a": {"kernel": p.ArraySpec((512, 512), "bfloat16", ("embed", "mlp"))}})
p.text(layout), p.to_json(layout)
import jax
assert not jax._src.xla_bridge._backends
"""
    subprocess.run([sys.executable, "-c", program], check=True)
