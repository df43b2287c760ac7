"""The page is well-formed, stands alone, escapes what users write, and shows what the layout says."""

import html.parser
import json
import pathlib
import re
import shutil
import subprocess

import pytest
from jax.sharding import NamedSharding

from partitioning import ArraySpec, Memory, ShardingConfig, html as page_of, make_mesh, resolve
from partitioning.mesh import AXES
from partitioning.page import DRAWN, colour

SCRIPT = pathlib.Path(__file__).parents[2] / "partitioning" / "page.js"
PARAMS = {"embed": {"embedding": ArraySpec((64, 32), "bfloat16", ("vocab", "embed"))},
          "layers": {"kernel": ArraySpec((4, 32, 128), "float32", ("layers", "embed", "mlp"))},
          "norm": {"scale": ArraySpec((33,), "float32", ("embed",))}, "count": ArraySpec((), "int32", ())}
ACTIVATIONS = {"hidden": ArraySpec((8, 16, 32), "float32", ("batch", "length", "embed"))}
COLLECTIVES = [dict(kind=kind, axes=("fsdp",), dtype="bfloat16", in_loop=True, count=1, bytes=10, moved=moved, exact=True)
               for kind, moved in (("all-gather", 8), ("reduce-scatter", 4))]
MEMORY = Memory("NVIDIA H200", 30, 20, 0, 40, suggestions=(("config.train.remat=full", 35),))


def layout_of(params=PARAMS, activations=ACTIVATIONS, sharding=None, **sizes):
    return resolve(dict.fromkeys(AXES, 1) | sizes, sharding or ShardingConfig(), params, {"mu": params}, activations)


LAYOUT = layout_of(data=2, fsdp=2, tensor=2)
PAGE = page_of(LAYOUT, COLLECTIVES, MEMORY)


class Reader(html.parser.HTMLParser):
    """Checks that elements nest, and keeps (tag, attributes, text) of each."""

    def __init__(self, page):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert len(dict(attributes)) == len(attributes)
        element = [tag, dict(attributes), ""]
        self.elements.append(element)
        if tag not in ("meta", "input"):
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for element in self.open:
            element[2] += data

    def all(self, tag, **attributes):
        return [(given, text) for name, given, text in self.elements
                if name == tag and all(given.get(key.rstrip("_")) == value for key, value in attributes.items())]


READ = Reader(PAGE)


def test_the_page_is_well_formed_and_its_ids_are_unique():
    ids = [given["id"] for _, given, _ in READ.elements if "id" in given]
    assert len(ids) == len(set(ids)) and PAGE.startswith("<!DOCTYPE html>")
    for layout in (layout_of(), layout_of({}, {}), layout_of({"count": ArraySpec((), "int32", ())}, {}, fsdp=8)):
        Reader(page_of(layout, [], None))


def test_the_page_needs_nothing_from_elsewhere():
    assert not re.search(r"https?:|src=|@import|url\(|<link|fetch\(", PAGE)
    assert {given["href"] for given, _ in READ.all("a")} == {"#picture"}


def test_what_users_write_is_escaped():
    bad = "</script><b>&\"'"
    params = {bad: ArraySpec((8,), "float32", (bad,))}
    layout = layout_of(params, {}, ShardingConfig(rules={bad: None}, overrides=((re.escape(bad), ("tensor",)),)), tensor=8)
    page = page_of(layout, title=bad, links={"tensor": bad})
    assert bad not in page and "<b>&" not in page
    read = Reader(page)
    assert read.all("title")[0][1] == bad and any(text == bad for _, text in read.all("a"))
    assert f"{bad} 7:8" in [given.get("title") for given, _ in read.all("button")]


def test_every_array_is_in_the_tables_with_its_exact_bytes():
    lines = READ.all("tr")
    for i, row in enumerate(LAYOUT.rows):
        (text,) = [text for given, text in lines if given.get("id") == f"array-{i}"]
        assert row.path in text and row.rule in text and row.kind in text
    values = [int(given["data-value"]) for given, _ in READ.all("td", class_="number") if "data-value" in given]
    assert values[:len(LAYOUT.rows) * 2:2] == [row.bytes for row in LAYOUT.rows]
    assert [option["value"] for option, _ in READ.all("option")] == [f"array-{i}" for i in range(len(LAYOUT.rows))]


@pytest.mark.parametrize("layout", [LAYOUT, layout_of(fsdp=8), layout_of(sharding=ShardingConfig(zero=0), data=4, tensor=2)],
                         ids=["three axes", "fsdp", "replicated"])
def test_each_device_is_drawn_with_the_block_that_jax_gives_it(layout):
    read, mesh = Reader(page_of(layout)), make_mesh(layout.sizes)
    pictures = {given["id"]: given["data-picture"] for given, _ in read.all("tr") if "data-picture" in given}
    titles, figure = {}, None
    for tag, given, _ in read.elements:
        if tag == "figure":
            figure = titles[given["id"]] = {"held": given["data-held"].split()}
        elif tag == "button" and "data-device" not in given:
            figure[given["data-block"]] = given["title"]
    for i, row in enumerate(layout.rows):
        shown = titles[f"picture-{pictures[f'array-{i}']}"]
        found = NamedSharding(mesh, row.spec).devices_indices_map(row.shape)
        for device, block in zip(mesh.devices.flat, shown["held"], strict=True):
            words = [f"{dim} {'%d:%d' % part.indices(size)[:2]}" for dim, part, size in zip(row.dims, found[device], row.shape)]
            assert shown[block] == (", ".join(words) or "the scalar"), (row.path, device)


def test_the_picture_shows_the_largest_parameter_without_a_script():
    (shown,) = [given for given, _ in READ.all("figure") if "hidden" not in given]
    devices = [given for given, _ in READ.all("button") if "data-device" in given]
    assert [given["data-block"] for given in devices] == shown["data-held"].split() and len(devices) == 8
    assert "layers/kernel" in READ.all("dl")[0][1]
    same = {(given["data-block"], given["class"]) for given in devices}
    assert len(same) == len({block for block, _ in same}) == len({place for _, place in same}) == 4


def test_a_large_mesh_is_drawn_in_part_and_the_page_says_so():
    params = {f"kernel{i}": ArraySpec((512, 512 * (i + 1)), "bfloat16", ("embed", "mlp")) for i in range(20)}
    page = page_of(layout_of(params, {}, fsdp=64, tensor=8))
    assert "64 of 512 devices are drawn: the first 8 of 64 along fsdp." in page
    assert len([given for given, _ in Reader(page).all("button") if "data-device" in given]) == 64
    assert len(page.encode()) < 500_000


def test_collectives_and_memory_are_shown_where_a_step_was_compiled():
    assert "does not fit: needs 50 B of 40 B, 10 B too much" in PAGE and "config.train.remat=full -&gt; needs 35 B (fits)" in PAGE
    assert "width:100.0%" in PAGE and "width:50.0%" in PAGE and "total: 2 executions" in PAGE
    bare = page_of(LAYOUT)
    assert "Collectives" not in bare and "Memory of" not in bare
    assert "Collectives of one training step" in page_of(LAYOUT, [])


def test_the_same_layout_makes_the_same_page():
    assert page_of(layout_of(data=2, fsdp=2, tensor=2), COLLECTIVES, MEMORY) == PAGE


def test_colours_are_distinct_and_black_is_readable_on_them():
    def luminance(code):
        parts = [int(code[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))

    colours = [colour(place) for place in range(DRAWN)]
    assert len(set(colours)) == DRAWN
    assert min((luminance(one) + 0.05) / 0.05 for one in colours) >= 4.5     # the contrast that WCAG 2.1 asks of text


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_matches_sorts_and_colours():
    program = f"""
const page = require({json.dumps(str(SCRIPT))});
console.log(JSON.stringify([
  page.colours(["7", "5", "7", "0"], ["0", "5", "7"]),
  ["10", "9", "b", "a"].sort(page.compare), ["4096", "512", "33"].sort(page.compare),
  page.matches("mu/layers/Kernel", "kernel mu"), page.matches("mu/layers/kernel", "nu kernel"), page.matches("x", "")]));
"""
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True)
    assert json.loads(done.stdout) == [[2, 1, 2, 0], ["9", "10", "a", "b"], ["33", "512", "4096"], True, False, True], done.stderr
