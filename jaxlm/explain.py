"""`python -m jaxlm.explain`: where every array of a configuration lies, why, and what it weighs on each device.

    python -m jaxlm.explain --config=llama3_70b --simulate_devices=512

Nothing is compiled or allocated and no accelerator is needed: the answer comes from shapes and the declared tables. It
is the layout that training on that number of devices uses.
"""

import json
import pathlib
import sys

from jaxlm.commandline import configured, parser, run
from partitioning.declaration import DeclarationError


def arguments():
    """The command's flags."""
    out = parser("jaxlm.explain", "Print every array's shape, dims, sharding and bytes per device, and what decided it.")
    out.add_argument("--html", metavar="FILE", help="also write a page to look at, with a picture of which device holds what")
    out.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return out


def main(flags) -> None:
    """Prints the report for the devices that are there, or for as many as --simulate_devices says."""
    config = configured(flags.config, flags.overrides)
    page_file = None if flags.html is None else _writable(flags.html)
    import jax                                 # after the configuration has been read: mistakes in it answer at once

    from jaxlm.job import build_job
    from partitioning import page, report
    layout = build_job(config, flags.simulate_devices or jax.device_count()).layout
    if page_file is not None:
        page_file.write_text(page.html(layout, title=f"Sharding of {flags.config}"), "utf-8")
    if flags.json:
        print(json.dumps(report.to_json(layout)))
    else:
        print(report.text(layout), end="")


def _writable(name: str) -> pathlib.Path:
    """The file behind --html, if it can be one."""
    path = pathlib.Path(name)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"would lie in {path.parent}, which is no folder"
        raise DeclarationError(f"--html={name} {what}; give the name of a file, such as --html=sharding.html.")
    return path


if __name__ == "__main__":
    sys.exit(run(main, arguments()))
