"""Reports show what the layout says, exactly, and need no devices."""

import dataclasses
import json
import subprocess
import sys

from partitioning import ArraySpec, Memory, ShardingConfig, memory_per_device, resolve, text, to_json
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


def test_text_lists_only_arrays_that_lie_otherwise_than_what_is_shown_already():
    shown = text(LAYOUT)
    assert shown.count("embed/embedding") == 1
    assert "gradients\n  each as its parameter" in shown and "optimizer state\n  mu: each as its parameter" in shown
    slots = {"mu": PARAMS, "nu": PARAMS, "row": {"norm": {"scale": ArraySpec((33,), "bfloat16", ("embed",))}}}
    differ = text(resolve(LAYOUT.sizes, ShardingConfig(zero=1), PARAMS, slots))
    assert "gradients\n  each as its parameter" in differ and "nu: each as in mu" in differ
    assert "mu/embed/embedding" in differ and "nu/embed" not in differ and "row/norm/scale" in differ
    assert "mu, nu: each as its gradient" in text(resolve(LAYOUT.sizes, ShardingConfig(zero=2), PARAMS, slots))


def test_copies_say_how_many_devices_hold_the_same_block():
    copies = {(row.kind, row.path): row.copies for row in LAYOUT.rows}
    assert copies["params", "embed/embedding"] == 1 and copies["params", "norm/scale"] == 8
    assert copies["activations", "hidden"] == 2
    assert all(row.copies * row.bytes == row.bytes_per_device * 8 for row in LAYOUT.rows)
    lines = text(LAYOUT).splitlines()
    heading, row = lines[3], next(line for line in lines if line.startswith("  norm/scale"))
    assert row[heading.index("copies"):heading.index("rule")].strip() == "8"
    assert {row["copies"] for row in to_json(LAYOUT)["arrays"]} == {1, 2, 8}


def collective(kind, axes, moved, in_loop=True, exact=True, dtype="bfloat16"):
    return dict(kind=kind, axes=axes, dtype=dtype, in_loop=in_loop, count=1200, bytes=2 * moved, moved=moved, exact=exact)


COLLECTIVES = [collective("all-gather", ("fsdp",), 3 * 2 ** 20),
               collective("reduce-scatter", ("data", "fsdp"), 2 ** 21, exact=False),
               collective("all-gather", ("fsdp",), 1024, in_loop=False, dtype="float32")]


def test_collectives_are_a_table_by_kind_and_axis_with_a_total():
    shown = text(LAYOUT, COLLECTIVES)
    lines = shown[shown.index("collectives of one training step"):].splitlines()
    assert [line.split() for line in lines[2:5]] == [
        ["all-gather", "fsdp", "bfloat16", "inside", "1,200", "6.0", "MiB", "3.0", "MiB"],
        ["all-gather", "fsdp", "float32", "outside", "1,200", "2.0", "KiB", "1.0", "KiB"],
        ["reduce-scatter", "data+fsdp", "bfloat16", "inside", "~1,200", "4.0", "MiB", "2.0", "MiB"]]
    assert lines[5] == "  total: 3,600 executions, 5.0 MiB moved per device (5,243,904 bytes)"
    assert "collectives of one training step\n  none\n" in text(LAYOUT, [])
    assert "collectives" not in text(LAYOUT)


def test_json_tells_a_step_that_moves_nothing_from_one_that_was_not_compiled():
    assert to_json(LAYOUT)["collectives"] is None and to_json(LAYOUT)["memory"] is None
    assert to_json(LAYOUT, [])["collectives"] == []
    report = json.loads(json.dumps(to_json(LAYOUT, COLLECTIVES, Memory("cpu", 1, 2, 3))))
    assert report["collectives"][1] == COLLECTIVES[1] | {"axes": ["data", "fsdp"]}
    assert report["memory"] == dict(platform="cpu", state=1, temporary=2, output=3, needed=6, capacity=None, fits=None, room=None,
                                    suggestions=[])


GIB = 2 ** 30
TIGHT = Memory("NVIDIA H200", state=100 * GIB, temporary=53 * GIB, output=GIB // 4, capacity=141 * GIB,
               suggestions=(("config.train.x=1", 150 * GIB), ("config.train.remat=full", 60 * GIB),
                            ("config.mesh.y=2", 160 * GIB)))


def test_memory_says_whether_the_step_fits_and_what_would_help():
    shown = text(LAYOUT, memory=TIGHT)
    assert "memory of one training step, per device (NVIDIA H200)" in shown
    assert "does not fit: needs 153.2 GiB of 141.0 GiB, 12.2 GiB too much" in shown
    most, other = [line.strip() for line in shown.splitlines() if "would help" in line]
    assert most == "what would help most: config.train.remat=full -> needs 60.0 GiB (fits)"
    assert other == "what would help: config.train.x=1 -> needs 150.0 GiB" and "config.mesh.y" not in shown
    fits = dataclasses.replace(TIGHT, state=GIB, suggestions=())
    assert "fits: needs 54.2 GiB of 141.0 GiB, 86.8 GiB to spare" in text(LAYOUT, memory=fits)
    assert (fits.needed, fits.fits, TIGHT.fits, TIGHT.room) == (54 * GIB + GIB // 4, True, False, -12 * GIB - GIB // 4)
    exact = dataclasses.replace(fits, capacity=fits.needed)
    assert exact.fits and exact.room == 0
    unknown = dataclasses.replace(fits, capacity=None)
    assert "needs 54.2 GiB; what one NVIDIA H200 device has is not known" in text(LAYOUT, memory=unknown)
    assert [one["needed"] for one in to_json(LAYOUT, memory=TIGHT)["memory"]["suggestions"]] == [60 * GIB, 150 * GIB]


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
