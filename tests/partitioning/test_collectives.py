"""Collectives read from compiled programs: real ones for eight devices, and lines in the forms that XLA writes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import AXES, Collective, group, make_mesh, read_collectives

SIZES = dict(pipe=1, data=2, fsdp=2, expert=1, context=1, tensor=2)
ROWS = P(("data", "fsdp", "tensor"))


def compiled(f, *shapes, sizes=SIZES, spec=ROWS):
    """The text of `f`, compiled as each device's part of a program on float32 arrays of these shapes."""
    mesh = make_mesh(sizes)
    shapes = [jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec)) for shape in shapes]
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)).lower(*shapes).compile().as_text()


def read(f, *shapes):
    return read_collectives(compiled(f, *shapes), SIZES)


def pairs(size):
    return [(i, (i + 1) % size) for i in range(size)]


# Real programs. Each device has a block of 8 x 16 of the 64 x 16 array: 512 bytes.

@pytest.mark.parametrize("axes", [("data",), ("fsdp",), ("tensor",), ("data", "fsdp"), ("data", "tensor"), ("fsdp", "tensor"),
                                  ("data", "fsdp", "tensor")])
def test_a_sum_extends_along_the_axes_that_it_names(axes):
    found, = read(lambda x: lax.psum(x, axes), (64, 16))
    n = 2 ** len(axes)
    assert found == Collective("all-reduce", axes, "float32", (8, 16), 512, 1, 0, found.source, n, True)
    assert "psum" in found.source
    assert found.moved == 2 * 512 * (n - 1) // n


def test_each_kind_has_the_bytes_of_its_full_array():
    def f(x):
        gathered = lax.all_gather(x, "fsdp", tiled=True)
        scattered = lax.psum_scatter(gathered.reshape(16, 16), ("data", "tensor"), tiled=True)
        exchanged = lax.all_to_all(x, "tensor", 0, 1, tiled=True)
        return x.at[:4].add(scattered).at[:4].add(exchanged[:, :16]) + lax.ppermute(x, "data", pairs(2))

    found = {one.kind: one for one in read(f, (64, 16))}
    facts = {kind: (one.axes, one.shape, one.bytes, one.group_size, one.moved) for kind, one in found.items()}
    assert facts == {
        "all-gather": (("fsdp",), (16, 16), 1024, 2, 512),
        "reduce-scatter": (("data", "tensor"), (16, 16), 1024, 4, 768),
        "all-to-all": (("tensor",), (2, 4, 16), 512, 2, 256),
        "collective-permute": (("data",), (8, 16), 512, 2, 512),
    }
    assert {(one.count, one.loops, one.exact) for one in found.values()} == {(1, 0, True)}


def test_loops_multiply():
    def inner(c, _):
        return lax.ppermute(jnp.sin(c), "fsdp", pairs(2)), None

    def outer(c, _):
        c = lax.scan(inner, c, None, length=5)[0]
        return lax.psum_scatter(jnp.sin(lax.all_gather(c, "tensor", tiled=True)), "tensor", tiled=True), None

    found = read(lambda x: lax.psum(lax.scan(outer, x, None, length=3)[0], "data"), (64, 16))
    assert {(one.kind, one.axes, one.count, one.loops, one.exact) for one in found} == {
        ("collective-permute", ("fsdp",), 15, 2, True), ("all-gather", ("tensor",), 3, 1, True),
        ("reduce-scatter", ("tensor",), 3, 1, True), ("all-reduce", ("data",), 1, 0, True)}


def test_a_branch_counts_as_taken_and_says_that_it_may_not_be():
    def f(x):
        return lax.scan(lambda c, _: (lax.cond(c.sum() > 0, lambda c: lax.psum(c, "data"), lambda c: c * 2, c), None),
                        x, None, length=7)[0]

    found, = read(f, (64, 16))
    assert (found.count, found.loops, found.exact, found.branch) == (7, 1, False, True)


def test_a_branch_outside_of_loops_is_none():
    found, = read(lambda x: lax.cond(x.sum() > 0, lambda x: lax.psum(x, "data"), lambda x: x * 2, x), (64, 16))
    assert (found.exact, found.branch) == (False, False)


def test_a_loop_whose_trips_depend_on_its_data_counts_once_and_says_so():
    found, = read(lambda x: lax.while_loop(lambda c: c.sum() < 100, lambda c: lax.psum(c, "tensor") + 1, x), (64, 16))
    assert (found.count, found.loops, found.exact) == (1, 1, False)


def test_collectives_that_the_compiler_put_in_are_found():
    mesh = make_mesh(SIZES)
    w, x = (jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec)) for shape, spec in [
        ((6, 64, 64), P(None, "fsdp", "tensor")), ((32, 64), P(("data", "fsdp")))])

    def f(w, x):
        def layer(x, w):
            w = lax.with_sharding_constraint(w, NamedSharding(mesh, P(None, "tensor")))
            return lax.with_sharding_constraint(jnp.sin(x @ w), NamedSharding(mesh, P(("data", "fsdp")))), None
        return lax.scan(layer, x, w)[0].sum()

    rows = group(read_collectives(jax.jit(f).lower(w, x).compile().as_text(), SIZES))
    weights, = (row for row in rows if row["kind"] == "all-gather" and row["axes"] == ("fsdp",))
    assert weights == dict(kind="all-gather", axes=("fsdp",), dtype="float32", in_loop=True, exact=True, count=6,
                           bytes=6 * 64 * 32 * 4, moved=6 * 64 * 16 * 4)
    totals = {row["axes"] for row in rows if row["kind"] == "all-reduce" and not row["in_loop"]}
    assert set(sum(totals, ())) >= {"data", "fsdp"}


def test_groups_that_are_a_part_of_an_axis_match_no_axes():
    sizes = dict.fromkeys(AXES, 1) | dict(data=2, tensor=4)

    def f(x):
        return lax.psum(x, "tensor", axis_index_groups=[[0, 1], [2, 3]])

    found, = read_collectives(compiled(f, (64, 16), sizes=sizes, spec=P(("data", "tensor"))), sizes)
    assert (found.axes, found.group_size, found.moved) == (("?",), 2, 512)


def test_one_device_moves_nothing():
    sizes = dict.fromkeys(AXES, 1) | dict(data=8)
    assert read_collectives(compiled(lambda x: lax.psum(x, "tensor"), (64, 16), sizes=sizes), sizes) == ()


# Lines as XLA writes them.

ADD = "%add (a: f32[], b: f32[]) -> f32[] {\n  ROOT %sum = f32[] add(%a, %b)\n}\n"


def program(*lines, computations=ADD):
    body = "".join(f"  {line}\n" for line in lines)
    return f"HloModule jit_f, num_partitions=8\n\n{computations}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}}}\n"


def one(line, sizes=SIZES):
    found, = read_collectives(program(line), sizes)
    return found


@pytest.mark.parametrize("groups, axes", [
    ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
    ("{{0,2},{1,3},{4,6},{5,7}}", ("fsdp",)),
    ("{{0,5},{1,4},{2,7},{3,6}}", ("?",)),
    ("{{0,1,2},{3,4,5},{6,7}}", ("?",)),
    ("{}", ("data", "fsdp", "tensor")),
    ("[4,2]<=[8]", ("tensor",)),
    ("[2,4]<=[8]", ("fsdp", "tensor")),
    ("[4,2]<=[2,4]T(1,0)", ("data",)),
    ("[2,4]<=[4,2]T(1,0)", ("data", "fsdp")),
    ("[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",)),
    ("mesh['pipe'=1,'data'=2,'fsdp'=2,'expert'=1,'context'=1,'tensor'=2] {'data','tensor'}", ("data", "tensor")),
    ("mesh['a'=4,'b'=2] {'a'}", ("data", "fsdp")),
    ("mesh['a'=4,'b'=2] {'a':(1)2}", ("data",)),
    ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", ("fsdp", "tensor")),
    ("mesh[a=2,b=4], device_ids=([0,2,4,6,1,3,5,7]) {a}", ("tensor",)),
])
def test_every_form_of_groups_is_read(groups, axes):
    found = one(f"%r = f32[4]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, use_global_device_ids=true, "
                "to_apply=%add")
    assert found.axes == axes


@pytest.mark.parametrize("numbers, axes", [
    ("{{0,1},{1,0}}", ("tensor",)), ("{{0,2},{1,3},{5,5}}", ("fsdp",)), ("{{0,4},{4,2}}", ("data", "fsdp"))])
def test_a_permute_extends_along_the_axes_it_crosses(numbers, axes):
    assert one(f"%p = f32[4]{{0}} collective-permute(%x), channel_id=1, source_target_pairs={numbers}").axes == axes


def test_a_start_and_its_done_count_once_and_the_result_is_what_counts():
    found = read_collectives(program(
        "%a = (bf16[4,16]{1,0}, bf16[8,16]{1,0}) all-gather-start(%x), replica_groups=[4,2]<=[8], dimensions={0}",
        "%a.done = bf16[8,16]{1,0} all-gather-done(%a)",
        "%b = ((f32[16,16]{1,0}), f32[8,16]{1,0}) reduce-scatter-start(%x), replica_groups=[4,2]<=[8], dimensions={0}, "
        "to_apply=%add",
        "%b.done = f32[8,16]{1,0} reduce-scatter-done(%b)",
        "%c = ((f32[], bf16[8,2]{1,0}), (f32[], bf16[8,2]{1,0})) all-reduce-start(%x, %y), replica_groups=[4,2]<=[8], "
        "to_apply=%add, output_to_operand_aliasing={{1}: (0, {})}",
        "%c.done = (f32[], bf16[8,2]{1,0}) all-reduce-done(%c)",
        "%d = (f32[3]{0}, f32[5]{0}) all-reduce-start(%x, %y), replica_groups=[4,2]<=[8], to_apply=%add",
        "%e = (s8[4]{0:T(8,128)S(1)}, s8[4]{0:T(8,128)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), "
        "source_target_pairs={{0,1}}",
        "%e.done = s8[4]{0} collective-permute-done(%e)"), SIZES)
    assert [(one.kind, one.dtype, one.shape, one.bytes) for one in found] == [
        ("all-gather", "bfloat16", (8, 16), 256), ("reduce-scatter", "float32", (16, 16), 1024),
        ("all-reduce", "float32", (), 4), ("all-reduce", "bfloat16", (8, 2), 32),
        ("all-reduce", "float32", (3,), 12), ("all-reduce", "float32", (5,), 20), ("collective-permute", "int8", (4,), 4)]


def test_a_combined_collective_is_one_for_each_array():
    line = ("%g = (f32[16,8]{1,0:T(8,128)(2,1)}, /*index=1*/f8e4m3fn[4,6]{0,1}, pred[2]{0}, s4[3]{0}) all-gather(%x, %y, %z, "
            '%w), channel_id=5, replica_groups=[4,2]<=[8], dimensions={0}, metadata={op_name="jit(f)/a[\\"calls=%no\\"]"}')
    found = read_collectives(program(line), SIZES)
    assert [(one.dtype, one.shape, one.bytes) for one in found] == [
        ("float32", (16, 8), 512), ("float8_e4m3fn", (4, 6), 24), ("bool", (2,), 2), ("int4", (3,), 2)]
    assert {one.source for one in found} == {'jit(f)/a[\\"calls=%no\\"]'}


SUM = "%{} (p: f32[4]) -> f32[4] {{\n  ROOT %r = f32[4]{{0}} all-reduce(%p), replica_groups=[4,2]<=[8], to_apply=%add\n}}\n"


def test_called_computations_count_each_time_they_are_called():
    wrapped = ADD + SUM.format("sum") + SUM.format("other") + SUM.format("unused")
    found = read_collectives(program(
        "%a = ((f32[4]{0}), f32[4]{0}, u32[]) async-start(%x), calls=%sum",
        "%b = ((f32[4]{0}), f32[4]{0}, u32[]) async-update(%a), calls=%sum",
        "%c = f32[4]{0} async-done(%b), calls=%sum",
        "%d = f32[4]{0} call(%x), to_apply=%sum",
        "%e = f32[4]{0} fusion(%x), kind=kCustom, calls=%sum",
        '%f = f32[4]{0} custom-call(%x), custom_call_target="k", called_computations={%other, %sum}',
        computations=wrapped), SIZES)
    assert [(one.count, one.loops, one.exact) for one in found] == [(4, 0, True), (1, 0, True)]


@pytest.mark.parametrize("branches", ["branch_computations={%sum, %other}", "true_computation=%sum, false_computation=%other"])
def test_both_spellings_of_a_conditional_are_read(branches):
    found = read_collectives(program(f"%c = f32[4]{{0}} conditional(%i, %x, %x), {branches}",
                                     computations=ADD + SUM.format("sum") + SUM.format("other")), SIZES)
    assert [(one.count, one.exact) for one in found] == [(1, False)] * 2


def test_one_computation_inside_and_outside_a_loop_is_told_apart():
    condition = "%more (p: f32[4]) -> pred[] {\n  ROOT %always = pred[] constant(true)\n}\n"
    found = read_collectives(program(
        "%d = f32[4]{0} call(%x), to_apply=%sum",
        '%w = f32[4]{0} while(%d), condition=%more, body=%sum, backend_config={"known_trip_count":{"n":"9"}}',
        computations=ADD + SUM.format("sum") + condition), SIZES)
    assert {(one.count, one.loops, one.exact) for one in found} == {(1, 0, True), (9, 1, True)}
    assert [(row["in_loop"], row["count"], row["bytes"], row["moved"]) for row in group(found)] == [
        (True, 9, 144, 144), (False, 1, 16, 16)]


@pytest.mark.parametrize("root, trips", [
    ("ROOT %lt = pred[] compare(%i, %n), direction=LT", 12),
    ("ROOT %lt = pred[] compare(s32[] %i, s32[] %n), direction=LT", 12),
    ("ROOT %lt = pred[] compare(%i, %n), direction=GT", 1),
    ("ROOT %both = pred[] and(%lt, %more)", 1),
])
def test_a_trip_count_that_is_not_known_is_guessed_from_the_condition_and_called_a_guess(root, trips):
    condition = ("%cond (p: (s32[], f32[4])) -> pred[] {\n  %i = s32[] get-tuple-element(%p), index=0\n"
                 f"  %n = s32[] constant(12)\n  {root}\n}}\n")
    fused = condition.replace("%cond ", "%fused ") + ("%cond (p: (s32[], f32[4])) -> pred[] {\n"
                                                      "  ROOT %f = pred[] fusion(%p), kind=kLoop, calls=%fused\n}\n")
    for computations in (condition, fused):
        found, = read_collectives(program("%w = f32[4]{0} while(%x), condition=%cond, body=%sum",
                                          computations=ADD + SUM.format("sum") + computations), SIZES)
        assert (found.count, found.loops, found.exact) == (trips, 1, False)


def test_the_ring_formulas():
    line = "%r = f32[8]{0} KIND(%x), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add"
    moved = {kind: one(line.replace("KIND", kind)).moved
             for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-broadcast")}
    assert moved == {"all-gather": 24, "reduce-scatter": 96, "all-reduce": 48, "all-to-all": 24, "collective-broadcast": 32}


def test_what_is_not_a_program_for_this_mesh_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        read_collectives("module @jit_f {\n}\n", SIZES)
    with pytest.raises(ValueError, match="for 8 devices"):
        read_collectives(program("%r = f32[4]{0} negate(%x)"), SIZES | dict(data=4))
    with pytest.raises(ValueError, match="device 7"):
        read_collectives(program("%r = f32[4]{0} all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%add")
                         .replace(", num_partitions=8", ""), SIZES | dict(data=1))


def test_rows_that_are_not_exact_say_so():
    exact = one("%r = f32[8]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add")
    assert [row["exact"] for row in group([exact, dataclasses.replace(exact, exact=False)])] == [False]
